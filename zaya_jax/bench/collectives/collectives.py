"""`zaya bench collectives`: time and bandwidth of each collective, by message size and group of devices.

Figures are defined as in NCCL's own benchmark ([nccl-tests], doc/PERFORMANCE.md), so that they compare with
those of `rccl-tests` and of cluster acceptance reports. The benchmark measures what a train step sees: the
collective that XLA compiles, repeated within one program.

On CPUs, processes communicate through gloo and the devices of a process through memory. Those figures do not
represent a cluster; the program is the same.
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

from zaya_jax.bench.collectives.device_groups import DeviceGroups, by_node, groupings
from zaya_jax.bench.measure import free_device_memory, growing_sizes, num_repetitions, seconds
from zaya_jax.bench.results import this_machine
from zaya_jax.errors import UserError
from zaya_jax.parallel.collective_timing import (
    COLLECTIVES,
    NUMBER_BYTES,
    group_mesh,
    make_repeated_collective,
    num_message_values,
    run_collective,
)
from zaya_jax.parallel.processes import hosts
from zaya_jax.plan.measured import CollectiveTimes, Timing

SMALLEST, LARGEST = 2**10, 2**32
ROUNDS = 3
CALL_SECONDS = 1.0
"""A size that takes longer is the last one measured of its collective."""
MEMORY_SHARE = 4
"""Memory that a device needs, in messages: its input, its output, and the library's copies."""
TIMEOUT_EXIT_CODE = 124
"""Exit code of coreutils' `timeout`, and of `zaya_jax.cli` when another process does not respond."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Settings of a measurement.

    Attributes:
      collectives: names of the collectives.
      smallest: bytes of the first message.
      largest: maximum bytes of a message.
      call_seconds: a size that takes longer is the last one measured of its collective.
      devices_per_node: number of devices per node; None means the devices of a host.
      limit_seconds: timeout of one collective in seconds.
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
            raise UserError(f'there is no collective "{unknown[0]}"; known are {", ".join(COLLECTIVES)}')
        if not 1 <= self.smallest <= self.largest:
            raise UserError(
                f"--min-size is {self.smallest:,} bytes and --max-size {self.largest:,}; the second must be "
                "at least the first, and that at least 1"
            )


def measure(sweep: Sweep, *, progress: Callable[[str], None] = lambda _: None) -> CollectiveTimes:
    """Times all collectives in all groups of the devices of all processes.

    Args:
      sweep: settings of the measurement.
      progress: callback that receives the name of the current measurement.

    Raises:
      UserError: if there is only one device, nodes differ in size, or a collective returns wrong values.
    """
    nodes = by_node(jax.devices(), hosts.host_names(), devices_per_node=sweep.devices_per_node)
    # Groups number the devices node by node, which need not be JAX's order.
    devices = [device for node in nodes for device in node]
    sizes = growing_sizes(sweep.smallest, min(sweep.largest, largest_message(devices)))
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


def largest_message(devices: Sequence[Any]) -> int:
    """Returns the bytes of the largest message that fits the memory of every device; all processes agree on
    it.
    """
    names = hosts.host_names()
    # All devices of a host allocate at the same time.
    on_host = [each for each in devices if names[each.process_index] == names[hosts.process()]]
    # Devices may differ in what is free, and all of them must send messages of one size.
    return hosts.reduce("memory", free_device_memory(len(on_host)) // MEMORY_SHARE, min)


def measure_sizes(
    grouping: DeviceGroups, devices: Sequence[Any], collective: str, sizes: Sequence[int], sweep: Sweep
) -> list[Timing]:
    """Checks a collective's results, then times it at each size until a size takes too long.

    Raises:
      UserError: if it returns wrong values.
    """
    # All groups of the layout run the collective at the same time, as in a train step.
    mesh = group_mesh([[devices[number] for number in group] for group in grouping.groups])
    # Processes without devices in the mesh cannot run its program, but must join the agreement below.
    takes_part = any(each.process_index == hosts.process() for each in mesh.devices.flat)
    what = f"{collective}, {grouping.layout}"
    with watched(what, sweep.limit_seconds):
        hosts.run_on_all("check", lambda: check_exchange(collective, mesh) if takes_part else None)
    by_size: dict[int, Timing] = {}
    for size in sizes:
        numbers = num_message_values(size, grouping.group_size)
        with watched(f"{what}, {numbers * NUMBER_BYTES:,} bytes", sweep.limit_seconds):
            took = _time(
                functools.partial(make_repeated_collective, collective, mesh, numbers) if takes_part else None
            )
        # Two sizes may round to the same number of values: keep one of them.
        by_size[numbers] = Timing(
            layout=grouping.layout,
            collective=collective,
            group_size=grouping.group_size,
            num_groups=len(grouping.groups),
            num_bytes=numbers * NUMBER_BYTES,
            seconds=took,
        )
        # All processes agree on `took`, so all of them stop at the same size.
        if took > sweep.call_seconds:
            break
    return list(by_size.values())


def _time(make: Callable[[], Callable[[int], Any]] | None) -> float:
    """Returns the seconds of one collective: the best round of the slowest process.

    Processes without devices in the group run nothing, and only take part in the agreement.
    """
    call = make() if make else lambda _: None
    jax.block_until_ready(call(1))  # compiles, and connects
    once = seconds(lambda: call(1))
    # Every process must run equally many collectives, or the processes would deadlock.
    calls = num_repetitions(hosts.reduce("one call", once, max))
    rounds = [seconds(lambda: call(calls)) / calls for _ in range(ROUNDS)]
    # A collective is done when the slowest process is.
    return hosts.reduce("rounds", min(rounds), max)


def check_exchange(collective: str, mesh: Any) -> None:
    """Runs a collective once on known inputs. They are small integers, so that sums are exact.

    Raises:
      UserError: if a device has a wrong result.
    """
    num_groups, size = mesh.devices.shape
    numbers = num_message_values(SMALLEST, size)
    # Every process makes the same values, so that each can compute all results.
    values_GNC = np.random.default_rng(0).integers(0, 100, (num_groups, size, numbers)).astype(np.float32)
    # One row per device, group by group, as the devices of the mesh.
    wanted_DC = np.concatenate([expected(collective, values_NC) for values_NC in values_GNC])
    found_DC = run_collective(collective, mesh, values_GNC.reshape(-1, numbers))
    # Each process can only read the results of its own devices.
    for shard in found_DC.addressable_shards:
        if not np.array_equal(np.asarray(shard.data), wanted_DC[shard.index]):
            raise UserError(
                f"{collective} returned wrong values on device {shard.device.id}; do not train on this "
                "machine until its communication library is fixed"
            )


def expected(collective: str, values_NC: np.ndarray) -> np.ndarray:
    """Computes the result of a collective for each device of a group in plain NumPy."""
    size, numbers = values_NC.shape
    part = numbers // size
    results: dict[str, Callable[[], np.ndarray]] = {
        "all_reduce": lambda: np.tile(values_NC.sum(axis=0), (size, 1)),
        "reduce_scatter": lambda: values_NC.sum(axis=0).reshape(size, part),
        # Each device sends only its part of the values, so that the result has as many as a device.
        "all_gather": lambda: np.tile(values_NC[:, :part].ravel(), (size, 1)),
        "broadcast": lambda: np.tile(values_NC[0], (size, 1)),
        # Each device receives its own part from every device.
        "all_to_all": lambda: values_NC.reshape(size, size, part).swapaxes(0, 1).reshape(size, numbers),
        # Each device sends to the next one of its group.
        "permute": lambda: np.roll(values_NC, 1, axis=0),
    }
    return results[collective]()


@contextlib.contextmanager
def watched(what: str, limit_seconds: float) -> Iterator[None]:
    """Exits the process if the block does not finish in time, because a hanging collective cannot be
    interrupted.
    """

    def give_up() -> None:
        sys.stderr.write(
            f"zaya: bench: {what}: not done within {limit_seconds:.0f} s in "
            f"{hosts.describe(hosts.process())}; look for a device or a link that is down\n"
        )
        sys.stderr.flush()
        # `sys.exit` would end this thread alone, and the main thread hangs outside of Python.
        os._exit(TIMEOUT_EXIT_CODE)

    timer = threading.Timer(limit_seconds, give_up)
    # A daemon thread, which does not keep the process alive after the block.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
