"""Instructions that move values between the lanes of a wave.

Source: CDNA3 instruction set architecture, chapters "VOP1", "VOP3" and "DS" (permute and swizzle, which use
the crossbar of local memory but no memory).
"""

from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import EmulationError, unknown
from pallas_kernels.emulator.instruction import GpuInstruction
from pallas_kernels.emulator.registers import LANES
from pallas_kernels.emulator.state import LaunchState

LANE = np.arange(LANES)
U32 = np.uint32


def read_first_lane(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """V_READFIRSTLANE_B32: the value of the first active lane."""

    def run(state: LaunchState) -> None:
        registers = state.registers
        if not registers.exec.any(axis=1).all():
            raise EmulationError("exec", "the first active lane is read while no lane is active")
        values = registers.lanes(instruction.sources[0], "u")
        first = registers.exec.argmax(axis=1)
        registers.write_scalar32(instruction.destinations[0], values[np.arange(registers.count), first])

    return run


def read_lane(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """V_READLANE_B32: the value of a lane, active or not."""
    source, number = instruction.sources

    def run(state: LaunchState) -> None:
        registers = state.registers
        lane = registers.scalar32(number) & U32(63)
        # Inactive lanes can be read too.
        values = registers.vector32(source.register)[np.arange(registers.count), lane]
        registers.write_scalar32(instruction.destinations[0], values)

    return run


def write_lane(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """V_WRITELANE_B32: writes a scalar to a lane, active or not."""
    source, number = instruction.sources[:2]

    def run(state: LaunchState) -> None:
        registers = state.registers
        lane = registers.scalar32(number) & U32(63)
        registers.write32(
            instruction.destinations[0].register, registers.scalar32(source)[:, None], lane[:, None] == LANE
        )

    return run


def permute(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """DS_BPERMUTE_B32 and DS_PERMUTE_B32: each lane reads from, or sends to, a lane that it names."""
    address, data = instruction.sources
    offset = U32(instruction.fields["offset0"] | instruction.fields["offset1"] << 8)
    sends = instruction.name == "ds_permute_b32"

    def run(state: LaunchState) -> None:
        registers = state.registers
        shape = registers.count, LANES
        other = registers.lanes(address, "u") + offset >> U32(2) & U32(63)
        values = registers.lanes(data, "u")
        rows = np.broadcast_to(np.arange(registers.count)[:, None], shape)
        if sends:
            result, lanes = np.zeros(shape, U32), registers.exec
            # Of several senders the highest lane wins, as assignment of repeated indices does.
            result[rows[lanes], other[lanes]] = values[lanes]
        else:
            result = np.where(registers.exec[rows, other], values[rows, other], U32(0))
        registers.load_vector("lgkm", instruction.destinations[0].register, [result], registers.exec)

    return run


def swizzle(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """DS_SWIZZLE_B32: each lane reads from the lane that a fixed pattern names."""
    pattern = instruction.fields["offset0"] | instruction.fields["offset1"] << 8
    if pattern & 0x8000:
        if pattern >= 0xC000:
            raise unknown(f"the swizzle pattern {pattern:#x}")
        # Quad mode: two bits for each lane of four.
        other = LANE // 4 * 4 + (pattern >> 2 * (LANE % 4) & 3)
    else:
        # Bit mode within 32 lanes: and, or and exclusive or of the lane's number.
        and_mask, or_mask, xor_mask = pattern & 31, pattern >> 5 & 31, pattern >> 10 & 31
        other = LANE // 32 * 32 + ((LANE % 32 & and_mask | or_mask) ^ xor_mask)

    def run(state: LaunchState) -> None:
        registers = state.registers
        values = registers.lanes(instruction.sources[0], "u")
        result = np.where(registers.exec[:, other], values[:, other], U32(0))
        registers.load_vector("lgkm", instruction.destinations[0].register, [result], registers.exec)

    return run
