"""`zaya bench hbm`: memory bandwidth of a device by array size.

As in [STREAM], a pass reads one or two arrays and writes one. Arrays that fit a cache are faster and do not
measure the memory: the largest arrays count.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.measure import free_device_memory, growing_sizes, repeated_seconds
from zaya_jax.bench.results import this_machine, write_json
from zaya_jax.options import Parser, check_at_least
from zaya_jax.plan.measured import PassTime, PassTimes
from zaya_jax.plan.output.picture import check_outputs
from zaya_jax.text_tables import format_bytes, name_column, number_column

SMALLEST, LARGEST = 2**20, 2**32
"""Smallest and largest array in bytes."""
MEMORY_SHARE = 4
"""Memory that a pass needs, in arrays: two inputs, one output, and one to spare."""
FACTOR = 0.999
"""Not 1, which a compiler would optimize away."""
TRAFFIC: dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], int]] = {
    "scale": (lambda x, _: FACTOR * x, 2),
    "add": (lambda x, y: x + y, 3),
    "triad": (lambda x, y: y + FACTOR * x, 3),
}
"""Passes by the names of [STREAM], and the number of arrays that each reads and writes."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench hbm` with the given command-line arguments.

    Raises:
      UserError: if an option is invalid.
    """
    parser = Parser(
        "bench hbm",
        "Measure the memory bandwidth of a device (HBM, or a CPU's memory) by array size. zaya plan "
        "--measured reads the JSON file.",
        ("zaya bench hbm --json=hbm.json", "zaya bench hbm --max-mib=256"),
    )
    parser.add_argument(
        "--max-mib",
        default=LARGEST >> 20,
        metavar="MIB",
        help="size of the largest array that fits in memory, in MiB",
    )
    parser.add_argument("--json", metavar="FILE", help="write all times")
    options = parser.parse_args(argv)
    check_outputs(json_file=options.json)
    check_at_least(options, max_mib=1)
    timings = measure(options.max_mib << 20)
    write_json(options.json, dataclasses.asdict(timings))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(timings))
    console.print(f"- {conclusion(timings)}")


def measure(largest: int) -> PassTimes:
    """Times all passes over arrays of increasing size.

    Args:
      largest: maximum bytes of an array; free memory limits it as well.
    """
    sizes = growing_sizes(SMALLEST, min(largest, free_device_memory() // MEMORY_SHARE))
    # All passes of a size before the next one, so that a table row is from one short period of time.
    passes = [pass_time(operation, size) for size in sizes for operation in TRAFFIC]
    return PassTimes(machine=this_machine(), passes=tuple(passes))


def pass_time(operation: str, array_bytes: int) -> PassTime:
    """Times a pass over float32 arrays, within a program that repeats it in place."""
    function, arrays = TRAFFIC[operation]

    def repeated(x: jax.Array, y: jax.Array, times: jax.Array) -> jax.Array:
        # Each iteration depends on the previous one: XLA cannot merge them.
        return lax.fori_loop(0, times, lambda _, x: function(x, y), x)

    # The donated input is overwritten in place, so the loop needs no extra copy.
    program = jax.jit(repeated, donate_argnums=0)
    # 4 bytes per float32.
    x, y = (jnp.full((array_bytes // 4,), value, jnp.float32) for value in (1.0, 0.5))
    # The program donates its first argument: each call needs the result of the previous one.
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


def table(timings: PassTimes) -> Table:
    """Bandwidth of each pass by array size."""
    title = f"memory of {timings.machine.device}: GB/s, read and written"
    rows = Table(name_column("an array"), *map(number_column, TRAFFIC), title=title)
    # A dict keeps the order of measurement, which a set would not.
    for size in dict.fromkeys(each.array_bytes for each in timings.passes):
        by_name = {each.operation: each.bandwidth for each in timings.passes if each.array_bytes == size}
        rows.add_row(format_bytes(size), *(f"{by_name[name] / 1e9:,.1f}" for name in TRAFFIC))
    return rows


def conclusion(timings: PassTimes) -> str:
    """Returns the bandwidth of the memory, and that of a cache where it is much higher."""
    fastest = max(timings.passes, key=lambda each: each.bandwidth)
    ends = (
        f"; {fastest.operation} of {format_bytes(fastest.array_bytes)} reaches "
        f"{fastest.bandwidth / timings.bandwidth:.1f} times that in a cache: work that fits there is worth "
        "fusing"
        if fastest.bandwidth > 1.5 * timings.bandwidth
        else ""
    )
    return f"the memory reaches {timings.bandwidth / 1e9:,.1f} GB/s{ends}"
