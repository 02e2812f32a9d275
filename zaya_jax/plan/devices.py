"""GPUs that a plan can be made for, and clusters of them. Each figure names its source."""

import dataclasses


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
    """

    device: Device
    nodes: int
    gpus_per_node: int

    def __post_init__(self):
        if self.nodes < 1:
            raise ValueError(f"--nodes is {self.nodes}; it must be at least 1")
        if self.gpus_per_node < 1:
            raise ValueError(f"--gpus-per-node is {self.gpus_per_node}; it must be at least 1")

    @property
    def num_gpus(self) -> int:
        """How many GPUs all nodes have together."""
        return self.nodes * self.gpus_per_node


def find_device(name: str) -> Device:
    """The device of a name.

    Raises:
      ValueError: if there is none.
    """
    if name not in DEVICES:
        raise ValueError(f'there is no device "{name}"; known are {", ".join(DEVICES)}')
    return DEVICES[name]
