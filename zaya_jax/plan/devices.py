"""Clusters of GPUs that a plan can be made for."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.plan.gpus import DEVICES, Device
from zaya_jax.plan.measured import CollectiveTimes, Curve, MeasuredFile, PassTimes, ProductTimes, bus_factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of GPUs.

    Attributes:
      device: each of the GPUs.
      nodes: how many.
      gpus_per_node: in each.
      measured: what collectives took, in place of what links have on paper; None without.
    """

    device: Device
    nodes: int
    gpus_per_node: int
    measured: CollectiveTimes | None = None

    def __post_init__(self):
        if self.nodes < 1:
            raise ValueError(f"--nodes is {self.nodes}; it must be at least 1")
        if self.gpus_per_node < 1:
            raise ValueError(f"--gpus-per-node is {self.gpus_per_node}; it must be at least 1")
        # Each GPU of a node has a link to each other one: half a node is not half as fast, but starved.
        if self.measured is not None and self.measured.devices_per_node != self.gpus_per_node:
            raise ValueError(
                f"--gpus-per-node is {self.gpus_per_node}, and collectives were measured with "
                f"{self.measured.devices_per_node} devices in a node; both must be the same"
            )

    @property
    def num_gpus(self) -> int:
        """How many GPUs all nodes have together."""
        return self.nodes * self.gpus_per_node

    def node_seconds(self, collective: str, num_bytes: int) -> float:
        """That a message takes among the GPUs of a node, over all links between them."""
        count = self.gpus_per_node
        if count == 1:
            return 0.0
        if curve := self.curve_in_node(collective):
            return curve.among(num_bytes, count)
        return num_bytes * bus_factor(collective, count) / ((count - 1) * self.device.link_bandwidth)

    def network_seconds(self, collective: str, num_bytes: int) -> float:
        """That a message takes between nodes, when each GPU has its part of it from its own node."""
        if self.nodes == 1:
            return 0.0
        part = num_bytes / self.gpus_per_node
        if curve := self.curve_between_nodes(collective):
            return curve.among(part, self.nodes)
        return part * bus_factor(collective, self.nodes) / self.device.network_bandwidth

    def curve_in_node(self, collective: str) -> Curve | None:
        """What a collective took in a node by size; None where it was not measured."""
        return self.measured and self.measured.in_node(collective)

    def curve_between_nodes(self, collective: str) -> Curve | None:
        """What a collective took between nodes by size; None where it was not measured."""
        return self.measured and self.measured.between_nodes(collective)


def find_device(name: str) -> Device:
    """The device of a name.

    Raises:
      ValueError: if there is none.
    """
    if name not in DEVICES:
        raise ValueError(f'there is no device "{name}"; known are {", ".join(DEVICES)}')
    return DEVICES[name]


def cluster_as_measured(
    device: Device, nodes: int, gpus_per_node: int, files: Sequence[MeasuredFile]
) -> tuple[Cluster, tuple[str, ...]]:
    """A cluster with measured figures in place of those on paper, and the resources that have some.

    Args:
      device: each of the GPUs.
      nodes: how many.
      gpus_per_node: in each.
      files: what was measured; of two of a kind the later one counts.

    Raises:
      ValueError: if there can be no such cluster, or collectives were measured in nodes of another size.
    """
    found: dict[str, str] = {}
    collectives = None
    for each in files:
        if isinstance(each, ProductTimes):
            device = dataclasses.replace(device, matrix_flops=each.best_rate)
            found["matrix units"] = each.what
        elif isinstance(each, PassTimes):
            device = dataclasses.replace(device, memory_bandwidth=each.bandwidth)
            found["memory"] = each.what
        else:
            collectives = each
    cluster = Cluster(device=device, nodes=nodes, gpus_per_node=gpus_per_node, measured=collectives)
    links = {"links in the node": cluster.curve_in_node, "network": cluster.curve_between_nodes}
    # Both kinds of message travel; a file that has only one of them would mix paper with measurement.
    kinds = ("reduce_scatter", "all_gather")
    return cluster, (*found, *(name for name, curve in links.items() if all(curve(kind) for kind in kinds)))
