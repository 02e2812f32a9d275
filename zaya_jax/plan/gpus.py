"""GPUs that a plan can be made for. Each figure names its source; only H200's memory bandwidth was measured
by this project.
"""

import dataclasses

from zaya_jax.errors import UserError
from zaya_jax.platform.peak_flops import PEAK_FLOPS, peak_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
    """Architecture of a GPU, for its compiler and the evaluation of kernels.

    Attributes:
      architecture: name of the instruction set.
      lds_bytes: local memory of a workgroup in bytes.
      compute_units: compute units of the GPU.
      clock: peak frequency of the compute units in Hz.
      simds: vector units per compute unit.
      max_waves: maximum number of waves in flight per vector unit.
      registers: vector registers per lane, shared by the waves of a vector unit.
      register_granule: registers are allocated in multiples of this.
      wave_size: lanes per wave.
      target: XLA's description, a `GpuTargetConfigProto` as text.
    """

    architecture: str
    lds_bytes: int
    compute_units: int
    clock: float
    simds: int
    max_waves: int
    registers: int
    register_granule: int
    wave_size: int
    target: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU and its links.

    Attributes:
      name: name for `--device`.
      platform: "rocm" or "cuda", as in `pallas_kernels.choice`.
      memory_bytes: bytes of HBM.
      matrix_flops: peak dense bfloat16 FLOP/s from the data sheet; a multiply-add counts as two.
      float32_flops: the same for products of float32 operands, without rounding them to a shorter type.
      memory_bandwidth: bytes per second of HBM, measured where a measurement is published.
      link_bandwidth: bytes per second between two GPUs of a node, one way.
      network_bandwidth: bytes per second of a GPU's NIC, one way.
      watts: maximum power of a board.
      saturating_flops: FLOPs that a matrix product needs to reach the device's peak; None if not measured.
      sources: sources of these figures.
      core: architecture for compilation; None if the device is not supported by the compiler.
    """

    name: str
    platform: str
    memory_bytes: int
    matrix_flops: float
    float32_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    watts: float
    sources: str
    saturating_flops: float | None = None
    core: Core | None = None

    def need_core(self) -> Core:
        """Returns the architecture for compilation.

        Raises:
          UserError: if the compiler does not support the device.
        """
        if self.core is None:
            known = ", ".join(device.name for device in DEVICES.values() if device.core)
            raise UserError(f"compiling for {self.name} is not supported; choose one of {known}")
        return self.core


GFX942 = Core(
    architecture="gfx942",
    lds_bytes=65_536,  # CDNA3's ISA guide, as all below
    compute_units=304,  # MI300X's data sheet, as the clock
    clock=2.1e9,
    simds=4,
    max_waves=8,
    registers=512,
    register_granule=8,
    wave_size=64,
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
"""MI300X, and MI325X, which has more memory with the same dies."""

MI300X = Device(
    name="mi300x",
    platform="rocm",
    memory_bytes=192 * 10**9,
    matrix_flops=PEAK_FLOPS["MI300X"],
    float32_flops=163.4e12,
    memory_bandwidth=4.33e12,  # measured, [ZAYA1-base] section III; 5.3e12 on paper
    link_bandwidth=64e9,  # an Infinity Fabric link has 128 GB/s, both ways together
    network_bandwidth=50e9,  # Pollara, 400 Gb/s, one a GPU: [ZAYA1-8B] appendix A
    watts=750.0,
    saturating_flops=200e9,  # measured, [ZAYA1-base] section III
    sources="data sheet; HBM and products as measured in [ZAYA1-base] section III",
    core=GFX942,
)
MI325X = dataclasses.replace(
    MI300X,
    name="mi325x",
    memory_bytes=256 * 10**9,
    matrix_flops=PEAK_FLOPS["MI325X"],
    memory_bandwidth=6.0e12,
    watts=1000.0,
    saturating_flops=None,
    sources="data sheet",
)
# Without a core: the description of gfx950 for XLA is not at hand.
MI355X = Device(
    name="mi355x",
    platform="rocm",
    memory_bytes=288 * 10**9,
    matrix_flops=PEAK_FLOPS["MI355X"],
    float32_flops=157.3e12,
    memory_bandwidth=8.0e12,
    link_bandwidth=76.8e9,  # a link has 153.6 GB/s, both ways together
    network_bandwidth=50e9,
    watts=1400.0,
    sources="data sheet",
)
H100 = Device(
    name="h100",
    platform="cuda",
    memory_bytes=80 * 10**9,
    matrix_flops=PEAK_FLOPS["H100"],
    float32_flops=66.9e12,  # without tensor cores, which round to tf32
    memory_bandwidth=3.036e12,  # measured, [ZAYA1-base] section III; 3.35e12 on paper
    link_bandwidth=450e9 / 7,  # through a switch, 450 GB/s one way to all seven others together
    network_bandwidth=50e9,
    watts=700.0,
    sources="data sheet of the SXM board; HBM as measured in [ZAYA1-base] section III",
)
H200 = dataclasses.replace(
    H100,
    name="h200",
    memory_bytes=141 * 10**9,
    memory_bandwidth=4.11e12,  # measured, docs/validation.md; 4.8e12 on paper
    sources="data sheet of the SXM board; HBM as measured by zaya bench kernels",
)

B200 = Device(
    name="b200",
    platform="cuda",
    memory_bytes=180 * 10**9,
    matrix_flops=PEAK_FLOPS["B200"],
    float32_flops=75e12,  # without tensor cores: 600 for 8 GPUs
    memory_bandwidth=7.7e12,  # HGX B200: 62 TB/s for 8 GPUs
    link_bandwidth=900e9 / 7,  # through a switch, 900 GB/s one way to all seven others together
    network_bandwidth=50e9,
    watts=1000.0,
    sources="data sheet of HGX B200",
)

DEVICES = {device.name: device for device in (MI300X, MI325X, MI355X, H100, H200, B200)}
"""By name."""
PLANNED_GPU = MI300X.name
"""The default GPU of a plan: the one that ZAYA1 was trained on."""


def device_of_kind(device_kind: str) -> Device | None:
    """Returns the device that `jax.Device.device_kind` names; None if there is no plan for it."""
    words = device_kind.upper().split()
    # A board of the same name with another peak, such as H100 NVL, is another device.
    return next(
        (
            device
            for device in DEVICES.values()
            if device.name.upper() in words and device.matrix_flops == peak_flops(device_kind)
        ),
        None,
    )
