"""Published times of collectives, and the three cases of a plan that follow from them.

The published case is the one to quote. The other two replace each of its assumptions by the best and the
worst value that has a source. Only `kernel_rate` was measured by this project.
"""

import dataclasses
from collections.abc import Callable, Mapping

MIB = 2**20

# Microseconds of an all-reduce of float32 by message bytes, out of place, as printed by rccl-tests in
# [RCCL-runs]. The first point of each is the smallest time, which smaller messages take as well.
NODE_POINTS = {
    65_536: 14.25, 262_144: 17.46, 1 * MIB: 28.39, 2 * MIB: 36.68, 4 * MIB: 52.96, 8 * MIB: 84.78,
    16 * MIB: 149.9, 32 * MIB: 246.3, 64 * MIB: 432.5, 128 * MIB: 800.3, 256 * MIB: 1540.4,
    512 * MIB: 3027.1, 1024 * MIB: 5990.7, 2048 * MIB: 11_940.0, 4096 * MIB: 23_841.0, 8192 * MIB: 47_617.0,
}  # fmt: skip
"""One node of 8 MI300X: 315.7 GB/s bus bandwidth at 8 GiB."""
TWO_NODE_POINTS = {
    128: 218.7, 65_536: 241.1, 262_144: 248.8, 1 * MIB: 414.8, 2 * MIB: 318.6, 4 * MIB: 337.9,
    8 * MIB: 402.2, 16 * MIB: 497.3, 32 * MIB: 590.3, 64 * MIB: 821.9, 128 * MIB: 1448.8, 256 * MIB: 1713.4,
    512 * MIB: 3096.3, 1024 * MIB: 5908.3, 2048 * MIB: 11_574.0, 4096 * MIB: 22_788.0, 8192 * MIB: 45_224.0,
}  # fmt: skip
"""Two nodes of 8 MI300X with 8 CX-7 NICs each, RCCL 2.22.3: 356.1 GB/s bus bandwidth at 8 GiB."""
POLLARA_POINTS = {
    128: 41.4, 65_536: 59.17, 262_144: 67.22, 1 * MIB: 81.37, 2 * MIB: 98.50, 4 * MIB: 118.6, 8 * MIB: 166.5,
    16 * MIB: 261.6, 32 * MIB: 391.8, 64 * MIB: 614.3, 128 * MIB: 1041.8, 256 * MIB: 1652.0,
    512 * MIB: 2880.5, 1024 * MIB: 5525.0, 2048 * MIB: 10_989.0, 4096 * MIB: 21_870.0, 8192 * MIB: 43_643.0,
}  # fmt: skip
"""Two nodes of 8 MI355X with 8 Pollara NICs each, RCCL 2.26.6: 369.0 GB/s bus bandwidth at 8 GiB."""
MI325X_POINTS = {
    2: {4096 * MIB: 23_192.0, 8192 * MIB: 46_123.0, 16_384 * MIB: 91_973.0},
    4: {4096 * MIB: 23_904.0, 8192 * MIB: 47_563.0, 16_384 * MIB: 94_942.0},
    8: {4096 * MIB: 24_572.0, 8192 * MIB: 48_321.0, 16_384 * MIB: 96_405.0},
}
"""Nodes of 8 MI325X with 8 NICs each, by number of nodes, rings only. No curve is made from them: they verify
how the model extends from two nodes to more."""

NODE_GPUS = 8
"""GPUs per node of all published points."""
PUBLISHED_LINK, PUBLISHED_NIC = 64e9, 50e9
"""Bytes per second of the data sheets of the published nodes: one link between two MI300X, and one NIC."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCase:
    """Assumptions of a plan: those about links, and how fast products are.

    Attributes:
      name: name of the case.
      network_points: microseconds of an all-reduce among two nodes by message bytes, see `TWO_NODE_POINTS`.
      network_slowdown: factor of the wire time between nodes.
      node_slowdown: factor of the wire time within a node, see `NODE_POINTS`.
      all_to_all_slowdown: wire time of an all-to-all relative to that of a ring with equal bytes.
      network_step_seconds: latency of each step between nodes that the timed group did not have.
      links_at_once: whether collectives on two streams, one in the node and one between nodes, overlap.
      product_share: share of the peak FLOP/s that products reach.
      kernel_rate: rate of products in Pallas kernels, relative to that of other products.
    """

    name: str
    network_points: Mapping[int, float]
    network_slowdown: float
    node_slowdown: float
    all_to_all_slowdown: float
    network_step_seconds: float
    links_at_once: bool
    product_share: float
    kernel_rate: float


OPTIMISTIC = PlanCase(
    name="optimistic",
    network_points=POLLARA_POINTS,
    network_slowdown=1.0,
    # AMD calls 48 GB/s per link usable ([XGMI]); the points reach 45.1.
    node_slowdown=315.7 / (7 * 48),
    all_to_all_slowdown=1.0,
    network_step_seconds=2.0e-6,  # [Primus-projection], pod_lat
    links_at_once=True,
    product_share=0.576,  # 753 TFLOP/s measured for 4,096 cubed on MI325X, the same dies ([HipKittens])
    kernel_rate=1.0,
)
PUBLISHED = PlanCase(
    name="published",
    network_points=TWO_NODE_POINTS,
    network_slowdown=1.0,
    node_slowdown=1.0,
    # [CVS] expects 45 GB/s bus bandwidth at 8 GiB on two nodes: 8/15 of it leaves the node, so that a NIC
    # carries 24 GB/s, and 44.5 in the ring of `TWO_NODE_POINTS`. The case of [Primus-projection] in a node,
    # 3.913 ms for two times 384 MiB among 8 MI355X, has the same factor.
    all_to_all_slowdown=(356.1 / 8) / (45 * 8 / 15),
    network_step_seconds=9.5e-6,  # [RCCL], tuning_model_5, Ring, LL; a Pollara floor of 40 us has 2 steps
    # A step on 1,024 GPUs became 16% faster when XLA ran collectives on several streams (openxla/xla pull
    # request 36839).
    links_at_once=True,
    product_share=0.4,
    # AMD's Triton kernel for experts on MI355X has 0.88 of hipBLASLt's rate forward, 1.74 of it in gradients.
    kernel_rate=1.0,
)
PESSIMISTIC = PlanCase(
    name="pessimistic",
    network_points=TWO_NODE_POINTS,
    # The slowest cluster that [CVS] accepts: 95% of 330 GB/s between nodes, of 304 GB/s in a node.
    network_slowdown=356.1 / (0.95 * 330),
    node_slowdown=315.7 / (0.95 * 304),
    all_to_all_slowdown=2.5,  # ROCm/rccl issue 1206: two to three times MPI's time on 4 to 8 nodes
    network_step_seconds=14.0e-6,  # NCCL's own tuning model: Ring, Simple, network
    links_at_once=False,  # as if all collectives had one stream
    product_share=0.29,  # AMD's JAX recipes of dense 70B and 405B models on MI300X
    kernel_rate=0.5,  # our kernel of the loss on one H200: 310 TFLOP/s, cuBLAS 625
)
CASES = (OPTIMISTIC, PUBLISHED, PESSIMISTIC)
"""All cases, from the fastest to the slowest."""
ASSUMPTIONS = {
    "bandwidth between nodes by size": ("network_points", "network_slowdown"),
    "bandwidth within a node": ("node_slowdown",),
    "all-to-all relative to a ring": ("all_to_all_slowdown",),
    "latency of each further node of a ring": ("network_step_seconds",),
    "links in a node and NICs at the same time": ("links_at_once",),
    "share of the peak that products reach": ("product_share",),
    "products in our kernels relative to the library's": ("kernel_rate",),
}
"""Fields of a case that belong to one assumption, by the assumption's name."""


def replace_assumption(name: str, source: PlanCase) -> PlanCase:
    """Returns the published case with one assumption of another case."""
    return dataclasses.replace(PUBLISHED, **{field: getattr(source, field) for field in ASSUMPTIONS[name]})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeRange:
    """Time of a step in all cases.

    Attributes:
      seconds: time of the step by name of the case.
      effects: times of the published case with the optimistic and the pessimistic value of one assumption, by
        the assumption's name.
    """

    seconds: Mapping[str, float]
    effects: Mapping[str, tuple[float, float]]

    @property
    def main_assumption(self) -> str:
        """The assumption that moves the time most."""
        return max(self.effects, key=lambda name: abs(self.effects[name][1] - self.effects[name][0]))


def step_range(seconds_in: Callable[[PlanCase], float]) -> TimeRange:
    """Returns the time of a step in all cases, and the effect of each assumption alone.

    Args:
      seconds_in: time of the step in a case.
    """
    effects = {
        name: (
            seconds_in(replace_assumption(name, OPTIMISTIC)),
            seconds_in(replace_assumption(name, PESSIMISTIC)),
        )
        for name in ASSUMPTIONS
    }
    return TimeRange(seconds={case.name: seconds_in(case) for case in CASES}, effects=effects)
