"""What changed of a node between two looks, as far as it says that something fails. Pure.

A change is told when it begins, and not again while it lasts. What is counted, as errors of a link, is told
at each look at which it has risen: the rules say how many of those are too many.
"""

import dataclasses
from collections.abc import Iterator, Mapping

NIC_DRIVER, LINK_DOWN, LINK_UP, LINK_ERRORS = "nic_driver", "link_down", "link_up", "link_errors"
UNCORRECTABLE, CORRECTABLE = "ecc_uncorrectable", "ecc_correctable"
PAGE_RETIRED, XGMI, THERMAL = "page_retired", "xgmi_error", "thermal"
DISK_FULL, STORAGE_STALL, CLOCK = "disk_full", "storage_stall", "clock"
SENSED = (
    NIC_DRIVER, LINK_DOWN, LINK_UP, LINK_ERRORS, UNCORRECTABLE, CORRECTABLE, PAGE_RETIRED, XGMI, THERMAL,
    DISK_FULL, STORAGE_STALL, CLOCK,
)  # fmt: skip
"""Classes that sensors tell of; each must have its rule."""
LEAST_FREE = 0.01
"""Of a file system: with less the next checkpoint may not fit."""
MOST_SKEW = 5.0
"""Seconds between a host's clock and the file system's, behind which times of hosts say nothing together."""
MOST_WAIT = 60.0
"""Seconds that a small file may take until it is on the disk."""
MOST_CELSIUS = 100.0
"""Of a GPU's hottest place: MI300X slows down at 100 to 105."""
MOST_AT_ONCE = 1000
"""Of a counter that leapt: as often as it is told at most."""


@dataclasses.dataclass(frozen=True)
class Port:
    """A port of a device that can do RDMA.

    Attributes:
      is_active: whether its link is up.
      errors: its counters that rise when something goes wrong, by name.
      netdev: the network interface over it, if it has one.
    """

    is_active: bool
    errors: Mapping[str, int]
    netdev: str | None = None


@dataclasses.dataclass(frozen=True)
class GpuCounts:
    """What a GPU counts of itself; None for what it does not tell.

    Attributes:
      uncorrectable: errors of its memories that were not corrected.
      correctable: that were.
      retired: pages of its memory that are not used any more.
      xgmi: errors of its links to other GPUs.
      celsius: of its hottest place.
    """

    uncorrectable: int | None = None
    correctable: int | None = None
    retired: int | None = None
    xgmi: int | None = None
    celsius: float | None = None


@dataclasses.dataclass(frozen=True)
class Node:
    """All that was read at a look.

    Attributes:
      ports: by device and number, such as "mlx5_0/1".
      links: of network interfaces with hardware, whether they are up.
      gpus: by name.
      free: share of the run's file system that is free; None where that could not be asked.
      waits: seconds that a small file is waiting there to be on the disk, or waited last.
      skew: seconds that this host's clock is ahead of that file system's; None where nobody knows.
    """

    ports: Mapping[str, Port] = dataclasses.field(default_factory=dict)
    links: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    gpus: Mapping[str, GpuCounts] = dataclasses.field(default_factory=dict)
    free: float | None = None
    waits: float = 0.0
    skew: float | None = None


@dataclasses.dataclass(frozen=True)
class NodeChange:
    """What a look found.

    Attributes:
      name: of the class that a rule has for it.
      source: the sensor.
      evidence: in words, with the readings.
      times: that it counts.
    """

    name: str
    source: str
    evidence: str
    times: int = 1


def changes(before: Node, now: Node) -> Iterator[NodeChange]:
    """What of two looks, one behind the other, says that something fails, or has come back."""
    yield from _of_ports(before, now)
    yield from _of_links(before.links, now.links)
    for name, gpu in now.gpus.items():
        yield from _of_gpu(name, before.gpus.get(name, gpu), gpu)
    yield from _of_storage(before, now)


def _of_ports(before: Node, now: Node) -> Iterator[NodeChange]:
    for name, was in before.ports.items():
        port = now.ports.get(name)
        if port is None:
            # The device has gone, its driver with it; what the cable says is another matter.
            netdev = f", and {was.netdev} says that it is up" if now.links.get(was.netdev or "") else ""
            yield NodeChange(NIC_DRIVER, name, f"{name} is gone{netdev}")
        elif was.is_active != port.is_active:
            yield NodeChange(
                LINK_UP if port.is_active else LINK_DOWN, name, f"{name} is {_up(port.is_active)}"
            )
        if port is not None:
            yield from _of_errors(name, was.errors, port.errors)


def _of_errors(name: str, before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[NodeChange]:
    rises = {error: count - before[error] for error, count in now.items() if count > before.get(error, count)}
    if rises:
        told = ", ".join(f"{error} rose by {rise} to {now[error]}" for error, rise in rises.items())
        yield NodeChange(LINK_ERRORS, name, f"{name}: {told}")


def _of_links(before: Mapping[str, bool], now: Mapping[str, bool]) -> Iterator[NodeChange]:
    for name, is_up in now.items():
        if before.get(name, is_up) != is_up:
            yield NodeChange(LINK_UP if is_up else LINK_DOWN, name, f"{name} is {_up(is_up)}")


def _up(is_up: bool) -> str:
    return "up" if is_up else "down"


def _of_gpu(name: str, before: GpuCounts, now: GpuCounts) -> Iterator[NodeChange]:
    counted = (
        (UNCORRECTABLE, before.uncorrectable, now.uncorrectable, "uncorrectable errors"),
        (CORRECTABLE, before.correctable, now.correctable, "correctable errors"),
        (PAGE_RETIRED, before.retired, now.retired, "retired pages"),
        (XGMI, before.xgmi, now.xgmi, "errors of links to other GPUs"),
    )
    for kind, old, new, words in counted:
        if old is not None and new is not None and new > old:
            yield NodeChange(
                kind, name, f"{name}: {new - old} more {words}, {new} in all", min(new - old, MOST_AT_ONCE)
            )
    if now.celsius is not None and now.celsius >= MOST_CELSIUS:
        yield NodeChange(THERMAL, name, f"{name}: its hottest place has {now.celsius:.0f} degrees Celsius")


def _of_storage(before: Node, now: Node) -> Iterator[NodeChange]:
    if now.free is not None and now.free < LEAST_FREE <= (1.0 if before.free is None else before.free):
        yield NodeChange(DISK_FULL, "disk", f"{now.free:.2%} of the run's file system is free")
    if now.waits > MOST_WAIT >= before.waits:
        yield NodeChange(STORAGE_STALL, "disk", f"a small file waits for the disk since {now.waits:.0f} s")
    if now.skew is not None and abs(now.skew) > MOST_SKEW >= abs(before.skew or 0.0):
        yield NodeChange(CLOCK, "clock", f"this host's clock is {now.skew:+.1f} s from the file system's")
