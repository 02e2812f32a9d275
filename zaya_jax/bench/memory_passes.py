"""`zaya bench hbm`: bytes a second of a device's memory, by the size of the arrays.

As in [STREAM] a pass reads one or two arrays and writes one. Arrays that lie in a cache are faster, and say
nothing of the memory: the largest ones count.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.machine import check_outputs, this_machine, write_json
from zaya_jax.bench.measure import free_device_memory, repeated_seconds
from zaya_jax.options import Parser
from zaya_jax.plan.measured import PassTime, PassTimes
from zaya_jax.tables import format_bytes, name_column, number_column

SMALLEST, LARGEST, STEP = 2**20, 2**32, 4
"""Bytes of the arrays, and each size over the one before."""
MEMORY_SHARE = 4
"""Arrays' worth of memory that a pass needs: two that are read, one written, one to spare."""
FACTOR = 0.999
"""Not 1, which a compiler would leave out."""
TRAFFIC: dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], int]] = {
    "scale": (lambda x, _: FACTOR * x, 2),
    "add": (lambda x, y: x + y, 3),
    "triad": (lambda x, y: y + FACTOR * x, 3),
}
"""Passes over arrays by [STREAM]'s names, and how many arrays each reads and writes."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench hbm` with the words behind it.

    Raises:
      ValueError: for a size for which there is no memory.
    """
    parser = Parser(
        "bench hbm",
        "Bytes a second of the memory of a device (HBM, or a CPU's), by the size of the arrays. zaya plan "
        "--measured takes the JSON.",
        ("zaya bench hbm --json=hbm.json", "zaya bench hbm --largest-mib=256"),
    )
    parser.add_argument(
        "--largest-mib",
        type=int,
        default=LARGEST >> 20,
        metavar="MIB",
        help="of an array, also bounded by memory (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all times")
    options = parser.parse_args(argv)
    check_outputs(json_file=options.json)
    if options.largest_mib < 1:
        raise ValueError(f"--largest-mib is {options.largest_mib}; it must be at least 1")
    found = measure(options.largest_mib << 20)
    write_json(options.json, dataclasses.asdict(found))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(found))
    console.print(f"- {conclusion(found)}")


def measure(largest: int) -> PassTimes:
    """Times all passes over arrays of growing size.

    Args:
      largest: bytes that no array exceeds; memory bounds it too.
    """
    bound = min(largest, free_device_memory() // MEMORY_SHARE)
    sizes = [SMALLEST]
    while sizes[-1] * STEP <= bound:
        sizes.append(sizes[-1] * STEP)
    passes = [pass_time(operation, size) for size in sizes for operation in TRAFFIC]
    return PassTimes(machine=this_machine(), passes=tuple(passes))


def pass_time(operation: str, array_bytes: int) -> PassTime:
    """Times a pass over arrays of float32, within a program that repeats it in place."""
    function, arrays = TRAFFIC[operation]

    def repeated(x: jax.Array, y: jax.Array, times: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, x: function(x, y), x)

    program = jax.jit(repeated, donate_argnums=0)
    x, y = (jnp.full((array_bytes // 4,), value, jnp.float32) for value in (1.0, 0.5))
    held: list[Any] = [x]

    def call(times: int) -> jax.Array:
        held[0] = program(held[0], y, jnp.int32(times))
        return held[0]

    return PassTime(
        operation=operation,
        array_bytes=array_bytes,
        moved_bytes=arrays * array_bytes,
        seconds=repeated_seconds([call])[0],
    )


def table(found: PassTimes) -> Table:
    """Bandwidth of each pass by the size of its arrays."""
    title = f"memory of {found.machine.device}: GB/s, read and written"
    rows = Table(name_column("an array"), *map(number_column, TRAFFIC), title=title)
    for size in dict.fromkeys(each.array_bytes for each in found.passes):
        by_name = {each.operation: each.bandwidth for each in found.passes if each.array_bytes == size}
        rows.add_row(format_bytes(size), *(f"{by_name[name] / 1e9:,.1f}" for name in TRAFFIC))
    return rows


def conclusion(found: PassTimes) -> str:
    """What the memory reaches, and from which size on arrays are in it and not in a cache."""
    fastest = max(found.passes, key=lambda each: each.bandwidth)
    ends = (
        f"; {fastest.operation} of {format_bytes(fastest.array_bytes)} reaches "
        f"{fastest.bandwidth / found.bandwidth:.1f} times that in a cache: work that fits there is worth "
        "fusing"
        if fastest.bandwidth > 1.5 * found.bandwidth
        else ""
    )
    return f"the memory reaches {found.bandwidth / 1e9:,.1f} GB/s{ends}"
