"""`zaya bench WHAT`: selects a benchmark by name and runs it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zaya_jax.bench.collectives import command
from zaya_jax.bench.generation import generation
from zaya_jax.bench.kernels import experts, gemm, kernel_times, memory_passes
from zaya_jax.bench.storage import checkpoint, data, disk
from zaya_jax.bench.training import loss_memory, optimizer_share, optimizers, torch_comparison
from zaya_jax.errors import UserError
from zaya_jax.options import Parser

WITH_ROUNDS: dict[str, Callable[..., None]] = {
    "torch": torch_comparison.run,
    "kernels": kernel_times.run,
    "optimizer-share": optimizer_share.run,
}
"""Benchmarks that repeat their timings `--rounds` times."""
WITHOUT_OPTIONS: dict[str, Callable[[], None]] = {
    "data": data.run,
    "experts": experts.run,
    "loss-memory": loss_memory.run,
    "optimizers": optimizers.run,
}
CHECKPOINT = "checkpoint"
WITH_OWN_PARSER: dict[str, Callable[[Sequence[str]], None]] = {
    "collectives": command.main,
    "gemm": gemm.main,
    "generation": generation.main,
    "hbm": memory_passes.main,
    "storage": disk.main,
}
"""Benchmarks that parse their own options: `zaya bench collectives --help`."""
ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench` with the given command-line arguments.

    Raises:
      UserError: if an option does not apply to the benchmark, or has an invalid value.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # These parse their options themselves, including --help.
    if arguments and arguments[0] in WITH_OWN_PARSER:
        WITH_OWN_PARSER[arguments[0]](arguments[1:])
        return
    values = vars(_parser().parse_args(arguments))
    what = values.pop("what")
    # Each benchmark has its own defaults for options that are not given.
    values = {name: value for name, value in values.items() if value is not None}
    _check(what, values)
    if what in WITHOUT_OPTIONS:
        WITHOUT_OPTIONS[what]()
    elif what == CHECKPOINT:
        checkpoint.run(**values)
    else:
        WITH_ROUNDS[what](**({"rounds": ROUNDS} | values))


def _check(what: str, values: Mapping[str, Any]) -> None:
    for name in ("gib", "folder"):
        if what != CHECKPOINT and name in values:
            raise UserError(f"--{name} is {values[name]}; only {CHECKPOINT} supports it, remove it")
    rounds = values.get("rounds", ROUNDS)
    if what in WITHOUT_OPTIONS and "rounds" in values:
        raise UserError(f"--rounds is {rounds}; {what} runs once, remove the option")
    if rounds < 1:
        raise UserError(f"--rounds is {rounds}; it must be at least 1")


def _parser() -> Parser:
    parser = Parser(
        "bench",
        # Lines that are indented keep their breaks, so they must fit in 80 columns.
        "Measure speed and memory, and compare them with other libraries and with the machine's limits.\n\n"
        "benchmarks:\n"
        "  torch            train step, forward pass and decoding against transformers\n"
        "  generation       prefill, decoding, latency and memory against transformers\n"
        "  kernels          each Pallas kernel against XLA and other libraries\n"
        "  experts          memory and FLOPs of the expert dispatch\n"
        "  loss-memory      memory of a train step with all logits at once and in chunks\n"
        "  optimizers       loss curves of Muon and of AdamW alone\n"
        "  optimizer-share  the optimizer's share of the step time on 8 devices\n"
        "  checkpoint       time that a save blocks training, and until it is durable,\n"
        "                   for one writer, Orbax and zaya_jax, in 1, 2 and 4 processes\n"
        "  data             tokens/s of building and reading a corpus, against\n"
        "                   datasets.map and a memory-mapped file; memory by text size\n"
        "  collectives      bandwidth of the links between devices and between nodes\n"
        "  gemm             speed of the matrix products of a step\n"
        "  hbm              memory bandwidth of a device\n"
        "  storage          speed of a disk\n\n"
        f"{', '.join(WITH_OWN_PARSER)} have their own options, which `zaya bench WHAT --help` shows.",
        (
            "zaya bench torch",
            "zaya bench torch --rounds 10",
            "zaya bench experts",
            "zaya bench data",
            "zaya bench checkpoint --gib 8 --folder /big/disk",
        ),
    )
    names = [*WITH_ROUNDS, *WITHOUT_OPTIONS, CHECKPOINT, *WITH_OWN_PARSER]
    parser.add_argument("what", choices=names, help="benchmark to run")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"number of timings, of which the best counts (default: {ROUNDS}); for checkpoint the number of "
        f"saves, of which the median counts (default: {checkpoint.ROUNDS}). Not supported by "
        f"{', '.join(WITHOUT_OPTIONS)}",
    )
    parser.add_argument(
        "--gib", type=float, help=f"checkpoint: size of the state in GiB (default: {checkpoint.GIB:g})"
    )
    parser.add_argument(
        "--folder", help="checkpoint: folder on the disk to measure (default: the current folder)"
    )
    return parser
