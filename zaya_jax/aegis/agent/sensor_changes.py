"""Changes between two samples of a node that indicate failures, as pure functions.

A change is reported once, when it begins. An increase of a counter, such as the errors of a link, is reported
at each sample; the rules decide how many increases are too many.
"""

import dataclasses
from collections.abc import Iterator, Mapping

NIC_DRIVER, LINK_DOWN, LINK_UP, LINK_ERRORS = "nic_driver", "link_down", "link_up", "link_errors"
UNCORRECTABLE, CORRECTABLE = "ecc_uncorrectable", "ecc_correctable"
PAGE_RETIRED, XGMI, THERMAL = "page_retired", "xgmi_error", "thermal"
DISK_FULL, STORAGE_STALL, CLOCK = "disk_full", "storage_stall", "clock"
SENSOR_CLASSES = (
    NIC_DRIVER, LINK_DOWN, LINK_UP, LINK_ERRORS, UNCORRECTABLE, CORRECTABLE, PAGE_RETIRED, XGMI, THERMAL,
    DISK_FULL, STORAGE_STALL, CLOCK,
)  # fmt: skip
"""Classes that sensors report; each must have a rule."""
MIN_FREE_SHARE = 0.01
"""Free share of a file system below which the next checkpoint may not fit."""
MAX_SKEW_SECONDS = 5.0
"""Difference between a host's clock and the file system's, above which events of hosts cannot be ordered."""
MAX_WRITE_SECONDS = 60.0
"""Maximum time for writing a small file to disk."""
MAX_CELSIUS = 100.0
"""Maximum hotspot temperature of a GPU: MI300X throttles at 100 to 105 degrees."""
MAX_TIMES = 1000
"""Maximum number of times that one increase of a counter counts."""


@dataclasses.dataclass(frozen=True)
class PortState:
    """State of an RDMA port.

    Attributes:
      is_active: whether the link is up.
      errors: error counters by name.
      netdev: name of its network interface; None if it has none.
    """

    is_active: bool
    errors: Mapping[str, int]
    netdev: str | None = None


@dataclasses.dataclass(frozen=True)
class GpuCounts:
    """Error counts and temperature of a GPU; None for values that are not available.

    Attributes:
      uncorrectable: number of uncorrectable memory errors.
      correctable: number of correctable memory errors.
      retired: number of retired memory pages.
      xgmi: number of errors on links to other GPUs.
      celsius: hotspot temperature in degrees Celsius.
    """

    uncorrectable: int | None = None
    correctable: int | None = None
    retired: int | None = None
    xgmi: int | None = None
    celsius: float | None = None


@dataclasses.dataclass(frozen=True)
class NodeState:
    """A sample of all sensors of a node.

    Attributes:
      ports: RDMA ports by device and number, such as "mlx5_0/1".
      links: whether each network interface with hardware is up, by name.
      gpus: GPUs by name.
      free_share: free share of the run's file system, from 0 to 1; None if unknown.
      write_seconds: duration in seconds of the latest write of a small file to it.
      clock_skew: seconds by which this host's clock is ahead of the file system's; None if unknown.
    """

    ports: Mapping[str, PortState] = dataclasses.field(default_factory=dict)
    links: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    gpus: Mapping[str, GpuCounts] = dataclasses.field(default_factory=dict)
    free_share: float | None = None
    write_seconds: float = 0.0
    clock_skew: float | None = None


@dataclasses.dataclass(frozen=True)
class NodeChange:
    """A change that indicates a failure or a recovery.

    Attributes:
      name: class of the change, one of `SENSOR_CLASSES`.
      source: name of the sensor.
      evidence: description with the readings.
      times: number of times that it counts for its rule.
    """

    name: str
    source: str
    evidence: str
    times: int = 1


def find_changes(before: NodeState, now: NodeState) -> Iterator[NodeChange]:
    """Yields the changes between two consecutive samples."""
    yield from _of_ports(before, now)
    yield from _of_links(before.links, now.links)
    # A GPU that was not in the previous sample has no change: amd-smi may have failed then.
    for name, gpu in now.gpus.items():
        yield from _of_gpu(name, before.gpus.get(name, gpu), gpu)
    yield from _of_storage(before, now)


def _of_ports(before: NodeState, now: NodeState) -> Iterator[NodeChange]:
    for name, was in before.ports.items():
        port = now.ports.get(name)
        if port is None:
            # A device disappears with its driver. Its interface may still report a link, as the cable is
            # fine.
            netdev = f", but {was.netdev} reports that it is up" if now.links.get(was.netdev or "") else ""
            yield NodeChange(NIC_DRIVER, name, f"{name} is gone{netdev}")
        elif was.is_active != port.is_active:
            yield NodeChange(
                LINK_UP if port.is_active else LINK_DOWN, name, f"{name} is {_up(port.is_active)}"
            )
        if port is not None:
            yield from _of_errors(name, was.errors, port.errors)


def _of_errors(name: str, before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[NodeChange]:
    # A counter that decreased was reset, as by reloading the driver, which is no error.
    rises = {error: count - before[error] for error, count in now.items() if count > before.get(error, count)}
    if rises:
        rises_text = ", ".join(
            f"{error} increased by {rise} to {now[error]}" for error, rise in rises.items()
        )
        yield NodeChange(LINK_ERRORS, name, f"{name}: {rises_text}")


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
    for kind, old, new, noun in counted:
        if old is not None and new is not None and new > old:
            yield NodeChange(
                kind, name, f"{name}: {new - old} more {noun}, {new} in total", min(new - old, MAX_TIMES)
            )
    # Reported at every sample while it lasts; the rule decides how many are too many.
    if now.celsius is not None and now.celsius >= MAX_CELSIUS:
        yield NodeChange(
            THERMAL, name, f"{name}: the hotspot temperature is {now.celsius:.0f} degrees Celsius"
        )


def _of_storage(before: NodeState, now: NodeState) -> Iterator[NodeChange]:
    # These conditions are reported when they begin, not while they last.
    if now.free_share is not None and now.free_share < MIN_FREE_SHARE <= (
        1.0 if before.free_share is None else before.free_share
    ):
        yield NodeChange(DISK_FULL, "disk", f"{now.free_share:.2%} of the run's file system is free")
    if now.write_seconds > MAX_WRITE_SECONDS >= before.write_seconds:
        yield NodeChange(
            STORAGE_STALL, "disk", f"writing a small file takes {now.write_seconds:.0f} s so far"
        )
    if now.clock_skew is not None and abs(now.clock_skew) > MAX_SKEW_SECONDS >= abs(before.clock_skew or 0.0):
        yield NodeChange(
            CLOCK, "clock", f"this host's clock is {now.clock_skew:+.1f} s from the file system's"
        )
