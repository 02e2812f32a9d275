"""AMD's acceptance figures for a node of eight MI300X, and how a node stands to them.

They are those of this project's notes of November 2026 on AMD's validation of nodes. We have found no public
page that states them, and none that contradicts them.
"""

import dataclasses

from zaya_jax.aegis.findings import BAD, CLUSTER, GOOD, NODE, UNTESTED, WORSE, Finding
from zaya_jax.aegis.readings import Readings

ON_GPUS = (NODE, CLUSTER)


@dataclasses.dataclass(frozen=True)
class Floor:
    """What is measured, its unit, what a node must reach to be accepted, and what a sound one reaches."""

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
        "look for a clock that is throttled (amd-smi metric --clock --temperature), or another process on "
        "the GPU",
    ),
    Floor(
        "HBM", "GB/s", 1e9, 2000.0, 4500.0, "memory_bandwidth",
        "look for ECC errors and retired pages (amd-smi bad-pages), or another process on the GPU",
    ),
    Floor(
        "all-reduce of the node", "GB/s", 1e9, 100.0, 180.0, "all_reduce_bandwidth",
        "look at the xGMI links (amd-smi xgmi); zaya bench collectives says which sizes and groups are slow",
    ),
)  # fmt: skip


def check_speed(readings: Readings) -> list[Finding]:
    """One finding for each of AMD's figures, measured or not."""
    return [_check(floor, readings) for floor in FLOORS]


def _check(floor: Floor, readings: Readings) -> Finding:
    speed = readings.speed
    measured = None if speed is None else getattr(speed, floor.field)
    wanted = f"{floor.strict:,.0f} {floor.unit}, {floor.accepted:,.0f} at least"
    if measured is None:
        why = speed.failure if speed is not None and speed.failure else "not measured"
        action = "mend that first" if speed is not None and speed.failure else "ask without --no-speed"
        return Finding(name=floor.name, state=UNTESTED, found=why, wanted=wanted, action=action, uses=ON_GPUS)
    reached = measured / floor.scale
    state = GOOD if reached >= floor.strict else WORSE if reached >= floor.accepted else BAD
    return Finding(
        name=floor.name,
        state=state,
        found=f"{reached:,.0f} {floor.unit}",
        wanted=wanted,
        action="" if state == GOOD else floor.action,
        uses=ON_GPUS,
    )
