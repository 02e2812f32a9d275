"""Time of a collective by message size, kind, and number of ranks, from published or measured points.

Each point becomes a pair: the time that its bytes need on the wire at the data sheet's rate, and the time
that was measured. One curve through these pairs then serves other sizes, kinds and groups:

- kinds: a ring sends `bus_factor` times the message over each rank's links, whatever the kind ([NCCL-tests]).
  Kinds with equal bytes on the wire take equal time, so that the published all-reduces also give all-gathers
  and reduce-scatters. This keeps the whole latency for half of the steps, which errs towards slow. A pairwise
  all-to-all takes `all_to_all_slowdown` times as long.
- part of a node: n GPUs of a fully connected node use n - 1 links each ([ZAYA1-base] section III).
- more nodes: bytes per NIC do not grow with the number of nodes, but steps do, and each step beyond those of
  the measured group costs a latency, as in the tuning model of [RCCL]: a ring of n nodes has n - 1 steps for
  an all-gather. An all-reduce takes the shorter of ring and tree. The latency of the curve itself counts once
  per call and not per step: with 219 us per step, 8 nodes would need 2.6 ms more than 2 for equal bytes on
  the wire, and those of `MI325X_POINTS` need at most 0.3 ms more.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from zaya_jax.plan.cases import NODE_GPUS, NODE_POINTS, PUBLISHED, PUBLISHED_LINK, PUBLISHED_NIC, PlanCase

BUS_FACTORS = {
    # Equal to a reduce-scatter followed by an all-gather.
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    # Each link carries the whole message once, whatever the number of devices.
    "broadcast": lambda n: 1.0,
    "permute": lambda n: 1.0,
}
"""Ratio of bus bandwidth to algorithm bandwidth by collective, as a function of the number of ranks."""

NODE_STEP_SECONDS = 2.1e-6
"""Latency of a ring step within a node ([RCCL], tuning_model_5, Ring, Simple)."""


def bus_factor(collective: str, group_size: int) -> float:
    """Ratio of bus bandwidth to algorithm bandwidth ([NCCL-tests], "Summary" of doc/PERFORMANCE.md)."""
    return BUS_FACTORS[collective](group_size)


def interpolate(at: Sequence[float | int], seconds: Sequence[float], value: float | int) -> float:
    """Returns the time at a value by linear interpolation of logarithms; it never falls as the value grows.

    Values below the first take its time. Values above the last have the rate of the last.

    Args:
      at: sizes, or their times on the wire; ascending and above 0.
      seconds: time at each of them. Times that fall are replaced by the nearest rising ones, by isotonic
        regression: a library that changes its algorithm at a size can be slower at a smaller one.
      value: size, or its time on the wire.
    """
    logs, log_seconds = _rising(tuple(at), tuple(seconds))
    if bisect.bisect_left(at, value) == len(at):
        return math.exp(log_seconds[-1]) * value / at[-1]
    # Latency-bound and bandwidth-bound sizes are both straight lines in logarithms.
    return math.exp(np.interp(math.log(value) if value > 0 else -math.inf, logs, log_seconds))


@functools.cache
def _rising(at: tuple[float | int, ...], seconds: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    from scipy.optimize import isotonic_regression  # takes a third of a second to import

    return np.log(at), isotonic_regression(np.log(seconds)).x


@dataclasses.dataclass(frozen=True)
class WireCurve:
    """Time of a collective by the time that its bytes need on the wire at the data sheet's rate.

    Attributes:
      collective: kind that was timed.
      wire: seconds on the wire, ascending.
      seconds: measured seconds.
      ranks: GPUs per node of the timed groups.
      nodes: nodes of the timed groups.
    """

    collective: str
    wire: tuple[float, ...]
    seconds: tuple[float, ...]
    ranks: int
    nodes: int

    def at(self, wire: float | int) -> float:
        """Returns the time of a message by its time on the wire."""
        return interpolate(self.wire, self.seconds, wire)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """Links of a cluster: the time of every collective.

    Attributes:
      link_bandwidth: bytes per second between two GPUs of a node on the data sheet, one way.
      network_bandwidth: bytes per second of a GPU's NIC on the data sheet, one way.
      case: assumptions for what was not measured.
      measured_in_node: curves measured within a node, by collective.
      measured_between: curves measured between nodes, by collective.
    """

    link_bandwidth: float
    network_bandwidth: float
    case: PlanCase = PUBLISHED
    measured_in_node: Mapping[str, WireCurve] = dataclasses.field(default_factory=dict)
    measured_between: Mapping[str, WireCurve] = dataclasses.field(default_factory=dict)

    def seconds(self, collective: str, num_bytes: float | int, *, ranks: int, nodes: int) -> float:
        """Returns the time of a collective among `nodes` nodes with `ranks` GPUs each.

        Args:
          collective: kind, a key of `BUS_FACTORS`.
          num_bytes: bytes of the message: the larger of input and output on one GPU.
          ranks: GPUs of the group in each node.
          nodes: nodes of the group.
        """
        # Links and NICs carry different parts at the same time: the slower ones determine the time.
        # In a ring over several nodes, one of `ranks` hops is over a NIC instead of a link.
        inner = num_bytes if nodes == 1 else num_bytes * _in_node_share(collective, ranks, nodes)
        return max(
            self.in_node(collective, inner, ranks=ranks),
            self.between_nodes(collective, num_bytes, ranks=ranks, nodes=nodes),
        )

    def in_node(self, collective: str, num_bytes: float | int, *, ranks: int) -> float:
        """Returns the time of a collective among GPUs of one node; 0 for a single GPU."""
        if ranks == 1 or not num_bytes:
            return 0.0
        wire = num_bytes * bus_factor(collective, ranks) / ((ranks - 1) * self.link_bandwidth)
        curve, slowdown = _ring_of(self.measured_in_node, collective), 1.0
        if curve is None:
            curve, slowdown = _published_node(), self.case.node_slowdown
        return curve.at(wire * slowdown * self._slowdown(collective, curve))

    def between_nodes(self, collective: str, num_bytes: float | int, *, ranks: int, nodes: int) -> float:
        """Returns the time of a collective's NICs; 0 on a single node."""
        if nodes == 1 or not num_bytes:
            return 0.0
        wire = num_bytes * _nic_share(collective, ranks, nodes) / self.network_bandwidth
        curve, slowdown = _ring_of(self.measured_between, collective), 1.0
        if curve is None:
            curve = _published_network(tuple(self.case.network_points.items()))
            slowdown = self.case.network_slowdown
        further = self._latency(collective, ranks, nodes)
        contained = self._latency(curve.collective, curve.ranks, curve.nodes)
        return curve.at(wire * slowdown * self._slowdown(collective, curve)) + max(further - contained, 0.0)

    def _slowdown(self, collective: str, curve: WireCurve) -> float:
        """Wire time of an all-to-all relative to a ring; 1 if it was measured itself."""
        is_ring = collective != "all_to_all" or curve.collective == collective
        return 1.0 if is_ring else self.case.all_to_all_slowdown

    def _latency(self, collective: str, ranks: int, nodes: int) -> float:
        """Latency of all steps of the library's best algorithm ([RCCL], ncclTopoTuneModel)."""
        ring = nodes * (ranks - 1) * NODE_STEP_SECONDS + (nodes - 1) * self.case.network_step_seconds
        if collective != "all_reduce":
            return ring
        # Only all-reduces have a tree in RCCL: through each node, and then to half of the nodes at a time.
        # Both algorithms reduce in the first half of their steps, and distribute in the second.
        depth = math.ceil(math.log2(nodes))
        tree = (ranks - 1) * NODE_STEP_SECONDS + depth * self.case.network_step_seconds
        return 2 * min(ring, tree)


def _ring_of(measured: Mapping[str, WireCurve], collective: str) -> WireCurve | None:
    """Returns the measured curve of a kind, else of another kind that a ring computes; None without both."""
    kinds = (collective, "all_reduce", "reduce_scatter", "all_gather")
    return next((measured[kind] for kind in kinds if kind in measured), None)


def _in_node_share(collective: str, ranks: int, nodes: int) -> float:
    """Bytes over the links of a node in a group over several nodes, relative to a group within the node."""
    if ranks == 1:
        return 1.0
    if collective == "all_to_all":
        return 1 / nodes  # the parts for GPUs of the same node
    return bus_factor(collective, ranks * nodes) * (ranks - 1) / ranks / bus_factor(collective, ranks)


def _nic_share(collective: str, ranks: int, nodes: int) -> float:
    """Bytes over each NIC relative to the message."""
    if collective == "all_to_all":
        return bus_factor(collective, nodes)  # the parts for GPUs of other nodes; nothing is shared
    # Each of the node's NICs carries an equal part of what the ring sends between two nodes.
    return bus_factor(collective, ranks * nodes) / ranks


def wire_curve(
    collective: str, points: Mapping[int, float], *, rate: float, ranks: int, nodes: int
) -> WireCurve:
    """Returns the curve of timed messages.

    Args:
      collective: kind of the messages.
      points: seconds by bytes, ascending.
      rate: bytes per second of a GPU's links in the node, or of its NIC if there are several nodes.
      ranks: GPUs of the group in each node.
      nodes: nodes of the group.
    """
    share = bus_factor(collective, ranks) if nodes == 1 else _nic_share(collective, ranks, nodes)
    wire = tuple(num_bytes * share / rate for num_bytes in points)
    return WireCurve(collective, wire, tuple(points.values()), ranks, nodes)


@functools.cache
def _published_node() -> WireCurve:
    points = {size: 1e-6 * time for size, time in NODE_POINTS.items()}
    return wire_curve("all_reduce", points, rate=(NODE_GPUS - 1) * PUBLISHED_LINK, ranks=NODE_GPUS, nodes=1)


@functools.cache
def _published_network(microseconds: tuple[tuple[int, float], ...]) -> WireCurve:
    points = {size: 1e-6 * time for size, time in microseconds}
    return wire_curve("all_reduce", points, rate=PUBLISHED_NIC, ranks=NODE_GPUS, nodes=2)
