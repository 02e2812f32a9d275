"""`zaya bench collectives`: its options and its output."""

import os
import pathlib
import re
from collections.abc import Sequence

from rich.console import Console

from zaya_jax.bench.collectives import output
from zaya_jax.bench.collectives.advice import advice
from zaya_jax.bench.collectives.collectives import CALL_SECONDS, LARGEST, SMALLEST, Sweep, measure
from zaya_jax.bench.results import write_json
from zaya_jax.errors import UserError
from zaya_jax.options import Parser, check_positive, load_config
from zaya_jax.parallel.collective_timing import COLLECTIVES
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import find_process_group
from zaya_jax.plan.arithmetic import messages
from zaya_jax.plan.output.picture import check_outputs
from zaya_jax.text_tables import format_bytes

PRESET = "configs/zaya1_8b.py"
_SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench collectives` with the given command-line arguments.

    Raises:
      UserError: if an option is invalid or the devices cannot be measured.
    """
    parser = _parser()
    options, overrides = parser.parse_with_fields(argv)
    check_outputs(json_file=options.json, picture=options.picture)
    check_positive(options, "call_seconds", "timeout")
    config = load_config(options.config, overrides)
    sweep = Sweep(
        collectives=tuple(options.only or COLLECTIVES),
        smallest=parse_size("min-size", options.min_size),
        largest=parse_size("max-size", options.max_size),
        call_seconds=options.call_seconds,
        devices_per_node=options.devices_per_node,
        limit_seconds=options.timeout,
    )
    console = Console(soft_wrap=True, highlight=False)
    # Join after all options are known to be valid: a process that fails alone leaves the others waiting.
    with hosts.joined(find_process_group(os.environ), limit_seconds=options.timeout):
        with console.status("looking for devices") as status:
            timings = measure(sweep, progress=status.update)
        # The messages of the config, divided among the devices that were measured.
        sent = messages(config, timings.num_nodes * timings.devices_per_node)
        write_json(options.json, timings.to_json())
        # All processes have the same times, and only one of them may write the file.
        if options.picture and hosts.is_first():
            output.draw(pathlib.Path(options.picture), timings)
        for table in output.tables(timings, sent, config.run_folder):
            console.print(table)
        for sentence in advice(timings, sent) or ["no advice: no size and no group is slow"]:
            console.print(f"- {sentence}")


def parse_size(option: str, text: str) -> int:
    """Converts "64MiB" or "1024" to bytes.

    Raises:
      UserError: if the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UserError(f'--{option} is "{text}"; it must be a whole number with B, KiB, MiB or GiB after it')
    return int(match[1]) * _UNITS[match[2]]


def _parser() -> Parser:
    parser = Parser(
        "bench collectives",
        "Time all_reduce, reduce_scatter, all_gather, broadcast, all_to_all and permute from 1 KiB on, "
        "among all devices, within nodes, within parts of a node and along the rails between nodes, with "
        "bandwidths as nccl-tests defines them. Fits latency and bandwidth, and estimates the time of "
        "ZAYA1's gradients and weights. Finds its processes as zaya train does. zaya plan --measured reads "
        "the JSON file.",
        (
            "zaya bench collectives --json=collectives.json --picture=collectives.png",
            "srun zaya bench collectives --json=collectives.json",
            "zaya launch --processes=4 --devices=2 -- bench collectives --devices-per-node=2 --max-size=8MiB",
            "zaya plan --config=configs/zaya1_8b.py --nodes=4 --gpus-per-node=2 --measured=collectives.json",
        ),
    )
    size = "a number with B, KiB, MiB or GiB; default: "
    parser.add_argument(
        "--min-size", default=format_size(SMALLEST), help=f"smallest message, {size}%(default)s"
    )
    parser.add_argument(
        "--max-size",
        default=format_size(LARGEST),
        help=f"largest message that fits in memory, {size}%(default)s",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help=f"measure only these of {', '.join(COLLECTIVES)}"
    )
    parser.add_argument(
        "--devices-per-node",
        type=int,
        metavar="N",
        help="number of consecutive devices that count as a node (default: those of a host)",
    )
    parser.add_argument(
        "--call-seconds",
        default=CALL_SECONDS,
        metavar="SECONDS",
        help="a call that takes longer ends the measurement of its collective; in seconds "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        default=hosts.LIMIT_SECONDS,
        metavar="SECONDS",
        help="time limit of one size, after which the process exits with code 124, in seconds "
        "(default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all times")
    parser.add_argument("--picture", metavar="FILE", help="draw bandwidth by size, as PNG, SVG or PDF")
    parser.add_argument(
        "--config",
        default=PRESET,
        metavar="FILE",
        help="config whose gradients and weights the estimates are for",
    )
    return parser


def format_size(num_bytes: int) -> str:
    """Formats a size so that `parse_size` can read it."""
    return format_bytes(num_bytes).replace(" ", "").replace(".00", "")
