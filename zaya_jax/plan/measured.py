"""Measurements of `zaya bench` as stored in files; a plan uses them instead of data-sheet figures.

Bandwidths are defined as in [NCCL-tests], doc/PERFORMANCE.md: a message of S bytes that takes t seconds has
the algorithm bandwidth S / t. The bus bandwidth multiplies it by a factor that makes it the bandwidth of the
links, independent of the number of devices. S is the whole message: the input of a reduce-scatter, the output
of an all-gather.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from zaya_jax import fields
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import read_json
from zaya_jax.plan.links import BUS_FACTORS, bus_factor, interpolate

ALL, IN_NODE, RAILS, ONE_RAIL = "all", "node", "rails", "one rail"
"""Layouts: all devices; each node; the devices with the same number in each node (rails), all rails at once
or one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a measurement.

    Attributes:
      platform: jax's name of the platform.
      device: jax's name of the device kind.
      hosts: host names.
      jax: version of jax.
      date: date in ISO 8601.
    """

    platform: str
    device: str
    hosts: tuple[str, ...]
    jax: str
    date: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of a collective at one size.

    Attributes:
      layout: name of the grouping of devices.
      collective: name of the collective.
      group_size: devices per group.
      num_groups: groups that work at the same time.
      num_bytes: bytes of the message.
      seconds: time of the best round.
    """

    layout: str
    collective: str
    group_size: int
    num_groups: int
    num_bytes: int
    seconds: float

    def __post_init__(self):
        if self.group_size < 2 or self.num_bytes < 1 or not 0 < self.seconds < math.inf:
            raise UserError(
                f"invalid measurement: a {self.collective} of {self.num_bytes} bytes among "
                f"{self.group_size} devices in {self.seconds} s"
            )
        if self.collective not in BUS_FACTORS:
            raise UserError(f'unknown collective "{self.collective}"; known are {", ".join(BUS_FACTORS)}')

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the message per second."""
        return self.num_bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second of a device's links, to compare with their peak."""
        return self.algorithm_bandwidth * bus_factor(self.collective, self.group_size)


@dataclasses.dataclass(frozen=True)
class Line:
    """Hockney's model of the time of a message: t = latency + bytes x seconds per byte.

    Attributes:
      latency_seconds: time of an empty message.
      seconds_per_byte: additional time per byte.
      typical_error: median of |line - measured| / measured.
    """

    latency_seconds: float
    seconds_per_byte: float
    typical_error: float

    def seconds(self, num_bytes: float | int) -> float:
        """Returns the time of a message."""
        return self.latency_seconds + num_bytes * self.seconds_per_byte

    @property
    def half_bytes(self) -> float:
        """Size at which half of the time is latency: combine shorter messages."""
        return self.latency_seconds / self.seconds_per_byte if self.seconds_per_byte else math.inf


def fit_line(num_bytes: Sequence[int], seconds: Sequence[float]) -> Line:
    """Fits a line with nonnegative coefficients by least squares of relative errors.

    With absolute errors only the largest sizes would matter, and the latency would be their residual.

    Args:
      num_bytes: at least two sizes.
      seconds: time of each size.
    """
    from scipy.optimize import nnls  # takes a third of a second to import

    sizes, times = np.asarray(num_bytes, np.float64), np.asarray(seconds, np.float64)
    # Dividing each equation by its time turns absolute errors into relative ones.
    columns = np.stack([1 / times, sizes / times], axis=1)
    # Columns differ by many orders of magnitude: scale them for a well-conditioned solution.
    result = nnls(columns / columns.max(axis=0), np.ones(len(times)))[0] / columns.max(axis=0)
    errors = np.abs(columns @ result - 1)
    return Line(float(result[0]), float(result[1]), float(np.median(errors)))


@dataclasses.dataclass(frozen=True)
class Curve:
    """Measured times of a collective by ascending size, in groups of one size."""

    collective: str
    group_size: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def bus_factor(self) -> float:
        """Ratio of bus bandwidth to algorithm bandwidth."""
        return bus_factor(self.collective, self.group_size)

    @property
    def line(self) -> Line:
        """Latency and bandwidth of the fitted line."""
        return fit_line(self.num_bytes, self.seconds)

    @property
    def best_bus_bandwidth(self) -> float:
        """Largest bus bandwidth over all sizes, in bytes per second."""
        return max(
            size * self.bus_factor / time for size, time in zip(self.num_bytes, self.seconds, strict=True)
        )

    def at(self, num_bytes: float | int) -> float:
        """Returns the time of a message, by linear interpolation of logarithms.

        Smaller messages than measured take the smallest one's time; larger ones have the largest one's
        bandwidth.
        """
        return interpolate(self.num_bytes, self.seconds, num_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """The JSON file of `zaya bench collectives`.

    Attributes:
      what: kind of the file, "collectives".
      machine: the measured machine.
      num_processes: number of processes.
      num_nodes: number of nodes, which are hosts unless an option defines them.
      devices_per_node: devices per node.
      timings: all timings.
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
        """Times within a node by size; None if not measured."""
        # On a single node both layouts are the same, and the benchmark measures it under the name of the
        # first.
        return self.curve(ALL if self.num_nodes == 1 else IN_NODE, collective)

    def between_nodes(self, collective: str) -> Curve | None:
        """Times between nodes by size, with all devices of each node active; None if not measured."""
        if self.num_nodes == 1:
            return None
        # With one device per node, all devices are the one rail.
        return self.curve(ALL if self.devices_per_node == 1 else RAILS, collective)

    def curve(self, layout: str, collective: str) -> Curve | None:
        """Times of a collective in a layout by size; None if there are fewer than two sizes."""
        result = {
            each.num_bytes: each
            for each in self.timings
            if (each.layout, each.collective) == (layout, collective)
        }
        # Neither a line nor an interpolation can be made from a single size.
        if len(result) < 2:
            return None
        sizes = tuple(sorted(result))
        # All groups of a layout have the same number of devices.
        group_size = result[sizes[0]].group_size
        return Curve(collective, group_size, sizes, tuple(result[size].seconds for size in sizes))

    @property
    def layouts(self) -> list[str]:
        """Layouts in the order of measurement."""
        return list(dict.fromkeys(each.layout for each in self.timings))

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for `json.dumps`, with the bandwidths of each timing."""
        values = dataclasses.asdict(self)
        for plain, timing in zip(values["timings"], self.timings, strict=True):
            for name in DERIVED:
                plain[name] = getattr(timing, name)
        return values


DERIVED = ("algorithm_bandwidth", "bus_bandwidth")
"""Properties of a timing that are written for readers of the file, and ignored when it is read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTime:
    """Time of a call of `count` matrix products of [rows, depth] x [depth, columns]."""

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
        """FLOP/s; a multiply-add counts as two."""
        return 2.0 * self.rows * self.depth * self.columns * self.count / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTimes:
    """The JSON file of `zaya bench gemm`: machine, dtype, and the time of each product."""

    machine: Machine
    dtype: str
    products: tuple[ProductTime, ...]
    what: Literal["gemm"] = "gemm"

    def __post_init__(self):
        _check_any(self.products)

    @property
    def best_rate(self) -> float:
        """FLOP/s of the fastest product."""
        return max(each.rate for each in self.products)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTime:
    """Time of a pass over arrays: operation, bytes per array, bytes moved, and seconds."""

    operation: str
    array_bytes: int
    moved_bytes: int
    seconds: float

    def __post_init__(self):
        _check_seconds(self.operation, self.seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes read and written per second."""
        return self.moved_bytes / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTimes:
    """The JSON file of `zaya bench hbm`: machine, and the time of each pass."""

    machine: Machine
    passes: tuple[PassTime, ...]
    what: Literal["hbm"] = "hbm"

    def __post_init__(self):
        _check_any(self.passes)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the best pass over the largest arrays, because smaller ones may fit a cache."""
        largest = max(each.array_bytes for each in self.passes)
        return max(each.bandwidth for each in self.passes if each.array_bytes == largest)


def _check_seconds(name: str, seconds: float) -> None:
    # Written so that NaN is rejected as well.
    if not 0 < seconds < math.inf:
        raise UserError(f'"{name}" has a measured time of {seconds} s; it must be above 0 and finite')


def _check_any(measured: Sequence[Any]) -> None:
    if not measured:
        raise UserError("it contains no measurement; it must contain at least one")


MeasuredFile = CollectiveTimes | ProductTimes | PassTimes
KINDS: dict[str, type[MeasuredFile]] = {
    "collectives": CollectiveTimes,
    "gemm": ProductTimes,
    "hbm": PassTimes,
}
"""File types by their `what`."""


def read_measured(file: pathlib.Path) -> MeasuredFile:
    """Reads a file of `zaya bench collectives|gemm|hbm --json`.

    Raises:
      UserError: if the file is of another kind, or contains no measurement.
    """
    values = read_json(file)
    kind = KINDS.get(str(values.get("what")))
    if kind is None:
        wanted = ", ".join(f"zaya bench {name} --json" for name in KINDS)
        raise UserError(f'{file} has "what": {values.get("what")!r}; it must be a file of {wanted}')
    # The bandwidths in the file are derived from the other fields: ignore them.
    for each in values["timings"] if isinstance(values.get("timings"), list) else ():
        # Values of other types are left for `build`, which reports them.
        for name in DERIVED if isinstance(each, dict) else ():
            each.pop(name, None)
    try:
        return fields.build(kind, values, "")
    except UserError as error:
        raise UserError(f"{file} is not a valid file of zaya bench {values['what']}: {error}") from error
