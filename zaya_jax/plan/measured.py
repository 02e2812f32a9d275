"""What `zaya bench` measured of a machine, as files have it, for a plan in place of figures on paper.

Bandwidths are those of [NCCL-tests], doc/PERFORMANCE.md: a message of S bytes that takes t seconds has the
algorithm bandwidth S / t, and the bus bandwidth is that times a factor which makes it the links' own, however
many devices take part. S is all of a message: what a device has before a reduce-scatter, and after an
all-gather.
"""

import bisect
import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from zaya_jax import fields
from zaya_jax.json_files import read_json

ALL, IN_NODE, RAILS, ONE_RAIL = "all", "node", "rails", "one rail"
"""Layouts: all devices; each node's; the devices of one number in each node, all numbers at once, or one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """On what was measured.

    Attributes:
      platform: as jax calls it.
      device: its kind, as jax calls it.
      hosts: their names.
      jax: its version.
      date: ISO 8601.
    """

    platform: str
    device: str
    hosts: tuple[str, ...]
    jax: str
    date: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """A collective at a size.

    Attributes:
      layout: which devices are a group.
      collective: its name.
      group_size: devices in a group.
      num_groups: that work at once.
      num_bytes: of the message.
      seconds: that it takes, the best of some rounds.
    """

    layout: str
    collective: str
    group_size: int
    num_groups: int
    num_bytes: int
    seconds: float

    def __post_init__(self):
        if self.group_size < 2 or self.num_bytes < 1 or not 0 < self.seconds < math.inf:
            raise ValueError(
                f"a {self.collective} of {self.num_bytes} bytes by {self.group_size} devices in "
                f"{self.seconds} s cannot have been measured"
            )
        if self.collective not in _BUS_FACTORS:
            raise ValueError(
                f'there is no collective "{self.collective}"; known are {", ".join(_BUS_FACTORS)}'
            )

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the message a second."""
        return self.num_bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second of a device's links, to be held against what they can."""
        return self.algorithm_bandwidth * bus_factor(self.collective, self.group_size)


_BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    # All bytes leave one device, or each.
    "broadcast": lambda n: 1.0,
    "permute": lambda n: 1.0,
}


def bus_factor(collective: str, group_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth ([NCCL-tests], "Summary" of doc/PERFORMANCE.md)."""
    return _BUS_FACTORS[collective](group_size)


@dataclasses.dataclass(frozen=True)
class Line:
    """Time as a straight line over size: t = latency + bytes x seconds a byte, Hockney's alpha and beta.

    Attributes:
      latency_seconds: of an empty message.
      seconds_per_byte: of all that follow.
      typical_error: the median of |line - measured| / measured.
    """

    latency_seconds: float
    seconds_per_byte: float
    typical_error: float

    def seconds(self, num_bytes: float | int) -> float:
        """That a message of so many bytes takes."""
        return self.latency_seconds + num_bytes * self.seconds_per_byte

    @property
    def half_bytes(self) -> float:
        """Size at which half of the time is latency: shorter messages want to be sent together."""
        return self.latency_seconds / self.seconds_per_byte if self.seconds_per_byte else math.inf


def fit_line(num_bytes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line of the least squares of relative errors, neither of whose parts is below zero.

    Of absolute errors only the largest sizes would count, and the latency would be what is left of them.

    Args:
      num_bytes: two sizes or more.
      seconds: that each took.
    """
    sizes, times = np.asarray(num_bytes, np.float64), np.asarray(seconds, np.float64)
    columns = np.stack([1 / times, sizes / times], axis=1)
    found = np.linalg.lstsq(columns / columns.max(axis=0), np.ones(len(times)))[0] / columns.max(axis=0)
    if found.min() < 0:
        # At the edge one of the two is zero, and the other fits alone; the better of both is the least.
        alone = [_fit_alone(columns, which) for which in (0, 1)]
        found = min(alone, key=lambda line: float(np.sum((columns @ line - 1) ** 2)))
    errors = np.abs(columns @ found - 1)
    return Line(float(found[0]), float(found[1]), float(np.median(errors)))


def _fit_alone(columns: np.ndarray, which: int) -> np.ndarray:
    column = columns[:, which]
    found = np.zeros(2)
    found[which] = column.sum() / (column @ column)
    return found


@dataclasses.dataclass(frozen=True)
class Curve:
    """Measured times of a collective by size, ascending, in groups of one size."""

    collective: str
    group_size: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def bus_factor(self) -> float:
        """Bus bandwidth over algorithm bandwidth."""
        return bus_factor(self.collective, self.group_size)

    @property
    def line(self) -> Line:
        """The straight line through it."""
        return fit_line(self.num_bytes, self.seconds)

    @property
    def best_bus_bandwidth(self) -> float:
        """Bytes a second, at the size that has most."""
        return max(
            size * self.bus_factor / time for size, time in zip(self.num_bytes, self.seconds, strict=True)
        )

    def at(self, num_bytes: float | int) -> float:
        """Seconds of a message: between two sizes on the straight line of their logarithms.

        Below the smallest it takes the same time, above the largest the same bandwidth.
        """
        after = bisect.bisect_left(self.num_bytes, num_bytes)
        if after == 0:
            return self.seconds[0]
        if after == len(self.num_bytes):
            return self.seconds[-1] * num_bytes / self.num_bytes[-1]
        sizes, times = (np.log(each[after - 1 : after + 1]) for each in (self.num_bytes, self.seconds))
        return float(np.exp(np.interp(math.log(num_bytes), sizes, times)))

    def among(self, num_bytes: float | int, group_size: int) -> float:
        """Seconds of a message among another number of devices.

        In a ring each sends an N-th of the message N - 1 times ([NCCL-tests]): as many bytes a time take as
        long, however many devices there are.
        """
        hops = (group_size - 1) / (self.group_size - 1)
        return self.at(num_bytes * self.group_size / group_size) * hops


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """What `zaya bench collectives --json` writes.

    Attributes:
      what: tells such a file from others.
      machine: on which it was measured.
      num_processes: of the run.
      num_nodes: which are hosts, or what an option called so.
      devices_per_node: in each.
      timings: all of them.
    """

    machine: Machine
    num_processes: int
    num_nodes: int
    devices_per_node: int
    timings: tuple[Timing, ...]
    what: Literal["collectives"] = "collectives"

    def __post_init__(self):
        _check_any(self.timings)

    def in_node(self, collective: str) -> Curve | None:
        """Times among the devices of a node, by size; None where nothing was measured there."""
        return self.curve(ALL if self.num_nodes == 1 else IN_NODE, collective)

    def between_nodes(self, collective: str) -> Curve | None:
        """Times between nodes, all devices of each at once, by size; None as above."""
        if self.num_nodes == 1:
            return None
        return self.curve(ALL if self.devices_per_node == 1 else RAILS, collective)

    def curve(self, layout: str, collective: str) -> Curve | None:
        """Times of a collective in a layout by size; None where there are not two of them."""
        found = {
            each.num_bytes: each
            for each in self.timings
            if (each.layout, each.collective) == (layout, collective)
        }
        if len(found) < 2:
            return None
        sizes = tuple(sorted(found))
        group_size = found[sizes[0]].group_size
        return Curve(collective, group_size, sizes, tuple(found[size].seconds for size in sizes))

    @property
    def layouts(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(each.layout for each in self.timings))

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`; beside each time, what it says of the links."""
        values = dataclasses.asdict(self)
        for plain, timing in zip(values["timings"], self.timings, strict=True):
            for name in DERIVED:
                plain[name] = getattr(timing, name)
        return values


DERIVED = ("algorithm_bandwidth", "bus_bandwidth")
"""Of a timing, written for those who read the file, and computed anew by us."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTime:
    """A product of matrices that was timed: `count` of [rows, depth] x [depth, columns] in one call."""

    name: str
    rows: int
    depth: int
    columns: int
    count: int
    seconds: float

    def __post_init__(self):
        _check_seconds(self.name, self.seconds)

    @property
    def rate(self) -> float:
        """Operations a second, a multiply and an add counted as two."""
        return 2.0 * self.rows * self.depth * self.columns * self.count / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTimes:
    """What `zaya bench gemm --json` writes: a machine, the type of numbers, each product's time."""

    machine: Machine
    dtype: str
    products: tuple[ProductTime, ...]
    what: Literal["gemm"] = "gemm"

    def __post_init__(self):
        _check_any(self.products)

    @property
    def best_rate(self) -> float:
        """Operations a second of the product that has most."""
        return max(each.rate for each in self.products)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTime:
    """A pass over arrays that was timed: what it does, the bytes of an array, those moved, and its time."""

    operation: str
    array_bytes: int
    moved_bytes: int
    seconds: float

    def __post_init__(self):
        _check_seconds(self.operation, self.seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes a second, read and written."""
        return self.moved_bytes / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTimes:
    """What `zaya bench hbm --json` writes: a machine, and each pass over arrays with its time."""

    machine: Machine
    passes: tuple[PassTime, ...]
    what: Literal["hbm"] = "hbm"

    def __post_init__(self):
        _check_any(self.passes)

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the best pass over the largest arrays: smaller ones may lie in a cache."""
        largest = max(each.array_bytes for each in self.passes)
        return max(each.bandwidth for each in self.passes if each.array_bytes == largest)


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f'"{name}" in {seconds} s cannot have been measured; it must be above 0')


def _check_any(measured: Sequence[Any]) -> None:
    if not measured:
        raise ValueError("it holds no measurement; it must hold one at least")


MeasuredFile = CollectiveTimes | ProductTimes | PassTimes
KINDS: dict[str, type[MeasuredFile]] = {
    "collectives": CollectiveTimes,
    "gemm": ProductTimes,
    "hbm": PassTimes,
}
"""By `what` of their files."""


def read_measured(file: pathlib.Path) -> MeasuredFile:
    """What a file of `zaya bench collectives|gemm|hbm --json` says.

    Raises:
      ValueError: if it is no such file, or nothing was measured.
    """
    values = read_json(file)
    kind = KINDS.get(str(values.get("what")))
    if kind is None:
        wanted = ", ".join(f"zaya bench {name} --json" for name in KINDS)
        raise ValueError(f'{file} says "what" is {values.get("what")!r}; it must be a file of {wanted}')
    for each in values["timings"] if isinstance(values.get("timings"), list) else ():
        for name in DERIVED if isinstance(each, dict) else ():
            each.pop(name, None)
    try:
        found = fields.build(kind, values, "")
    except ValueError as error:
        raise ValueError(f"{file} is not what zaya bench {values['what']} writes: {error}") from error
    return found
