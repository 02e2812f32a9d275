"""`zaya bench torch`: train step, prefill and decoding against transformers, eager and under `torch.compile`.

Each program runs in its own process, set up as its users do, on the same weights, in float32 or bfloat16,
with the default threads of both libraries: one per core. The programs take turns in rounds, and a ratio
compares the two calls of one round. An untimed first call compiles; its outputs are compared.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console

from zaya_jax.bench.interleaved import results_interleaved
from zaya_jax.bench.results import this_machine, write_json
from zaya_jax.bench.torch_comparison import ours, output, theirs
from zaya_jax.bench.torch_comparison.bounds import (
    MachineLimits,
    decode_bound,
    measure_limits,
    prefill_bound,
    train_bound,
)
from zaya_jax.bench.torch_comparison.speeds import COMPILE_SECONDS, OURS, PairedSpeed, Part, measure
from zaya_jax.bench.torch_comparison.workload import DTYPES, MODEL, GenerationWork, TrainingWork, export
from zaya_jax.errors import UserError
from zaya_jax.model.weights import count_parameters
from zaya_jax.options import Parser, check_at_least
from zaya_jax.plan.output.picture import check_outputs
from zaya_jax.platform.shell import pip_install

BATCHES, ROUNDS = (1, 8, 64), 7
PARTS = ("train", "generation")
THEIRS, COMPILED = "transformers", "torch.compile"
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench torch` with the given command-line arguments.

    Raises:
      UserError: if torch or transformers is not installed, or an option is invalid.
    """
    options = _parser().parse_args(argv)
    check_outputs(json_file=options.json)
    check_at_least(options, rounds=1)
    # All options are checked before anything is exported or compiled.
    batches = _numbers(options.batches)
    require_transformers()
    console = Console(soft_wrap=True, highlight=False)
    values: dict[str, Any] = {
        "dtype": options.dtype,
        "machine": dataclasses.asdict(this_machine()),
        "speeds": [],
    }
    # Compilers that torch has started may still write when the programs have ended.
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as folder, _torch_cache(pathlib.Path(folder, "torch")):
        # Tried first, because compiling the whole network would fail only after minutes.
        why_not = "it is skipped, as requested" if options.without_compiled else why_torch_compile_fails()
        network = export(pathlib.Path(folder, "network"))
        # Measured before the programs start, while nothing else uses the cores.
        limits = measure_limits(options.rounds, options.dtype)
        console.print(
            f"{count_parameters(MODEL):,} parameters, {options.dtype}; medians of {options.rounds} paired "
            f"rounds, each program in its own process; this machine: {limits.flops / 1e9:,.0f} GFLOP/s in a "
            f"product of 2048 x 2048, {limits.bandwidth / 1e9:,.1f} GB/s of memory"
        )
        for speeds in _sections(network, limits, batches, options, with_compiled=why_not is None):
            console.print(output.table(speeds))
            values["speeds"] += [dataclasses.asdict(each) | {"ratio": each.ratio} for each in speeds]
            write_json(options.json, values)  # after each section, because each takes minutes
    if why_not:
        console.print(f"torch.compile is not measured: {why_not}")


def _sections(
    network: str,
    limits: MachineLimits,
    batches: Sequence[int],
    options: argparse.Namespace,
    *,
    with_compiled: bool,
) -> Iterator[list[PairedSpeed]]:
    # A generator: the table of a part is printed before the next one compiles for minutes.
    parts = options.parts or PARTS
    if "train" in parts:
        work = TrainingWork(network, options.dtype)
        programs = {OURS: functools.partial(ours.train, work), THEIRS: functools.partial(theirs.train, work)}
        if with_compiled:
            programs[COMPILED] = functools.partial(theirs.train, work, compiled=True)
        tokens, bound = work.batch * work.length, train_bound(limits, work)
        part = Part("train", f"train, batch {work.batch} x {work.length}", tokens, bound)
        yield measure(programs, [part], rounds=options.rounds, dtype=options.dtype)
    # One batch size at a time: nine networks and their programs would share the memory.
    for batch in batches if "generation" in parts else ():
        work = GenerationWork(network, batch, options.dtype)
        makers = {OURS: ours.generate, THEIRS: theirs.generate}
        makers |= {COMPILED: theirs.generate_compiled} if with_compiled else {}
        programs = {side: functools.partial(make, work) for side, make in makers.items()}
        yield measure(programs, _generation_parts(limits, work), rounds=options.rounds, dtype=options.dtype)


def _generation_parts(limits: MachineLimits, work: GenerationWork) -> list[Part]:
    # The first new token belongs to the prefill.
    written = work.batch * (work.new - 1)
    return [
        Part(
            "prefill",
            f"prefill, {work.batch} x {work.prompt}",
            work.batch * work.prompt,
            prefill_bound(limits, work),
        ),
        Part("decode", f"decode, {work.batch} x {work.new - 1}", written, decode_bound(limits, work)),
    ]


def require_transformers() -> None:
    """Checks that the libraries of the comparison are installed.

    Raises:
      UserError: if one is missing.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"the comparison needs {package}, which is not installed: "
                f"{pip_install('torch', 'transformers')}"
            )


def why_torch_compile_fails() -> str | None:
    """Returns why `torch.compile` does not work here; None if it works."""
    program: dict[str, Callable[[], Any]] = {COMPILED: theirs.compile_a_sum}
    try:
        results_interleaved(program, rounds=1, limit=COMPILE_SECONDS)
    except RuntimeError as error:
        first_line = re.split(r"\n|\\n", str(error))[0]  # a nested exception has escaped line ends
        return f"it fails here: {first_line}"
    return None


@contextlib.contextmanager
def _torch_cache(folder: pathlib.Path) -> Iterator[None]:
    """Has `torch.compile` keep its code in a folder, in processes that start within the block.

    In the folder that all runs share, a library of which an interrupted run has written a part ends all later
    ones with "file too short".
    """
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CACHE_VARIABLE]
        else:
            os.environ[_CACHE_VARIABLE] = before


def _numbers(text: str) -> tuple[int, ...]:
    """Parses the batch sizes.

    Raises:
      UserError: if one is not a number, or is below 1.
    """
    numbers = text.split(",")
    # `isdecimal` rejects signs, spaces and empty parts. A batch without rows has no tokens per second, hence
    # the test for 0.
    if not all(each.isdecimal() and int(each) for each in numbers):
        raise UserError(f"--batches is {text}; it must be comma-separated numbers of at least 1")
    return tuple(map(int, numbers))


def _parser() -> Parser:
    parser = Parser(
        "bench torch",
        "Measure a train step, prefill and decoding against transformers, eager and under torch.compile, on "
        "the same weights, and compare all with the limits of this machine.",
        (
            "zaya bench torch",
            "zaya bench torch --parts generation --batches=1,8 --rounds=5",
            "zaya bench torch --dtype bfloat16",
            "zaya bench torch --parts train --json=torch.json",
        ),
    )
    # A metavar replaces the choices in the help, so the text names them.
    known = ", ".join(PARTS)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, metavar="PART", help=f"parts to run, of {known} (default: all)"
    )
    parser.add_argument(
        "--batches", default=",".join(map(str, BATCHES)), help="numbers of prompts of part generation"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        metavar="DTYPE",
        help=f"type of matrix products, {' or '.join(DTYPES)}; generation stores matrices in it too",
    )
    parser.add_argument("--rounds", default=ROUNDS, help="timed calls of each program, whose median counts")
    parser.add_argument(
        "--without-compiled",
        action="store_true",
        help="skip torch.compile, which takes minutes per batch size",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures, with the ratio of each round")
    return parser
