"""Clusters of GPUs that a plan can be made for."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.errors import UserError
from zaya_jax.plan.gpus import DEVICES, Device
from zaya_jax.plan.measured import CollectiveTimes, Curve, MeasuredFile, PassTimes, ProductTimes, bus_factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of identical GPUs.

    Attributes:
      device: the GPU.
      nodes: number of nodes.
      gpus_per_node: GPUs per node.
      measured: measured times of collectives, used instead of the links' data-sheet rates; None without.
    """

    device: Device
    nodes: int
    gpus_per_node: int
    measured: CollectiveTimes | None = None

    def __post_init__(self):
        if self.nodes < 1:
            raise UserError(f"--nodes is {self.nodes}; it must be at least 1")
        if self.gpus_per_node < 1:
            raise UserError(f"--gpus-per-node is {self.gpus_per_node}; it must be at least 1")
        # Each pair of GPUs in a node has its own link, so half of a node has less than half of the bandwidth:
        # measurements of another node size do not scale.
        if self.measured is not None and self.measured.devices_per_node != self.gpus_per_node:
            raise UserError(
                f"--gpus-per-node is {self.gpus_per_node}, but collectives were measured with "
                f"{self.measured.devices_per_node} devices per node; both must be the same"
            )

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.nodes * self.gpus_per_node

    def node_seconds(self, collective: str, num_bytes: int) -> float:
        """Returns the time of a message among the GPUs of a node, over all links between them."""
        count = self.gpus_per_node
        if count == 1:
            return 0.0
        if curve := self.curve_in_node(collective):
            return curve.among(num_bytes, count)
        # Fully connected node: all links of a GPU work at the same time.
        return num_bytes * bus_factor(collective, count) / ((count - 1) * self.device.link_bandwidth)

    def network_seconds(self, collective: str, num_bytes: int) -> float:
        """Returns the seconds of a collective's part between nodes, after its part within each node."""
        if self.nodes == 1:
            return 0.0
        # A hierarchical collective has already reduced or scattered the message within the node.
        part = num_bytes / self.gpus_per_node
        if curve := self.curve_between_nodes(collective):
            return curve.among(part, self.nodes)
        return part * bus_factor(collective, self.nodes) / self.device.network_bandwidth

    def curve_in_node(self, collective: str) -> Curve | None:
        """Measured times of a collective within a node by size; None if not measured."""
        return self.measured and self.measured.in_node(collective)

    def curve_between_nodes(self, collective: str) -> Curve | None:
        """Measured times of a collective between nodes by size; None if not measured."""
        return self.measured and self.measured.between_nodes(collective)


def find_device(name: str) -> Device:
    """Returns the device with the given name.

    Raises:
      UserError: if the name is unknown.
    """
    if name not in DEVICES:
        raise UserError(f'unknown device "{name}"; known are {", ".join(DEVICES)}')
    return DEVICES[name]


def cluster_as_measured(
    device: Device, nodes: int, gpus_per_node: int, files: Sequence[MeasuredFile]
) -> tuple[Cluster, tuple[str, ...]]:
    """Returns a cluster with measured figures, and the names of the measured resources.

    Args:
      device: the GPU.
      nodes: number of nodes.
      gpus_per_node: GPUs per node.
      files: measurements; of two of the same kind the later one counts.

    Raises:
      UserError: if the cluster is invalid, or collectives were measured in nodes of another size.
    """
    measured_by: dict[str, str] = {}
    collectives = None
    for each in files:
        if isinstance(each, ProductTimes):
            # The best measured product replaces the data-sheet peak.
            device = dataclasses.replace(device, matrix_flops=each.best_rate)
            measured_by["matrix units"] = each.what
        elif isinstance(each, PassTimes):
            device = dataclasses.replace(device, memory_bandwidth=each.bandwidth)
            measured_by["memory"] = each.what
        else:
            collectives = each
    cluster = Cluster(device=device, nodes=nodes, gpus_per_node=gpus_per_node, measured=collectives)
    links = {"links in the node": cluster.curve_in_node, "network": cluster.curve_between_nodes}
    # A step sends both kinds of message: with only one measured, the estimate would still rest on data
    # sheets.
    kinds = ("reduce_scatter", "all_gather")
    return cluster, (
        *measured_by,
        *(name for name, curve in links.items() if all(curve(kind) for kind in kinds)),
    )
