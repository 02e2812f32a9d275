"""The state of a launch in execution, as the behaviors of instructions see it."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from pallas_kernels.emulator.code_object import KernelCode
from pallas_kernels.emulator.counts import Counts
from pallas_kernels.emulator.global_memory import Buffer, GlobalMemory
from pallas_kernels.emulator.local_memory import LocalMemory
from pallas_kernels.emulator.registers import LANES, Registers


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """Sizes of a launch.

    Attributes:
      grid: workgroups along three axes.
      threads: threads of a workgroup.
      lds_bytes: local memory of a workgroup beyond what the kernel's descriptor says.
    """

    grid: tuple[int, int, int] = (1, 1, 1)
    threads: int = LANES
    lds_bytes: int = 0


class LaunchState:
    """Registers and memory of a launch.

    Attributes:
      registers: registers of all waves.
      memory: device memory.
      local: local memory of all workgroups.
      counts: what was executed.
    """

    def __init__(
        self,
        kernel: KernelCode,
        launch: KernelLaunch,
        buffers: Sequence[Buffer],
        num_vectors: int,
        *,
        check: bool,
        count_memory: bool,
    ):
        num_groups = math.prod(launch.grid)
        # A workgroup whose threads do not fill its last wave has lanes that are never active.
        self.waves_per_group = -(-launch.threads // LANES)
        # All workgroups are in flight at once, unlike on a GPU: kernels cannot tell.
        numbers = np.arange(num_groups * self.waves_per_group)
        self.group_of_wave = numbers // self.waves_per_group
        thread = (numbers % self.waves_per_group)[:, None] * LANES + np.arange(LANES)
        self.registers = Registers(num_vectors, thread < launch.threads, check=check)
        # The first vector register holds each lane's thread within its workgroup.
        self.registers.write32(0, thread.astype(np.uint32), np.ones_like(thread, bool))
        self.memory = GlobalMemory(buffers, kernel.kernarg_bytes, check=check)
        self.local = LocalMemory(num_groups, launch.lds_bytes + kernel.lds_bytes, check=check)
        self.counts = Counts(memory=count_memory)

    @property
    def groups(self) -> np.ndarray:
        """Workgroup of each selected wave, [n]."""
        return self.group_of_wave[self.registers.waves]

    @property
    def waves_in_group(self) -> np.ndarray:
        """Number of each selected wave within its workgroup, [n]."""
        return self.registers.waves % self.waves_per_group

    @property
    def scc(self) -> np.ndarray:
        """Scalar condition codes of the selected waves, [n]."""
        return self.registers.scc[self.registers.waves]

    @scc.setter
    def scc(self, value: np.ndarray) -> None:
        """Sets the scalar condition codes of the selected waves, [n]."""
        self.registers.scc[self.registers.waves] = value
