"""The state of a launch in execution, as the behaviors of instructions see it."""

from collections.abc import Sequence

import numpy as np

from pallas_kernels.emulator.counts import Counts
from pallas_kernels.emulator.global_memory import Buffer, GlobalMemory
from pallas_kernels.emulator.local_memory import LocalMemory
from pallas_kernels.emulator.registers import LANES, Registers


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
        *,
        num_groups: int,
        threads: int,
        num_vectors: int,
        local_bytes: int,
        kernarg_bytes: int,
        buffers: Sequence[Buffer],
        check: bool,
        count_memory: bool,
    ):
        # A workgroup whose threads do not fill its last wave has lanes that are never active.
        self.waves_per_group = -(-threads // LANES)
        # All workgroups are in flight at once, unlike on a GPU: kernels cannot tell.
        numbers = np.arange(num_groups * self.waves_per_group)
        self.group_of_wave = numbers // self.waves_per_group
        thread = (numbers % self.waves_per_group)[:, None] * LANES + np.arange(LANES)
        self.registers = Registers(num_vectors, thread < threads, check=check)
        # The first vector register holds each lane's thread within its workgroup.
        self.registers.write32(0, thread.astype(np.uint32), np.ones_like(thread, bool))
        self.memory = GlobalMemory(buffers, kernarg_bytes, check=check)
        self.local = LocalMemory(num_groups, local_bytes, check=check)
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
