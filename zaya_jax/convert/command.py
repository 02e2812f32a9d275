"""`zaya convert`: conversion of weights to and from PyTorch, and inspection of a folder of weights."""

import argparse
import dataclasses
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Sequence

import numpy as np

from zaya_jax.config import is_inside
from zaya_jax.convert.adapter_options import (
    add_adapter_options,
    check_adapter_options,
    requested_adapter,
    weighted_adapters,
)
from zaya_jax.convert.card_facts import check_license, figures_of_file
from zaya_jax.convert.companion_files import Companions
from zaya_jax.convert.inspection import inspect
from zaya_jax.convert.model_card import CARD, adapter_card
from zaya_jax.convert.nonfinite import describe_nonfinite
from zaya_jax.convert.output_files import (
    TargetLayout,
    notes,
    parse_dtype,
    pytorch_files,
    run_folder_files,
)
from zaya_jax.convert.peft import AdaptedWeights, PeftAdapter
from zaya_jax.convert.pytorch.folder import PytorchWeights, notes_on
from zaya_jax.convert.quantized.codecs import CODECS
from zaya_jax.convert.quantized.export import Quantization
from zaya_jax.convert.quantized.layer_errors import measure_errors, num_quantized
from zaya_jax.convert.quantized.report import HeldOutLoss, add_to_card, card_section, table
from zaya_jax.convert.stream import PlannedFile, Source, write_folder
from zaya_jax.convert.verify import (
    check_files,
    comparable_slices,
    compare_logits,
    compare_tensors,
    is_quantized,
    logits_memory,
    num_bytes,
    num_values,
)
from zaya_jax.convert.weight_folder import WeightFolder, open_weight_folder
from zaya_jax.data.tokenizers.tokenizer import BYTE_TOKENIZERS
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.files.durable import CHECKSUMS, PARTIAL
from zaya_jax.files.hub import Upload
from zaya_jax.options import Parser
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.progress import ByteProgress, CountProgress

MeasureLoss = Callable[[Source, pathlib.Path, Sequence[str]], HeldOutLoss | str]
"""Function of the weights, the folder of the quantized ones, and texts; returns the losses or a reason."""
LAYOUTS = ("native", "legacy", "zaya")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str] | None = None, *, measure_loss: MeasureLoss | None = None) -> None:
    """Runs `zaya convert` or `zaya convert inspect`.

    Args:
      argv: arguments that follow `zaya convert` on the command line.
      measure_loss: function that evaluates both folders; None if losses cannot be measured.

    Raises:
      UserError: if the weights cannot be converted.
    """
    arguments = list(argv or ())
    # "inspect" is a word in the place of SRC; a folder of that name can be given as ./inspect.
    if arguments[:1] == ["inspect"]:
        inspect(_inspect_parser().parse_args(arguments[1:]).path)
        return
    options = _parser().parse_args(arguments)
    target = pathlib.Path(options.target)
    check_adapter_options(options)
    # Checked before the weights are opened, which may download them.
    plan_options = _PlanOptions(
        parse_dtype(options.dtype), parse_size(options.max_shard_size), _quantization(options)
    )
    check_license(options.license)
    adapters = weighted_adapters(options)
    with open_weight_folder(options.source, options.weights) as opened:
        if adapters and not options.adapters_only:
            opened = dataclasses.replace(opened, source=AdaptedWeights(opened.source, adapters))
        # The default converts to the other kind of folder. A run folder has no quantized form.
        is_pytorch = opened.layout == "zaya" or plan_options.quantization is not None
        layout: TargetLayout = options.layout or ("native" if is_pytorch else "zaya")
        layout = "peft" if options.adapters_only else layout
        upload = _upload(options, layout)
        # With --verify, an existing DST is only verified; with --push, it is verified before it is sent.
        verifies = options.verify or (upload is not None and target.is_dir() and not options.overwrite)
        if _must_convert(opened.folder, target, overwrite=options.overwrite, verify=verifies):
            _convert_new(opened, options, layout, adapters, plan_options, measure_loss)
        if verifies:
            verify(opened, target)
        # Last, so that only a folder that is complete and verified leaves the machine.
        if upload is not None:
            step = f" of step {opened.step:,}" if opened.run is not None else ""
            print(f"pushed: {upload.send(target, f'Weights{step}, {layout} layout')}")


@dataclasses.dataclass(frozen=True)
class _PlanOptions:
    """Options of the output that do not depend on the weights."""

    dtype: np.dtype | None
    max_shard_bytes: int
    quantization: Quantization | None


def _convert_new(
    opened: WeightFolder,
    options: argparse.Namespace,
    layout: TargetLayout,
    adapters: Sequence[tuple[PeftAdapter, float]],
    plan_options: _PlanOptions,
    measure_loss: MeasureLoss | None,
) -> None:
    """Writes a folder that does not exist, or that --overwrite replaces."""
    target = pathlib.Path(options.target)
    if options.overwrite:
        _check_nothing_is_lost(opened, target)
    companions = _companions(opened, options, layout)
    if options.adapters_only:
        adapter = requested_adapter(opened, options, adapters, companions.facts)
        card = adapter_card(companions.facts, companions.story)
        files = [*adapter.files(plan_options.dtype), PlannedFile(CARD, card)]
    else:
        files = plan(opened, companions, target, layout, plan_options)
    convert(opened, files, target, layout, overwrite=options.overwrite)
    # Others need to know it; for a folder of this machine the note would be noise.
    if options.push is not None and companions.facts.license is None:
        print("note: the model card has no license; name one with --license, such as apache-2.0")
    if plan_options.quantization is not None:
        loss = _measured_loss(opened, target, options.text, measure_loss)
        report_quantization(opened, target, plan_options.quantization, loss)


def _quantization(options: argparse.Namespace) -> Quantization | None:
    """What the options quantize; None for nothing.

    Raises:
      UserError: for options that do not belong together.
    """
    if options.quantize is None:
        for name in ("quantize_embedding", "expert_tensors", "text"):
            if getattr(options, name):
                raise UserError(f"--{name.replace('_', '-')} needs --quantize={'|'.join(CODECS)}")
        return None
    if options.adapters_only:
        raise UserError("--quantize and --adapters-only cannot be combined; adapters stay in floating point")
    if options.layout == "zaya":
        raise UserError("--quantize writes a PyTorch folder; use --layout native or legacy, not zaya")
    return Quantization(options.quantize, options.quantize_embedding, options.expert_tensors or "separate")


def _measured_loss(
    opened: WeightFolder, target: pathlib.Path, texts: Sequence[str] | None, measure: MeasureLoss | None
) -> HeldOutLoss | str:
    # The card says that there is no figure, rather than nothing.
    if not texts or measure is None:
        return "the loss was not measured; --text FILE... measures it on held-out text"
    return measure(opened.source, target, texts)


def report_quantization(
    opened: WeightFolder, target: pathlib.Path, quantization: Quantization, loss: HeldOutLoss | str
) -> None:
    """Measures errors by layer, prints them with the loss, and adds both to the model card."""
    # The written files are opened as any folder, with all checks of a reader.
    with open_weight_folder(target) as written:
        assert isinstance(written.source, PytorchWeights), "quantized weights are in a PyTorch folder"
        with CountProgress("comparing", num_quantized(written.source)) as progress:
            errors = measure_errors(opened.source, written.source, progress)
    print(table(errors))
    print(f"note: {loss}" if isinstance(loss, str) else str(loss))
    add_to_card(target, card_section(quantization, errors, loss))


def _upload(options: argparse.Namespace, layout: TargetLayout) -> Upload | None:
    """The upload that the options request; None for none.

    Raises:
      UserError: for options that do not belong together, or if the hub refuses.
    """
    if options.push is None:
        if options.private:
            raise UserError("--private needs --push ORGANIZATION/NAME")
        return None
    if layout == "zaya":
        raise UserError("--push uploads a PyTorch folder; add --layout native or legacy")
    target = pathlib.Path(options.target)
    # `verify` reads weights, not adapters; and a folder of something else must not be published.
    can_verify = layout != "peft" and (target / CHECKSUMS).is_file() and (target / CARD).is_file()
    if target.exists() and not options.overwrite and not can_verify:
        raise UserError(f"{target} already exists, and cannot be verified before the upload; add --overwrite")
    return Upload(options.push, private=options.private)


def _companions(opened: WeightFolder, options: argparse.Namespace, layout: TargetLayout) -> Companions:
    """The companions of the weights, with the license and the evaluations that the options name."""
    if options.eval and layout == "zaya":
        raise UserError("--eval adds figures to a model card, which a run folder does not have; remove it")
    companions = opened.companions()
    facts = companions.facts
    figures = [
        figure
        for file in options.eval or ()
        for figure in figures_of_file(file, step=opened.step, weights=options.weights)
    ]
    facts = dataclasses.replace(
        facts, license=options.license or facts.license, figures=(*facts.figures, *figures)
    )
    return dataclasses.replace(companions, facts=facts)


def _inspect_parser() -> Parser:
    parser = Parser(
        "convert inspect",
        "Show the tensors of a folder of weights, and whether it fits on this machine.",
        (
            "zaya convert inspect runs/tiny",
            "zaya convert inspect ZAYA1-8B",
            "zaya convert inspect ./inspect",
        ),
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a run folder, a folder of PyTorch weights, or the id of a model on the Hugging Face hub",
    )
    return parser


def _parser() -> Parser:
    parser = Parser(
        "convert",
        "Convert weights between run folders and PyTorch folders. The layout of SRC is detected. After an "
        "interruption, run the same command again to resume. `zaya convert inspect PATH` shows a folder's "
        "tensors.",
        (
            "zaya convert ZAYA1-8B runs/zaya1_8b                          # from Hugging Face to a run",
            "zaya convert runs/tiny exported --dtype bfloat16 --verify    # from a run to Hugging Face",
            "zaya convert ZAYA1-8B-legacy ZAYA1-8B --layout native        # from one layout to the other",
            "zaya convert ZAYA1-8B small --quantize=mxfp4 --text book.txt # 4-bit experts, loss before and "
            "after",
            "zaya convert ZAYA1-8B-FP8-Experts runs/zaya1_8b              # a quantized release becomes a "
            "run",
            "zaya convert runs/tiny exported --license mit --push me/tiny # with a model card, to the hub",
            "zaya convert runs/mine adapter --adapters-only               # PEFT's format",
            "zaya convert ZAYA1-8B runs/both --adapter a=0.5 --adapter b  # weights with two adapters merged",
            "zaya convert inspect ZAYA1-8B                                # tensors, totals, what fits",
        ),
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a run folder, a folder of PyTorch weights in either layout, or the id of a model on the "
        "Hugging Face hub (ORGANIZATION/NAME, or ORGANIZATION/NAME@REVISION)",
    )
    parser.add_argument("target", metavar="DST", help="folder to create; it appears when it is complete")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="layout of DST; zaya is a run folder (default: native from a run, zaya from PyTorch)",
    )
    parser.add_weights_option()
    parser.add_argument(
        "--dtype", help="type of the weights: float32, bfloat16 or float16 (default: that of SRC)"
    )
    parser.add_argument("--max-shard-size", default="5GB", help="maximum size of a safetensors file")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read both folders back and compare them; also if DST already exists",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a DST that zaya convert wrote")
    add_adapter_options(parser)
    _add_card_options(parser)
    _add_hub_options(parser)
    _add_quantization_options(parser)
    return parser


def _add_card_options(parser: Parser) -> None:
    group = parser.add_argument_group("the model card, README.md of DST")
    group.add_argument(
        "--license",
        metavar="ID",
        help="license of the weights, by the hub's identifier, such as apache-2.0 (default: that of SRC's "
        "card)",
    )
    group.add_argument(
        "--eval",
        nargs="+",
        metavar="FILE",
        help="results of zaya eval --json FILE, for the same weights; held-out losses and tasks of a run "
        "are in the card anyway",
    )


def _add_hub_options(parser: Parser) -> None:
    group = parser.add_argument_group("the Hugging Face hub (needs the package huggingface_hub)")
    group.add_argument(
        "--push",
        metavar="ID",
        help="upload DST to the repository ORGANIZATION/NAME, which is created if it does not exist; an "
        "existing DST is verified first",
    )
    group.add_argument("--private", action="store_true", help="create the repository as a private one")


def _add_quantization_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "quantized weights",
        "Experts are quantized, in compressed-tensors' form; the rest stays in floating point. Errors by "
        "layer\n"
        "are printed and added to the model card. zaya generate, chat, serve and eval load the folder.",
    )
    group.add_argument(
        "--quantize",
        choices=list(CODECS),
        help="format of the experts: fp8 (E4M3) and int8 with one scale per output, mxfp4 (E2M1) with one "
        "per 32 inputs",
    )
    group.add_argument(
        "--quantize-embedding",
        action="store_true",
        help="store the embedding, which is also the head, in int8 with one scale per token",
    )
    group.add_argument(
        "--expert-tensors",
        choices=("separate", "stacked"),
        help="tensors of the native layout: one per expert and projection, as llm-compressor, vLLM and "
        "SGLang name them, or one stack per layer, as in Zyphra's releases (default: separate)",
    )
    group.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 files of held-out text: measure the loss before and after",
    )


def parse_size(text: str) -> int:
    """Number of bytes of a size such as "5GB".

    Raises:
      UserError: if the text is not a size.
    """
    match = re.fullmatch(r"(\d{1,6})(KB|MB|GB|)", text)
    if not match or int(match[1]) == 0:
        raise UserError(f'--max-shard-size is "{text}"; it must be a size such as 5GB, 500MB or 800KB')
    return int(match[1]) * _UNITS[match[2]]


def _must_convert(source: pathlib.Path, target: pathlib.Path, *, overwrite: bool, verify: bool) -> bool:
    """Whether DST must be created. An existing folder is only replaced if `zaya convert` wrote it."""
    # Replacing the source would remove the weights that are being read.
    if is_inside(target, source):
        raise UserError(f"{target} is {source} or inside it; choose another folder")
    if not target.exists():
        return True
    if overwrite:
        # Only this command writes that file, so other folders are never removed.
        if not (target / CHECKSUMS).is_file():
            raise UserError(
                f"{target} was not written by zaya convert (it has no {CHECKSUMS}); remove it yourself, or "
                "choose another folder"
            )
        return True
    if verify and target.is_dir():
        print(f"{target} already exists; verifying it")
        return False
    raise UserError(f"{target} already exists; add --overwrite to replace a folder that zaya convert wrote")


def _check_nothing_is_lost(opened: WeightFolder, target: pathlib.Path) -> None:
    """Checks that the folder to be replaced contains neither the source nor the tokenizer of its run."""
    # The tokenizer of a run may be in another folder, which must survive as well.
    tokenizer = opened.run.data.tokenizer if opened.run is not None else "byte"
    for path in (opened.folder, *(() if tokenizer in BYTE_TOKENIZERS else (tokenizer,))):
        if is_inside(path, target):
            raise UserError(f"{path} is inside {target}, which would be replaced; choose another folder")


def plan(
    opened: WeightFolder,
    companions: Companions,
    target: pathlib.Path,
    layout: TargetLayout,
    options: _PlanOptions,
) -> list[PlannedFile]:
    """Plans all files of a conversion."""
    assert layout != "peft", "an adapter has its own files"
    if layout == "zaya":
        return run_folder_files(
            opened.source,
            companions,
            target,
            dtype=options.dtype,
            run=opened.run,
            step=opened.step,
        )
    return pytorch_files(
        opened.source,
        layout,
        companions,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        quantization=options.quantization,
    )


def convert(
    opened: WeightFolder,
    files: list[PlannedFile],
    target: pathlib.Path,
    layout: TargetLayout,
    *,
    overwrite: bool,
) -> None:
    """Writes the files and prints a summary."""
    # Sizes are known in advance, which gives exact progress.
    size = sum(file.size for file in files)
    _clear_remains(target)
    start = time.monotonic()
    try:
        with ByteProgress(f"{opened.layout} to {layout}", size) as progress:
            report = write_folder(opened.source, files, target, progress, replace=overwrite)
    # Errors of a full or failing disk often lack the file name.
    except OSError as error:
        error.filename = error.filename or str(target)
        error.add_note("run the same command again to resume")
        raise
    seconds = time.monotonic() - start
    resumed = f", {report.resumed / 1e9:.2f} GB of them by an earlier attempt" if report.resumed else ""
    step = f" of step {opened.step:,}" if opened.run is not None else ""
    # Router biases are included, unlike in the number of parameters.
    values = sum(block.num_values for file in files for block in file.blocks)
    print(
        f"{target}: {values:,} values{step} in {len(files):,} files, {size / 1e9:.2f} GB"
        f"{resumed}, {seconds:.1f} s ({(size - report.resumed) / 1e9 / seconds:.2f} GB/s)"
    )
    # Notes come last, after the result, so that they are not overlooked.
    about_source = notes_on(opened.pytorch) if opened.pytorch is not None else ()
    for note in (*notes(opened.source, layout), *about_source, *describe_nonfinite(report.nonfinite)):
        print(f"note: {note}")


def _clear_remains(target: pathlib.Path) -> None:
    """Removes the temporary folder of a conversion that was killed after publishing its result."""
    # If content is gone, the rename has succeeded and only the cleanup was interrupted.
    aside = target.with_name(target.name + PARTIAL)
    if target.exists() and aside.is_dir() and not (aside / "content").exists():
        shutil.rmtree(aside)


def verify(opened: WeightFolder, target: pathlib.Path) -> None:
    """Compares both folders and prints the result.

    Raises:
      UserError: if they differ; the message names the first difference.
    """
    with open_weight_folder(target) as converted:
        # Checksums first: comparing damaged files would report a confusing difference.
        if (damage := check_files(converted, target)) is not None:
            raise DamagedError(damage)
        with ByteProgress("comparing", num_bytes(converted)) as progress:
            difference = compare_tensors(opened, converted, progress)
        if difference is not None:
            raise UserError(f"{target} differs: {difference}")
        slices, are_quantized = comparable_slices(opened, converted), is_quantized(converted)
        print(
            f"verified: all {num_values(slices):,}{' other' * are_quantized} values are bitwise equal, and "
            "all "
            "files match their checksums"
        )
        # Their errors by layer are in the model card.
        if are_quantized:
            return
        needed, available = logits_memory(converted.source.config), available_memory()
        # Skipping is better than being killed for memory after a successful conversion.
        if needed > available:
            sizes = f"{needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free"
            print(f"logits were not compared: that needs {sizes}")
            return
        for line in compare_logits(opened, converted):
            print(f"verified: {line}")
