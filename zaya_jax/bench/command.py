"""`zaya bench WHAT`: selects a benchmark by name and runs it."""

import sys
from collections.abc import Callable, Sequence

from zaya_jax.bench.collectives import command
from zaya_jax.bench.control import command as control
from zaya_jax.bench.generation import generation
from zaya_jax.bench.kernels import gemm, kernel_times, memory_passes
from zaya_jax.bench.storage import checkpoint, data, disk
from zaya_jax.bench.torch_comparison import command as torch_comparison
from zaya_jax.bench.training import optimizers, start, step
from zaya_jax.options import Parser, check_at_least

WITH_ROUNDS: dict[str, Callable[..., None]] = {
    "data": data.run,
    "kernels": kernel_times.run,
}
"""Benchmarks whose only option is `--rounds`."""
WITH_OWN_PARSER: dict[str, Callable[[Sequence[str]], None]] = {
    "checkpoint": checkpoint.main,
    "collectives": command.main,
    "control": control.main,
    "gemm": gemm.main,
    "generation": generation.main,
    "hbm": memory_passes.main,
    "optimizers": optimizers.main,
    "start": start.main,
    "step": step.main,
    "storage": disk.main,
    "torch": torch_comparison.main,
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
    # Without a known name argparse reports it, with the closest one.
    options = _parser().parse_args(arguments)
    check_at_least(options, rounds=1)
    WITH_ROUNDS[options.what](rounds=options.rounds)


def _parser() -> Parser:
    parser = Parser(
        "bench",
        # Lines that are indented keep their breaks, so they must fit in 80 columns.
        "Measure speed and memory, and compare them with other libraries and with the machine's limits.\n\n"
        "benchmarks:\n"
        "  torch        train step, prefill and decoding against transformers, eager and\n"
        "               under torch.compile\n"
        "  generation   latency of requests under load\n"
        "  kernels      each Pallas kernel against XLA and other libraries\n"
        "  optimizers   losses of tuned AdamW, Muon, NorMuon and MuonH, over seeds\n"
        "  checkpoint   time that a save blocks training, and until it is durable,\n"
        "               for Orbax and zaya_jax, in 1, 2 and 4 processes\n"
        "  data         tokens/s and memory of building and reading a corpus\n"
        "  collectives  bandwidth of the links between devices and between nodes\n"
        "  control      start, stop and commit of many processes, also simulated\n"
        "  gemm         speed of the matrix products of a step\n"
        "  hbm          memory bandwidth of a device\n"
        "  start        time from zaya train to its first step\n"
        "  step         time and memory of a train step, by implementation\n"
        "  storage      speed of a disk\n\n"
        f"{', '.join(WITH_OWN_PARSER)} have their own options, which `zaya bench WHAT --help` shows.",
        ("zaya bench torch", "zaya bench data --rounds 10", "zaya bench kernels"),
    )
    parser.add_argument("what", choices=[*WITH_ROUNDS, *WITH_OWN_PARSER], help="benchmark to run")
    parser.add_argument(
        "--rounds",
        default=ROUNDS,
        help="number of timings, of which the best counts; for data also of builds, of which the median "
        "counts",
    )
    return parser
