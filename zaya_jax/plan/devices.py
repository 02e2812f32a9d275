"""Clusters of GPUs that a plan can be made for."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.errors import UserError
from zaya_jax.plan.cases import PUBLISHED, PlanCase
from zaya_jax.plan.gpus import DEVICES, Device
from zaya_jax.plan.links import BUS_FACTORS, Links, WireCurve, wire_curve
from zaya_jax.plan.measured import CollectiveTimes, MeasuredFile, PassTimes, ProductTimes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of identical GPUs.

    Attributes:
      device: the GPU.
      nodes: number of nodes.
      gpus_per_node: GPUs per node.
      measured: measured times of collectives, used instead of the published points; None without.
      case: assumptions for what was not measured.
    """

    device: Device
    nodes: int
    gpus_per_node: int
    measured: CollectiveTimes | None = None
    case: PlanCase = PUBLISHED

    def __post_init__(self):
        # Each pair of GPUs in a node has its own link, so half of a node has less than half of the bandwidth:
        # measurements of another node size do not scale.
        if self.measured is not None and self.measured.devices_per_node != self.gpus_per_node:
            raise UserError(
                f"--gpus-per-node is {self.gpus_per_node}, but collectives were measured with "
                f"{self.measured.devices_per_node} devices per node; both must be the same"
            )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in all nodes together."""
        return self.nodes * self.gpus_per_node

    @property
    def links(self) -> Links:
        """Times of collectives: measured ones, and the case's for the rest."""
        return Links(
            link_bandwidth=self.device.link_bandwidth,
            network_bandwidth=self.device.network_bandwidth,
            case=self.case,
            measured_in_node=self._measured_curves(between=False),
            measured_between=self._measured_curves(between=True),
        )

    @property
    def product_flops(self) -> float:
        """FLOP/s that products of bfloat16 operands reach."""
        return self.case.product_share * self.device.matrix_flops

    @property
    def float32_product_flops(self) -> float:
        """FLOP/s that products of float32 operands reach."""
        return self.case.product_share * self.device.float32_flops

    def in_case(self, case: PlanCase) -> "Cluster":
        """Returns the cluster with the assumptions of another case."""
        return dataclasses.replace(self, case=case)

    def _measured_curves(self, *, between: bool) -> dict[str, WireCurve]:
        if self.measured is None:
            return {}
        # The rails of all GPUs of a node were measured at once, with one GPU per node in each group.
        nodes = self.measured.num_nodes if between else 1
        ranks = 1 if between else self.gpus_per_node
        if ranks * nodes == 1 or (between and nodes == 1):
            return {}
        rate = self.device.network_bandwidth if between else (ranks - 1) * self.device.link_bandwidth
        curve_of = self.measured.between_nodes if between else self.measured.in_node
        curves = {kind: curve for kind in BUS_FACTORS if (curve := curve_of(kind))}
        return {
            kind: wire_curve(
                kind,
                dict(zip(curve.num_bytes, curve.seconds, strict=True)),
                rate=rate,
                ranks=ranks,
                nodes=nodes,
            )
            for kind, curve in curves.items()
        }


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
            # The best measured product replaces the data-sheet peak of its dtype.
            peak = "float32_flops" if each.dtype == "float32" else "matrix_flops"
            device = dataclasses.replace(device, **{peak: each.best_rate})
            measured_by["matrix units"] = each.what
        elif isinstance(each, PassTimes):
            device = dataclasses.replace(device, memory_bandwidth=each.bandwidth)
            measured_by["memory"] = each.what
        else:
            collectives = each
    cluster = Cluster(device=device, nodes=nodes, gpus_per_node=gpus_per_node, measured=collectives)
    links = {"links in the node": cluster.links.measured_in_node, "network": cluster.links.measured_between}
    return cluster, (
        *measured_by,
        *(name for name, curves in links.items() if curves),
    )
