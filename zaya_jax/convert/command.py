"""`zaya convert`: weights to and from PyTorch, and what a folder of weights holds."""

import pathlib
import re
import shutil
import time
from collections.abc import Sequence

from zaya_jax.config import lies_in
from zaya_jax.convert.inspection import inspect
from zaya_jax.convert.peft import adapter_files
from zaya_jax.convert.plans import (
    MAX_SHARD_BYTES,
    TargetLayout,
    notes,
    parse_dtype,
    pytorch_files,
    run_folder_files,
)
from zaya_jax.convert.stream import PlannedFile, write_folder
from zaya_jax.convert.verify import (
    check_files,
    compare_logits,
    compare_tensors,
    logits_memory,
    num_bytes,
    num_values,
)
from zaya_jax.convert.weight_folder import WeightFolder, open_weight_folder
from zaya_jax.data.tokenizer import BYTE_TOKENIZERS
from zaya_jax.durable import CHECKSUMS, PARTIAL, Damaged
from zaya_jax.options import Parser
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.progress import ByteProgress

LAYOUTS = ("native", "legacy", "zaya")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya convert`, or `zaya convert inspect`, with the words behind it.

    Raises:
      ValueError: for whatever cannot be converted, in one sentence.
    """
    arguments = list(argv or ())
    if arguments[:1] == ["inspect"]:
        inspect(_inspect_parser().parse_args(arguments[1:]).path)
        return
    options = _parser().parse_args(arguments)
    source, target = pathlib.Path(options.source), pathlib.Path(options.target)
    dtype, shard_bytes = parse_dtype(options.dtype), parse_size(options.max_shard_size)
    if options.adapters_only and (options.layout or options.verify):
        raise ValueError("--adapters-only has a layout of its own, and nothing to verify; give it alone")
    with open_weight_folder(source) as opened:
        layout: TargetLayout = options.layout or ("native" if opened.layout == "zaya" else "zaya")
        layout = "peft" if options.adapters_only else layout
        if _must_convert(source, target, overwrite=options.overwrite, verify=options.verify):
            if options.overwrite:
                _check_nothing_is_lost(opened, source, target)
            files = plan(opened, target, layout, dtype=dtype, max_shard_bytes=shard_bytes)
            convert(opened, files, target, layout, overwrite=options.overwrite)
        if options.verify:
            verify(opened, target)


def _inspect_parser() -> Parser:
    parser = Parser(
        "convert inspect",
        "Shows what a folder of weights holds, and what would not fit on this machine.",
        (
            "zaya convert inspect runs/tiny",
            "zaya convert inspect ZAYA1-8B",
            "zaya convert inspect ./inspect",
        ),
    )
    parser.add_argument("path", metavar="PATH", help="a run, or a folder of PyTorch weights")
    return parser


def _parser() -> Parser:
    parser = Parser(
        "convert",
        "Converts weights between a run and PyTorch folders. What SRC is, its files tell. After an "
        "interruption the same command goes on. `zaya convert inspect PATH` shows what a folder holds.",
        (
            "zaya convert ZAYA1-8B runs/zaya1_8b                          # from Hugging Face to a run",
            "zaya convert runs/tiny exported --dtype bfloat16 --verify    # from a run to Hugging Face",
            "zaya convert ZAYA1-8B-legacy ZAYA1-8B --layout native        # from one layout to the other",
            "zaya convert inspect ZAYA1-8B                                # tensors, totals, what fits",
        ),
    )
    parser.add_argument(
        "source", metavar="SRC", help="a run, or a folder of PyTorch weights in either layout"
    )
    parser.add_argument("target", metavar="DST", help="the folder to make; it appears when it is whole")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="of DST (default: native from a run, zaya, which is a run, from PyTorch)",
    )
    parser.add_argument(
        "--adapters-only",
        action="store_true",
        help="of a run with adapters: these alone, as PEFT has them (default: weights with their changes)",
    )
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as in SRC)")
    parser.add_argument(
        "--max-shard-size", default="5GB", help="of a safetensors file (default: %(default)s)"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read both sides back and compare them; also if DST is there already",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a DST that was converted before")
    return parser


def parse_size(text: str) -> int:
    """Bytes in a text like "5GB".

    Raises:
      ValueError: if it is no size.
    """
    match = re.fullmatch(r"(\d{1,6})(KB|MB|GB|)", text)
    if not match or int(match[1]) == 0:
        raise ValueError(f'--max-shard-size is "{text}"; it must be a size such as 5GB, 500MB or 800KB')
    return int(match[1]) * _UNITS[match[2]]


def _must_convert(source: pathlib.Path, target: pathlib.Path, *, overwrite: bool, verify: bool) -> bool:
    """Whether there is something to make; what is there stays unless we made it and may replace it."""
    if lies_in(target, source):
        raise ValueError(f"{target} is {source} or inside it; choose another folder")
    if not target.exists():
        return True
    if overwrite:
        if not (target / CHECKSUMS).is_file():
            raise ValueError(
                f"{target} was not made by zaya convert (it has no {CHECKSUMS}); remove it yourself, or "
                "choose another folder"
            )
        return True
    if verify and target.is_dir():
        print(f"{target} is there already; verifying it")
        return False
    raise ValueError(f"{target} is there already; --overwrite replaces what zaya convert made")


def _check_nothing_is_lost(opened: WeightFolder, source: pathlib.Path, target: pathlib.Path) -> None:
    """Refuses to replace a folder that holds what is converted, or what a run needs beside its weights."""
    tokenizer = opened.run.data.tokenizer if opened.run is not None else "byte"
    for path in (source, *(() if tokenizer in BYTE_TOKENIZERS else (tokenizer,))):
        if lies_in(path, target):
            raise ValueError(f"{path} lies in {target}, which would be replaced; choose another folder")


def plan(
    opened: WeightFolder,
    target: pathlib.Path,
    layout: TargetLayout,
    *,
    dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[PlannedFile]:
    """The files of a conversion."""
    if layout == "peft":
        return adapter_files(opened.source, dtype=dtype)
    if layout == "zaya":
        return run_folder_files(
            opened.source, opened.companions(), target, dtype=dtype, run=opened.run, step=opened.step
        )
    return pytorch_files(
        opened.source, layout, opened.companions(), dtype=dtype, max_shard_bytes=max_shard_bytes
    )


def convert(
    opened: WeightFolder,
    files: list[PlannedFile],
    target: pathlib.Path,
    layout: TargetLayout,
    *,
    overwrite: bool,
) -> None:
    """Makes the files, and says what was done."""
    size = sum(file.size for file in files)
    _clear_remains(target)
    start = time.monotonic()
    try:
        with ByteProgress(f"{opened.layout} to {layout}", size) as progress:
            report = write_folder(opened.source, files, target, progress, replace=overwrite)
    except OSError as error:
        error.filename = error.filename or str(target)
        error.add_note("the same command goes on from what is done")
        raise
    seconds = time.monotonic() - start
    resumed = f", {report.resumed / 1e9:.2f} GB of them by an earlier attempt" if report.resumed else ""
    step = f" of step {opened.step:,}" if opened.run is not None else ""
    values = sum(block.weight_slice.size for file in files for block in file.blocks)
    print(
        f"{target}: {values:,} values{step} in {len(files):,} files, {size / 1e9:.2f} GB"
        f"{resumed}, {seconds:.1f} s ({(size - report.resumed) / 1e9 / seconds:.2f} GB/s)"
    )
    for note in notes(opened.source, layout):
        print(f"note: {note}")


def _clear_remains(target: pathlib.Path) -> None:
    """Removes what a conversion leaves that was killed between its last two steps."""
    aside = target.with_name(target.name + PARTIAL)
    if target.exists() and aside.is_dir() and not (aside / "content").exists():
        shutil.rmtree(aside)


def verify(opened: WeightFolder, target: pathlib.Path) -> None:
    """Reads both sides back, and says that they are equal.

    Raises:
      ValueError: saying where they are not.
    """
    with open_weight_folder(target) as after:
        if (damage := check_files(after, target)) is not None:
            raise Damaged(damage)
        with ByteProgress("comparing", num_bytes(after)) as progress:
            difference = compare_tensors(opened, after, progress)
        if difference is not None:
            raise ValueError(f"{target} differs: {difference}")
        print(
            f"verified: all {num_values(after):,} values are equal bit for bit, files as their checksums say"
        )
        needed, available = logits_memory(after.source.config), available_memory()
        if needed > available:
            sizes = f"{needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free"
            print(f"logits were not compared: that takes {sizes}")
            return
        for line in compare_logits(opened, after):
            print(f"verified: {line}")
