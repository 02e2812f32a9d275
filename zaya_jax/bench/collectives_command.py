"""`zaya bench collectives`: what it is told, and what it says."""

import os
import pathlib
import re
from collections.abc import Sequence

from rich.console import Console

from zaya_jax.bench import collective_report
from zaya_jax.bench.collective_advice import advice
from zaya_jax.bench.collectives import CALL_SECONDS, LARGEST, SMALLEST, Sweep, measure
from zaya_jax.bench.machine import check_outputs, write_json
from zaya_jax.options import Parser, load_config
from zaya_jax.parallel import hosts
from zaya_jax.parallel.exchanges import COLLECTIVES
from zaya_jax.parallel.process_group import find_process_group
from zaya_jax.plan.arithmetic import messages
from zaya_jax.tables import format_bytes

PRESET = "configs/zaya1_8b.py"
_SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench collectives` with the words behind it.

    Raises:
      ValueError: for what cannot be measured.
    """
    parser = _parser()
    options, overrides = parser.parse_with_fields(argv)
    check_outputs(json_file=options.json, picture=options.picture)
    config = load_config(options.config, overrides)
    sweep = Sweep(
        collectives=tuple(options.only or COLLECTIVES),
        smallest=parse_size("smallest", options.smallest),
        largest=parse_size("largest", options.largest),
        call_seconds=options.call_seconds,
        devices_per_node=options.devices_per_node,
        limit_seconds=options.limit,
    )
    console = Console(soft_wrap=True, highlight=False)
    with hosts.joined(find_process_group(os.environ), limit_seconds=options.limit):
        with console.status("looking for devices") as status:
            found = measure(sweep, progress=status.update)
        sent = messages(config, found.num_nodes * found.devices_per_node)
        write_json(options.json, found.to_json())
        if options.picture and hosts.is_first():
            collective_report.draw(pathlib.Path(options.picture), found)
        for table in collective_report.tables(found, sent, config.run_folder):
            console.print(table)
        for sentence in advice(found, sent) or ["nothing stands out: no size is slow, no group starved"]:
            console.print(f"- {sentence}")


def parse_size(option: str, text: str) -> int:
    """Bytes that "64MiB" or "1024" stands for.

    Raises:
      ValueError: for what is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f'--{option} is "{text}"; it must be a whole number with B, KiB, MiB or GiB behind it'
        )
    return int(match[1]) * _UNITS[match[2]]


def _parser() -> Parser:
    parser = Parser(
        "bench collectives",
        "Times all_reduce, reduce_scatter, all_gather, broadcast, all_to_all and permute from 1 KiB on, "
        "among all devices, those of each node, parts of a node and the rails between nodes, with "
        "bandwidths as nccl-tests defines them; fits latency and bandwidth, and says what they mean for "
        "ZAYA1's gradients and weights. It finds its processes as zaya train does. zaya plan --measured "
        "takes the JSON.",
        (
            "zaya bench collectives --json=collectives.json --picture=collectives.png",
            "srun zaya bench collectives --json=collectives.json",
            "zaya launch --processes=4 --devices=2 -- bench collectives --devices-per-node=2 --largest=16MiB",
            "zaya plan --config=configs/zaya1_8b.py --nodes=4 --gpus-per-node=2 --measured=collectives.json",
        ),
    )
    size = "B, KiB, MiB or GiB behind it; default: "
    parser.add_argument("--smallest", default=format_size(SMALLEST), help=f"message, {size}%(default)s")
    parser.add_argument(
        "--largest", default=format_size(LARGEST), help=f"message, also bounded by memory, {size}%(default)s"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(COLLECTIVES)}")
    parser.add_argument(
        "--devices-per-node",
        type=int,
        metavar="N",
        help="takes so many devices that follow each other as a node (default: those of a host)",
    )
    parser.add_argument(
        "--call-seconds",
        type=float,
        default=CALL_SECONDS,
        metavar="SECONDS",
        help="a size that takes longer is the last of its collective (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=hosts.LIMIT_SECONDS,
        metavar="SECONDS",
        help="a size that is not done by then ends the process with code 124 (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all times")
    parser.add_argument("--picture", metavar="FILE", help="draw bandwidth by size, as PNG, SVG or PDF")
    parser.add_argument(
        "--config", default=PRESET, metavar="FILE", help="whose messages to judge (default: %(default)s)"
    )
    return parser


def format_size(num_bytes: int) -> str:
    """A size as `parse_size` takes it."""
    return format_bytes(num_bytes).replace(" ", "").replace(".00", "")
