"""Executes a kernel: all waves of all workgroups, one instruction at a time.

Waves at the same instruction execute it together, as arrays with an axis of waves; those that are furthest
behind in the code go first, so that waves that part at a branch meet again. A barrier holds a workgroup's
waves until all have reached it.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from pallas_kernels.emulator.code_object import KernelCode
from pallas_kernels.emulator.counts import Counts
from pallas_kernels.emulator.decode import decode
from pallas_kernels.emulator.errors import EmulationError, unknown
from pallas_kernels.emulator.global_memory import Buffer
from pallas_kernels.emulator.instruction import GpuInstruction
from pallas_kernels.emulator.semantics import behavior_of
from pallas_kernels.emulator.state import KernelLaunch, LaunchState

KERNARG_POINTER = 0x8
"""Bit of a kernel's properties: its first two scalar registers hold the address of the arguments."""
USER_REGISTERS = 0x7F
WORKGROUP_IDS = 7
"""First of three bits of resource register 2: which workgroup ids follow in scalar registers."""
STEP_LIMIT = 20_000_000
"""Steps of groups of waves after which a kernel counts as endless."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """Result of a launch.

    Attributes:
      outputs: contents of the writable buffers, in their order.
      unwritten: bytes of each writable buffer that were never written.
      undefined: vector registers that were read before they were written.
      counts: what was executed.
    """

    outputs: list[np.ndarray]
    unwritten: list[int]
    undefined: set[int]
    counts: Counts


class Emulator(LaunchState):
    """A kernel's launch in execution.

    Attributes:
      instructions: the kernel's instructions.
    """

    def __init__(
        self,
        kernel: KernelCode,
        launch: KernelLaunch,
        buffers: Sequence[Buffer] = (),
        *,
        check: bool = True,
        count_memory: bool = False,
    ):
        self.instructions = decode(kernel)
        super().__init__(
            kernel, launch, buffers, _num_vectors(self.instructions), check=check, count_memory=count_memory
        )
        self._position = {instruction.pc: at for at, instruction in enumerate(self.instructions)}
        self._behaviors: list[Callable | None] = [None] * len(self.instructions)
        num_waves = len(self.group_of_wave)
        self._pc = np.full(num_waves, kernel.entry, np.int64)
        self._ended = np.zeros(num_waves, bool)
        self._at_barrier = np.zeros(num_waves, bool)
        self._set_up_scalars(kernel, launch)

    def _set_up_scalars(self, kernel: KernelCode, launch: KernelLaunch) -> None:
        """What the hardware puts into scalar registers before the first instruction."""
        scalar = self.registers.scalar
        if kernel.properties & USER_REGISTERS & ~KERNARG_POINTER or kernel.preloaded:
            raise unknown("this set-up of registers")
        # In the order of LLVM's "Initial Kernel Execution State": user registers, then workgroup ids.
        number = 0
        if kernel.properties & KERNARG_POINTER:
            scalar[0] = self.memory.kernarg & 0xFFFFFFFF
            scalar[1] = self.memory.kernarg >> 32
            number = 2
        # Workgroups are numbered with the first axis fastest.
        across, down, _ = launch.grid
        group = self.group_of_wave
        ids = group % across, group // across % down, group // (across * down)
        for axis in range(3):
            if kernel.resource2 >> WORKGROUP_IDS + axis & 1:
                scalar[number] = ids[axis]
                number += 1

    def run(self) -> Execution:
        """Executes the kernel to its end.

        Raises:
          EmulationError: if a check fails or an instruction is unknown.
        """
        steps = 0
        # Infinities and NaNs are results like any other.
        with np.errstate(all="ignore"):
            while not self._ended.all():
                steps += self._run_block()
                if steps > STEP_LIMIT:
                    raise EmulationError("limit", f"the kernel has not ended after {STEP_LIMIT:,} steps")
        return Execution(
            outputs=self.memory.outputs(),
            unwritten=self.memory.unwritten(),
            undefined=self.registers.undefined,
            counts=self.counts,
        )

    def executed_addresses(self) -> set[int]:
        """Addresses of the instructions that were executed."""
        executed = zip(self.instructions, self._behaviors, strict=True)
        return {instruction.pc for instruction, behavior in executed if behavior is not None}

    def _run_block(self) -> int:
        """Executes the waves that are furthest behind, up to where they part, meet others or stop."""
        # Going on with the lowest address lets waves that parted meet at the code behind both branches.
        ready = ~self._ended & ~self._at_barrier
        if not ready.any():
            raise EmulationError("barrier", "all waves wait at a barrier that others never reach")
        first = int(self._pc[ready].min())
        selected = ready & (self._pc == first)
        # Where another group of waves stands, this one stops, so that they go on together.
        ahead = self._pc[ready & (self._pc > first)]
        meeting = int(ahead.min()) if len(ahead) else None
        self.registers.select(np.flatnonzero(selected))
        at = self._at(first)
        steps = 0
        while True:
            instruction = self.instructions[at]
            taken = self._execute(at, instruction)
            steps += 1
            at += 1
            if instruction.ends_block:
                self._end_block(instruction, taken)
                return steps
            following = instruction.pc + instruction.size
            if following == meeting:
                self._pc[self.registers.waves] = following
                return steps
            if at == len(self.instructions):
                raise EmulationError("limit", "the code ends without s_endpgm", pc=following)

    def _at(self, pc: int) -> int:
        if pc not in self._position:
            raise EmulationError("limit", "a branch leads to no instruction", pc=pc)
        return self._position[pc]

    def _execute(self, at: int, instruction: GpuInstruction) -> np.ndarray | None:
        behavior = self._behaviors[at]
        if behavior is None:
            # Only instructions that are reached must be known.
            behavior = self._behaviors[at] = behavior_of(instruction)
        self.counts.count_instruction(instruction, self.registers.exec)
        try:
            return behavior(self)
        except EmulationError as error:
            raise error.at(instruction.pc, instruction.text) from None

    def _end_block(self, instruction: GpuInstruction, taken: np.ndarray | None) -> None:
        waves = self.registers.waves
        following = instruction.pc + instruction.size
        if instruction.name == "s_endpgm":
            self._ended[waves] = True
        elif instruction.name == "s_barrier":
            # The hardware ignores EXEC here: the wave would be counted, though no lane should arrive.
            if not self.registers.exec.any(axis=1).all():
                message = "a wave arrives at a barrier without active lanes"
                raise EmulationError("barrier", message, pc=instruction.pc, text=instruction.text)
            self._at_barrier[waves] = True
            self._pc[waves] = following
        elif taken is not None and instruction.branch_target is not None:
            self._pc[waves] = np.where(taken, instruction.branch_target, following)
        if self._at_barrier.any():
            self._release_barriers()

    def _release_barriers(self) -> None:
        """Lets workgroups go on whose waves have all reached a barrier or ended."""
        shape = -1, self.waves_per_group
        waiting, ended = (flags.reshape(shape) for flags in (self._at_barrier, self._ended))
        # The hardware counts arrivals. Triton relies on it: to let halves of a workgroup take turns at the
        # matrix units, it makes one half wait at a barrier of its own first.
        released = (waiting | ended).all(axis=1) & waiting.any(axis=1)
        self.local.barriers[released] += 1
        self._at_barrier &= ~np.repeat(released, self.waves_per_group)


def execute(
    kernel: KernelCode,
    launch: KernelLaunch,
    buffers: Sequence[Buffer],
    *,
    check: bool = True,
    count_memory: bool = False,
) -> Execution:
    """Executes a kernel.

    Args:
      kernel: its code.
      launch: its sizes.
      buffers: its arguments, which are all pointers.
      check: whether to check for races, missing waits, and reads of memory that was never written; accesses
        outside of all memory are always errors.
      count_memory: whether to count memory transactions and bank conflicts.

    Raises:
      EmulationError: if a check fails or an instruction is unknown.
    """
    return Emulator(kernel, launch, buffers, check=check, count_memory=count_memory).run()


def _num_vectors(instructions: Sequence[GpuInstruction]) -> int:
    """Vector registers that a kernel names."""
    # Fewer registers make smaller arrays: the descriptor's number is rounded up to the allocation.
    operands = [o for i in instructions for o in (*i.destinations, *i.sources) if o.kind == "vector"]
    # Packed and matrix instructions of accumulators name registers from 256 on.
    return max((operand.register + operand.count for operand in operands), default=1)
