"""GPUs that a plan can be made for, and clusters of them. Each figure names its source."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.plan.measured import CollectiveTimes, Curve, MeasuredFile, PassTimes, ProductTimes, bus_factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, its links, and what XLA is told about it.

    Attributes:
      name: as `--device` has it.
      memory_bytes: of HBM.
      matrix_flops: bfloat16 multiply-adds a second on paper, dense, each counted as two.
      memory_bandwidth: bytes a second that HBM was measured to reach.
      link_bandwidth: bytes a second from one GPU to each other one of its node, one way.
      network_bandwidth: bytes a second of a GPU's own NIC, one way.
      saturating_flops: work that a matrix product needs to reach the device's peak.
      lds_bytes: local memory that a workgroup can have.
      simds: vector units of a compute unit.
      max_waves: that a vector unit keeps in flight.
      registers: vector registers of a lane, shared by the waves of a vector unit.
      register_granule: registers are given out in multiples of this.
      wave_size: lanes of a wave.
      architecture: of the instruction set.
      target: XLA's description, a `GpuTargetConfigProto` as text.
    """

    name: str
    memory_bytes: int
    matrix_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    saturating_flops: float
    lds_bytes: int
    simds: int
    max_waves: int
    registers: int
    register_granule: int
    wave_size: int
    architecture: str
    target: str


MI300X = Device(
    name="mi300x",
    memory_bytes=192 * 10**9,  # data sheet
    matrix_flops=1307.4e12,  # data sheet
    memory_bandwidth=4.33e12,  # measured, [ZAYA1-base] section III; 5.3e12 on paper
    link_bandwidth=64e9,  # data sheet: an Infinity Fabric link has 128 GB/s, both ways together
    network_bandwidth=50e9,  # Pollara, 400 Gb/s, one a GPU: [ZAYA1-8B] appendix A
    saturating_flops=200e9,  # measured, [ZAYA1-base] section III
    lds_bytes=65_536,  # CDNA3's ISA guide, as all below
    simds=4,
    max_waves=8,
    registers=512,
    register_granule=8,
    wave_size=64,
    architecture="gfx942",
    target="""
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 64
  shared_memory_per_block: 65536
  shared_memory_per_core: 65536
  threads_per_core_limit: 2048
  core_count: 304
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65536
  block_dim_limit_z: 65536
  memory_bandwidth: 5300000000000
  l2_cache_size: 4194304
  clock_rate_ghz: 2.1
  device_memory_size: 206141652992
  shared_memory_per_block_optin: 65536
  rocm_compute_capability { gcn_arch_name: "gfx942:sramecc+:xnack-" }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "ROCM"
device_description_str: "AMD Instinct MI300X"
""",
)

DEVICES = {device.name: device for device in (MI300X,)}
"""By name."""


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
