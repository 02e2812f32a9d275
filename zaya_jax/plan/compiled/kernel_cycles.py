"""A lower bound of a kernel's time from what an emulator has executed: the busiest unit of the GPU.

Instructions are counted, not guessed from the main loop, so that prologues, masked blocks, reductions and
bank conflicts are included. Latencies, barriers and a last round of too few workgroups are not.
"""

import dataclasses
import re
from collections.abc import Mapping

from zaya_jax.plan.gpus import Device
from zaya_jax.plan.rocm.machine_code import TRANSCENDENTAL_CYCLES, VECTOR_CYCLES

MATRIX = re.compile(r"v_mfma_[a-z]+\d+_(\d+)x(\d+)x(\d+)_?([a-z]+\d+)")
"""Mnemonic of a matrix instruction: rows, columns, contracted entries and the dtype of the factors."""
PRODUCTS_PER_CYCLE = {"f32": 32, "xf32": 128, "f16": 256, "bf16": 256}
"""Multiplications per cycle of one matrix unit, by dtype of the factors (CDNA3 ISA)."""
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCycles:
    """Cycles for which each kind of unit is busy, if the work is spread evenly over all units of a GPU.

    Attributes:
      matrix: cycles of matrix instructions.
      vector: cycles of other vector instructions.
      local: cycles of local memory, with those lost to bank conflicts.
      memory: cycles of HBM at its full bandwidth, each array once.
    """

    matrix: float
    vector: float
    local: float
    memory: float

    @property
    def busiest(self) -> str:
        """Unit that determines the time."""
        names = {"matrix": "MFMA", "vector": "VALU", "local": "LDS", "memory": "HBM"}
        return names[max(names, key=lambda name: getattr(self, name))]

    @property
    def bound(self) -> float:
        """Cycles of the busiest unit."""
        return max(dataclasses.astuple(self))

    @property
    def matrix_share(self) -> float:
        """Largest possible utilization of the matrix units."""
        return self.matrix / max(self.bound, 1e-9)


def kernel_cycles(
    instructions: Mapping[str, int], *, local_cycles: int, array_bytes: int, device: Device
) -> KernelCycles:
    """Returns the cycles for which executed instructions occupy the units of a GPU.

    Args:
      instructions: executed instructions of waves by mnemonic.
      local_cycles: cycles of local memory of all compute units together.
      array_bytes: bytes of operands and results.
      device: the GPU, whose architecture must be known.
    """
    core = device.need_core()
    # A compute unit's work is spread over its vector units, each of which has one matrix unit.
    simds = core.compute_units * core.simds
    matrix = sum(count * _matrix_cycles(name) for name, count in instructions.items())
    vector = sum(count * _vector_cycles(name) for name, count in instructions.items())
    return KernelCycles(
        matrix=matrix / simds,
        vector=vector / simds,
        # All vector units of a compute unit share its local memory.
        local=local_cycles / core.compute_units,
        memory=array_bytes / device.memory_bandwidth * core.clock,
    )


def _matrix_cycles(name: str) -> float:
    # An unknown dtype is an error: a rate of zero would hide the instruction from the bound.
    match = MATRIX.match(name)
    if match is None:
        return 0.0
    rows, columns, contracted, dtype = match.groups()
    return int(rows) * int(columns) * int(contracted) / PRODUCTS_PER_CYCLE[dtype]


def _vector_cycles(name: str) -> int:
    # Moves between vector and accumulation registers count here: they use the vector unit.
    if not name.startswith("v_") or MATRIX.match(name):
        return 0
    return TRANSCENDENTAL_CYCLES if TRANSCENDENTAL.match(name) else VECTOR_CYCLES
