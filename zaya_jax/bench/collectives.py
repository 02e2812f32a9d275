"""`zaya bench collectives`: time and bandwidth of each collective by size and by which devices take part.

The figures are defined as NCCL's own benchmark defines them ([nccl-tests], doc/PERFORMANCE.md), so that they
compare with what `rccl-tests` and clusters' acceptance sheets say. What is measured here is what a train step
would see: the collective that XLA compiles, run again and again within one program.

On CPUs processes exchange through gloo and devices of a process through memory: the figures say nothing of a
cluster, the program is the same.
"""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zaya_jax.bench.groupings import DeviceGroups, by_node, groupings
from zaya_jax.bench.machine import this_machine
from zaya_jax.bench.measure import seconds
from zaya_jax.parallel import hosts
from zaya_jax.parallel.exchanges import (
    COLLECTIVES,
    NUMBER_BYTES,
    group_mesh,
    make_exchange,
    message_numbers,
    run_once,
)
from zaya_jax.plan.measured import CollectiveTimes, Timing
from zaya_jax.platform.host_memory import available_memory

SMALLEST, LARGEST = 2**10, 2**32
STEP = 4
"""Each size over the one before it."""
ROUND_SECONDS = 0.1
"""That a round of timing fills; its calls run in one program."""
MOST_CALLS = 1000
ROUNDS = 3
CALL_SECONDS = 1.0
"""A size that takes longer is the last of its collective."""
MEMORY_SHARE = 4
"""Messages' worth of memory that a device needs: what it has, what it gets, and what the library copies."""
LATE = 124
"""As coreutils' `timeout`, and as `zaya_jax.cli` ends when another process does not come."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is to be measured.

    Attributes:
      collectives: their names.
      smallest: bytes of the first message.
      largest: bytes that no message exceeds.
      call_seconds: a size that takes longer is the last of its collective.
      devices_per_node: in each node; None for those of a host.
      limit_seconds: after which a collective that has not ended never will.
    """

    collectives: tuple[str, ...] = tuple(COLLECTIVES)
    smallest: int = SMALLEST
    largest: int = LARGEST
    call_seconds: float = CALL_SECONDS
    devices_per_node: int | None = None
    limit_seconds: float = hosts.LIMIT_SECONDS

    def __post_init__(self):
        unknown = [name for name in self.collectives if name not in COLLECTIVES]
        if unknown:
            raise ValueError(f'there is no collective "{unknown[0]}"; known are {", ".join(COLLECTIVES)}')
        if not 1 <= self.smallest <= self.largest:
            raise ValueError(
                f"--smallest is {self.smallest:,} bytes and --largest {self.largest:,}; the second must be "
                "at least the first, and that at least 1"
            )
        for name, value in (("call-seconds", self.call_seconds), ("limit", self.limit_seconds)):
            if not value > 0:
                raise ValueError(f"--{name} is {value}; it must be above 0")


def measure(sweep: Sweep, *, progress: Callable[[str], None] = lambda _: None) -> CollectiveTimes:
    """Times all collectives in all groupings of the devices that all processes have.

    Args:
      sweep: what is to be measured.
      progress: is told what is being measured.

    Raises:
      ValueError: if there is one device, nodes are unequal, or a collective gives wrong numbers.
    """
    nodes = by_node(jax.devices(), hosts.names(), devices_per_node=sweep.devices_per_node)
    devices = [device for node in nodes for device in node]
    sizes = message_sizes(sweep.smallest, min(sweep.largest, largest_message(devices)))
    timings: list[Timing] = []
    for grouping in groupings(len(nodes), len(nodes[0])):
        for collective in sweep.collectives:
            progress(f"{collective}, {grouping.layout}")
            timings += measure_sizes(grouping, devices, collective, sizes, sweep)
    return CollectiveTimes(
        machine=this_machine(),
        num_processes=hosts.num_processes(),
        num_nodes=len(nodes),
        devices_per_node=len(nodes[0]),
        timings=tuple(timings),
    )


def message_sizes(smallest: int, largest: int) -> list[int]:
    """Sizes from the smallest on, each `STEP` times the one before; the smallest is always one of them."""
    sizes = [smallest]
    while sizes[-1] * STEP <= largest:
        sizes.append(sizes[-1] * STEP)
    return sizes


def largest_message(devices: Sequence[Any]) -> int:
    """Bytes of the largest message for which every device has memory, as all processes see it."""
    mine = [each for each in devices if each.process_index == hosts.process()]
    stats = mine[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
    else:  # CPU devices share their host's memory
        on_host = [
            each for each in devices if hosts.names()[each.process_index] == hosts.names()[hosts.process()]
        ]
        free = available_memory() // len(on_host)
    return min(hosts.gather("memory", free // MEMORY_SHARE))


def measure_sizes(
    grouping: DeviceGroups, devices: Sequence[Any], collective: str, sizes: Sequence[int], sweep: Sweep
) -> list[Timing]:
    """Times a collective at each size, up to one that takes too long; checks what it gives first.

    Raises:
      ValueError: if it gives wrong numbers.
    """
    mesh = group_mesh([[devices[number] for number in group] for group in grouping.groups])
    takes_part = any(each.process_index == hosts.process() for each in mesh.devices.flat)
    what = f"{collective}, {grouping.layout}"
    with watched(what, sweep.limit_seconds):
        hosts.together("check", lambda: check_exchange(collective, mesh) if takes_part else None)
    found: dict[int, Timing] = {}
    for size in sizes:
        numbers = message_numbers(size, grouping.group_size)
        with watched(f"{what}, {numbers * NUMBER_BYTES:,} bytes", sweep.limit_seconds):
            took = _time(functools.partial(make_exchange, collective, mesh, numbers) if takes_part else None)
        found[numbers] = Timing(
            layout=grouping.layout,
            collective=collective,
            group_size=grouping.group_size,
            num_groups=len(grouping.groups),
            num_bytes=numbers * NUMBER_BYTES,
            seconds=took,
        )
        if took > sweep.call_seconds:
            break
    return list(found.values())


def _time(make: Callable[[], Callable[[int], Any]] | None) -> float:
    """Seconds of one collective: the best round of the process that took longest.

    Processes whose devices take no part make nothing, and wait.
    """
    call = make() if make else lambda _: None
    jax.block_until_ready(call(1))  # compiles, and connects
    once = seconds(lambda: call(1))
    calls = min(MOST_CALLS, max(1, int(ROUND_SECONDS / max(hosts.gather("one call", once)))))
    rounds = [seconds(lambda: call(calls)) / calls for _ in range(ROUNDS)]
    return max(hosts.gather("rounds", min(rounds)))


def check_exchange(collective: str, mesh: Any) -> None:
    """Runs a collective once on numbers whose result is known; small whole ones, so that sums are exact.

    Raises:
      ValueError: if a device has another result.
    """
    num_groups, size = mesh.devices.shape
    numbers = message_numbers(SMALLEST, size)
    values_GNC = np.random.default_rng(0).integers(0, 100, (num_groups, size, numbers)).astype(np.float32)
    wanted_DC = np.concatenate([expected(collective, values_NC) for values_NC in values_GNC])
    found_DC = run_once(collective, mesh, values_GNC.reshape(-1, numbers))
    for shard in found_DC.addressable_shards:
        if not np.array_equal(np.asarray(shard.data), wanted_DC[shard.index]):
            raise ValueError(
                f"{collective} gave device {shard.device.id} wrong numbers; no training on this machine can "
                "be trusted before its communication library is mended"
            )


def expected(collective: str, values_NC: np.ndarray) -> np.ndarray:
    """What each device of a group has after a collective, in plain numpy."""
    size, numbers = values_NC.shape
    part = numbers // size
    results: dict[str, Callable[[], np.ndarray]] = {
        "all_reduce": lambda: np.tile(values_NC.sum(axis=0), (size, 1)),
        "reduce_scatter": lambda: values_NC.sum(axis=0).reshape(size, part),
        "all_gather": lambda: np.tile(values_NC[:, :part].ravel(), (size, 1)),
        "broadcast": lambda: np.tile(values_NC[0], (size, 1)),
        "all_to_all": lambda: values_NC.reshape(size, size, part).swapaxes(0, 1).reshape(size, numbers),
        "permute": lambda: np.roll(values_NC, 1, axis=0),
    }
    return results[collective]()


@contextlib.contextmanager
def watched(what: str, limit_seconds: float) -> Iterator[None]:
    """Ends this process if the block does not end in time: a collective that hangs cannot be interrupted."""

    def give_up() -> None:
        sys.stderr.write(
            f"zaya: bench: {what}: not done within {limit_seconds:.0f} s in "
            f"{hosts.describe(hosts.process())}; look for a device or a link that is down\n"
        )
        sys.stderr.flush()
        os._exit(LATE)

    timer = threading.Timer(limit_seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
