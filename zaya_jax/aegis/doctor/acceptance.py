"""AMD's acceptance figures for a node with eight MI300X, compared with measurements of a node.

The all-reduce figure is that of AMD's Cluster Validation Suite: at least 304 GB/s of bus bandwidth for 8 GiB
of float32 on 8 GPUs, without a tolerance (ROCm/cvs,
cvs/input/config_file/rccl/mi300x_rccl_single_node_config.json). A public measurement reached 313.7 GB/s at 1
GiB and 315.7 GB/s at 8 GiB (hisohara/ai-scripts, training/01_rccl-smoketest). Between n GPUs of a node, n - 1
links of each GPU carry the traffic, so that fewer GPUs must reach that share of it.

The figures for GEMM and HBM are from this project's notes of November 2026 on AMD's validation of nodes. We
know of no public page that states them, and of none that contradicts them.
"""

import dataclasses

from zaya_jax.aegis.doctor.facts import HostFacts
from zaya_jax.aegis.doctor.findings import ON_GPUS, Expectation, Finding


@dataclasses.dataclass(frozen=True)
class Floor:
    """Minimum of a measured quantity.

    Attributes:
      name: name of the quantity.
      unit: unit of the limits.
      scale: factor from that unit to SI units.
      accepted: minimum for acceptance.
      strict: value that a healthy node reaches.
      field: field of `Speed` with the measurement.
      action: what to do if it is not reached.
    """

    name: str
    unit: str
    scale: float
    accepted: float
    strict: float
    field: str
    action: str


FLOORS = (
    Floor(
        "GEMM 8192^3", "TFLOP/s", 1e12, 600.0, 700.0, "gemm_flops",
        "check for a throttled clock (amd-smi metric --clock --temperature), or another process on the GPU",
    ),
    Floor(
        "HBM", "GB/s", 1e9, 2000.0, 4500.0, "memory_bandwidth",
        "check for ECC errors and retired pages (amd-smi bad-pages), or another process on the GPU",
    ),
    Floor(
        "all-reduce of the node", "GB/s", 1e9, 304.0, 304.0, "all_reduce_bandwidth",
        "check the xGMI links (amd-smi xgmi); zaya bench collectives shows which sizes and groups are slow",
    ),
)  # fmt: skip


LINKS = 7
"""Number of links of a GPU to the other GPUs of its node."""


def check_speed(facts: HostFacts) -> list[Finding]:
    """Returns a finding for each of AMD's figures, measured or not."""
    return [_check(_scaled(floor, len(facts.gpus)), facts) for floor in FLOORS]


def _scaled(floor: Floor, num_gpus: int) -> Floor:
    """Scales a floor to a node, or a part of one, with a number of GPUs."""
    # With one GPU there is no all-reduce, and the floor stays as it is.
    share = min(num_gpus - 1, LINKS) / LINKS
    if floor.field != "all_reduce_bandwidth" or share <= 0:
        return floor
    return dataclasses.replace(floor, accepted=floor.accepted * share, strict=floor.strict * share)


def _check(floor: Floor, facts: HostFacts) -> Finding:
    speed = facts.speed
    measured = None if speed is None else getattr(speed, floor.field)
    wanted = f"at least {floor.accepted:,.0f} {floor.unit}"
    if floor.strict > floor.accepted:
        wanted += f", better {floor.strict:,.0f}"
    expected = Expectation(floor.name, ON_GPUS, wanted)
    # A failed measurement says nothing about the GPU's speed: the floor is untested, and not missed.
    if measured is None and speed is not None and speed.failure:
        return expected.untested(speed.failure, "fix this failure first")
    if measured is None:
        return expected.untested("not measured", "run without --no-speed")
    value = measured / floor.scale
    found = f"{value:,.0f} {floor.unit}"
    if value >= floor.strict:
        return expected.good(found)
    if value >= floor.accepted:
        return expected.worse(found, floor.action)
    return expected.bad(found, floor.action)
