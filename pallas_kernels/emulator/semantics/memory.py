"""Loads and stores of vector registers: device memory by address or by buffer resource, and local memory.

Source: CDNA3 instruction set architecture, chapters "FLAT, Scratch and Global", "MUBUF" and "DS".
"""

import re
from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import unknown
from pallas_kernels.emulator.instruction import GpuInstruction, Operand
from pallas_kernels.emulator.registers import LANES
from pallas_kernels.emulator.state import LaunchState

SIZES = {
    "dwordx4": 16,
    "dwordx3": 12,
    "dwordx2": 8,
    "dword": 4,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "ubyte": 1,
    "sbyte": 1,
    "byte": 1,
}
NO_SCALAR_ADDRESS = 127
GLOBAL_NAME = re.compile(r"(?:global|buffer)_(load|store)_(\w+?)(_d16_hi)?")
LOCAL_NAME = re.compile(r"ds_(read|write)(2|2st64)?_([bui])(8|16|32|64|96|128)(_d16_hi)?")
Locate = Callable[[LaunchState], tuple[np.ndarray, np.ndarray]]
"""Function that returns device addresses [n, 64] and the lanes that access memory."""


def global_access(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """Behavior of a load or store by address.

    Raises:
      EmulationError: if it is unknown.
    """
    # With a scalar base the vector register is an unsigned offset of 32 bits.
    address, scalar = instruction.sources[0], instruction.sources[-1]
    offset = (instruction.fields["offset"] ^ 0x1000) - 0x1000  # 13 bits with a sign
    has_scalar = scalar.register != NO_SCALAR_ADDRESS

    def locate(state: LaunchState) -> tuple[np.ndarray, np.ndarray]:
        registers = state.registers
        if has_scalar:
            base = registers.scalar64(scalar)[:, None] + registers.read(address, "u").astype(np.uint64)
        else:
            base = registers.read(address, "U")
        return np.broadcast_to(base.astype(np.int64) + offset, (registers.count, LANES)), registers.exec

    if "_atomic_" in instruction.name:
        return _atomic_sum(instruction, locate)
    return _device_access(instruction, locate, outside=None)


def _atomic_sum(instruction: GpuInstruction, locate: Locate) -> Callable[[LaunchState], None]:
    """GLOBAL_ATOMIC_ADD_F32 without a returned value; lanes add in their order, which no GPU promises."""
    fields = instruction.fields
    # Bit sc0 of an atomic says that it returns the old value.
    if instruction.name != "global_atomic_add_f32" or fields["sc0"]:
        raise unknown(instruction.text)

    def run(state: LaunchState) -> None:
        addresses, lanes = locate(state)
        state.counts.count_device_access(addresses, lanes, 4)
        values = state.registers.vector32(instruction.sources[1].register)
        state.memory.add_floats(addresses, lanes, values)
        state.registers.in_flight.issue("vm", state.registers.waves, complete=lambda positions: None)

    return run


def buffer_access(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """Behavior of a load or store by a buffer resource: beyond its end, loads give 0 and stores do nothing.

    Raises:
      EmulationError: if it, or an address mode, is unknown.
    """
    address, resource, scalar_offset = instruction.sources[0], *instruction.sources[-2:]
    fields = instruction.fields
    if fields["idxen"] or fields["lds"]:
        raise unknown(f"this address: {instruction.text}")

    def offsets(state: LaunchState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Byte offset of each lane, size of the buffer, address of its start."""
        registers = state.registers
        # Words of a resource: address, its upper 16 bits with the stride, size in bytes, format.
        words = [registers.scalar32(resource, part) for part in range(4)]
        if (words[1] >> np.uint32(16)).any():
            raise unknown("buffers with a stride")
        base = words[0].astype(np.int64) | (words[1] & np.uint32(0xFFFF)).astype(np.int64) << np.int64(32)
        offset = np.zeros((registers.count, LANES), np.int64) + fields["offset"]
        if fields["offen"]:
            # The sum has 32 bits before gfx1250 (LLVM's pull request 152584): -4 and 4 give 0.
            offset = offset + registers.read(address, "u").astype(np.int64) & 0xFFFFFFFF
        start = registers.scalar32(scalar_offset).astype(np.int64)
        return offset, (words[2].astype(np.int64) - start)[:, None], (base + start)[:, None]

    def locate(state: LaunchState) -> tuple[np.ndarray, np.ndarray]:
        offset, _, start = offsets(state)
        return start + offset, state.registers.exec

    def outside(state: LaunchState, size: int) -> np.ndarray:
        offset, limit, _ = offsets(state)
        return offset + size > limit

    return _device_access(instruction, locate, outside=outside)


def _device_access(
    instruction: GpuInstruction, locate: Locate, outside: Callable[[LaunchState, int], np.ndarray] | None
) -> Callable[[LaunchState], None]:
    match = GLOBAL_NAME.fullmatch(instruction.name)
    if not match or match[2] not in SIZES or (match[1] == "load" and match[3]):
        raise unknown(instruction.name)
    size, shift = SIZES[match[2]], 16 if match[3] else 0
    signed = match[2] in ("sshort", "sbyte")

    def places(state: LaunchState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Addresses, active lanes, and those inside of the buffer."""
        addresses, lanes = locate(state)
        # A range that crosses the end of a buffer is checked as a whole; the compiler aligns them.
        inside = lanes if outside is None else lanes & ~outside(state, size)
        state.counts.count_device_access(addresses, inside, size)
        return addresses, lanes, inside

    def load(state: LaunchState) -> None:
        addresses, lanes, inside = places(state)
        values = state.memory.load(addresses, inside, size, state.groups)
        if signed:
            values = [_extend_sign(values[0], size)]
        # A lane beyond the end of its buffer receives 0.
        values = [np.where(inside, value, np.uint32(0)) for value in values]
        state.registers.load_vector("vm", instruction.destinations[0].register, values, lanes)

    def store(state: LaunchState) -> None:
        addresses, _, inside = places(state)
        values = _words(state, instruction.sources[1], size, shift)
        state.memory.store(addresses, inside, values, size, state.groups)
        # Stores count too: s_waitcnt vmcnt(0) waits for them.
        state.registers.in_flight.issue("vm", state.registers.waves, complete=lambda positions: None)

    return load if match[1] == "load" else store


def _words(state: LaunchState, data: Operand, size: int, shift: int) -> list[np.ndarray]:
    # Half a register is stored from its upper half by instructions named d16_hi.
    registers = [state.registers.vector32(data.register + word) for word in range(max(size // 4, 1))]
    return [register >> np.uint32(shift) for register in registers]


def _extend_sign(value: np.ndarray, size: int) -> np.ndarray:
    sign = np.uint32(1 << 8 * size - 1)
    return (value ^ sign) - sign


def local_access(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """Behavior of a load from or store to local memory.

    Raises:
      EmulationError: if it is unknown.
    """
    match = LOCAL_NAME.fullmatch(instruction.name)
    if not match or instruction.fields["gds"] or (match[1] == "read" and match[5]):
        raise unknown(instruction.name)
    size, shift, signed = int(match[4]) // 8, 16 if match[5] else 0, match[3] == "i"
    offsets = _local_offsets(instruction, match[2], size)
    address, *data = instruction.sources

    def places(state: LaunchState) -> list[np.ndarray]:
        base = state.registers.read(address, "u").astype(np.int64)
        shape = state.registers.count, LANES
        return [np.broadcast_to(base + offset, shape) for offset in offsets]

    def load(state: LaunchState) -> None:
        values, parts = [], []
        for place in places(state):
            state.counts.count_local_access(place, state.registers.exec, size, is_read=True)
            lanes = state.registers.exec
            loaded, touched = state.local.load(place, lanes, size, state.groups, state.waves_in_group)
            values += [_extend_sign(value, size) for value in loaded] if signed and size < 4 else loaded
            parts.append(touched)
        _issue(state, parts, instruction.destinations[0].register, values)

    def store(state: LaunchState) -> None:
        parts = []
        for place, operand in zip(places(state), data, strict=True):
            state.counts.count_local_access(place, state.registers.exec, size, is_read=False)
            values = _words(state, operand, size, shift)
            parts.append(
                state.local.store(
                    place, state.registers.exec, values, size, state.groups, state.waves_in_group
                )
            )
        _issue(state, parts, 0, [])

    return load if match[1] == "read" else store


def _local_offsets(instruction: GpuInstruction, pair: str | None, size: int) -> list[int]:
    """Byte offsets of the one or two accesses; pairs count in elements, or in 64 elements."""
    # A single access joins both fields to one offset of 16 bits.
    first, second = instruction.fields["offset0"], instruction.fields["offset1"]
    if not pair:
        return [first | second << 8]
    step = size * (64 if pair == "2st64" else 1)
    return [first * step, second * step]


def _issue(state: LaunchState, parts: list, first: int, values: list[np.ndarray]) -> None:
    """Puts an access of local memory in flight."""
    local = state.local

    def complete(positions: np.ndarray) -> None:
        for touched in parts:
            local.complete(touched, positions)

    if values:
        state.registers.load_vector("lgkm", first, values, state.registers.exec, then=complete)
    else:
        state.registers.in_flight.issue("lgkm", state.registers.waves, complete=complete)
