"""Instructions of the scalar unit: arithmetic, comparisons, branches, waits and loads.

Source: CDNA3 instruction set architecture, chapters "SOP1", "SOP2", "SOPC", "SOPK", "SOPP" and "SMEM". The
scalar condition code (SCC) is the carry, the overflow, or whether the result is not zero, as each
instruction says.
"""

import re
from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import EmulationError
from pallas_kernels.emulator.instruction import EXEC, VCC, GpuInstruction, Operand
from pallas_kernels.emulator.registers import TYPES
from pallas_kernels.emulator.semantics import integers
from pallas_kernels.emulator.state import LaunchState

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64
EXEC_OPERAND, VCC_OPERAND = Operand("scalar", EXEC, 2), Operand("scalar", VCC, 2)
Behavior = Callable[[LaunchState], np.ndarray | None]

LOGIC: dict[str, Callable] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
RELATIONS: dict[str, Callable] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def _is_not_zero(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x, x != 0


def _signed_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum of signed numbers, and whether it overflows."""
    # With 64 bits the exact sum is known, and with it the overflow.
    total = a.view(I32).astype(I64) + b.view(I32).astype(I64)
    result = integers.low32(total.view(U64))
    return result, total != result.view(I32)


def _signed_difference(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = a.view(I32).astype(I64) - b.view(I32).astype(I64)
    result = integers.low32(total.view(U64))
    return result, total != result.view(I32)


def _sum(a: np.ndarray, b: np.ndarray, carry: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sum of unsigned numbers, and its carry."""
    total = a.astype(U64) + b.astype(U64) + np.asarray(carry).astype(U64)
    return integers.low32(total), total >> U64(32) != 0


def _difference(a: np.ndarray, b: np.ndarray, borrow: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray]:
    total = a.astype(I64) - b.astype(I64) - np.asarray(borrow).astype(I64)
    return integers.low32(total.view(U64)), total < 0


def _shifted_sum(count: int) -> Callable:
    def compute(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total = (a.astype(U64) << U64(count)) + b.astype(U64)
        return integers.low32(total), total >> U64(32) != 0

    return compute


def _bit_field(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """S_BFE_U32: the second operand has the first bit in bits 0 to 4 and the width in bits 16 to 22."""
    # Widths above 32 take all bits that are left.
    start, width = b & U32(31), b >> U32(16) & U32(127)
    wide = a.astype(U64) >> start.astype(U64)
    mask = (U64(1) << np.minimum(width, 32).astype(U64)) - U64(1)
    return _is_not_zero(integers.low32(wide & mask))


def _signed_bit_field(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    start, width = b & U32(31), np.minimum(b >> U32(16) & U32(127), 32).astype(U64)
    wide = (a.view(I32).astype(I64) >> start.astype(I64)).view(U64)
    field = wide & (U64(1) << width) - U64(1)
    # Flipping the field's highest bit and subtracting it extends the sign.
    sign = np.where(width == 0, U64(0), U64(1) << np.maximum(width, U64(1)) - U64(1))
    return _is_not_zero(integers.low32((field ^ sign) - sign))


BINARY: dict[str, Callable] = {
    # name: (first, second) to (result, SCC); SCC is None where it is kept
    "s_add_u32": _sum,
    "s_sub_u32": _difference,
    "s_add_i32": _signed_sum,
    "s_sub_i32": _signed_difference,
    "s_addk_i32": _signed_sum,
    "s_mul_i32": lambda a, b: (a * b, None),
    "s_mulk_i32": lambda a, b: (a * b, None),
    "s_mul_hi_u32": lambda a, b: (integers.high_product(a, b), None),
    "s_mul_hi_i32": lambda a, b: (integers.high_product_signed(a.view(I32), b.view(I32)).view(U32), None),
    "s_lshl_b32": lambda a, b: _is_not_zero(a << (b & U32(31))),
    "s_lshr_b32": lambda a, b: _is_not_zero(a >> (b & U32(31))),
    "s_ashr_i32": lambda a, b: _is_not_zero((a.view(I32) >> (b & U32(31)).astype(I32)).view(U32)),
    "s_max_i32": lambda a, b: (np.maximum(a.view(I32), b.view(I32)).view(U32), a.view(I32) >= b.view(I32)),
    # Maxima and minima say whether the first operand was chosen.
    "s_min_i32": lambda a, b: (np.minimum(a.view(I32), b.view(I32)).view(U32), a.view(I32) <= b.view(I32)),
    "s_max_u32": lambda a, b: (np.maximum(a, b), a >= b),
    "s_min_u32": lambda a, b: (np.minimum(a, b), a <= b),
    "s_bfe_u32": _bit_field,
    "s_bfe_i32": _signed_bit_field,
    "s_bfm_b32": lambda a, b: (((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)), None),
    "s_lshl1_add_u32": _shifted_sum(1),
    "s_lshl2_add_u32": _shifted_sum(2),
    "s_lshl3_add_u32": _shifted_sum(3),
    "s_lshl4_add_u32": _shifted_sum(4),
    "s_pack_ll_b32_b16": lambda a, b: (a & U32(0xFFFF) | b << U32(16), None),
    "s_pack_lh_b32_b16": lambda a, b: (a & U32(0xFFFF) | b & U32(0xFFFF0000), None),
    "s_pack_hh_b32_b16": lambda a, b: (a >> U32(16) | b & U32(0xFFFF0000), None),
}
WITH_CARRY: dict[str, Callable] = {"s_addc_u32": _sum, "s_subb_u32": _difference}
SHIFTS64: dict[str, Callable] = {
    "s_lshl_b64": lambda a, count: a << count,
    "s_lshr_b64": lambda a, count: a >> count,
    "s_ashr_i64": lambda a, count: (a.view(I64) >> count.astype(I64)).view(U64),
}
UNARY: dict[str, Callable] = {
    "s_mov_b32": lambda a: (a, None),
    "s_movk_i32": lambda a: (a, None),
    "s_brev_b32": lambda a: (integers.reverse_bits(a), None),
    "s_not_b32": lambda a: _is_not_zero(~a),
    "s_flbit_i32_b32": lambda a: (integers.leading_zeros(a), None),
    "s_abs_i32": lambda a: _is_not_zero(np.abs(a.view(I32)).view(U32)),
    "s_bcnt1_i32_b32": lambda a: _is_not_zero(integers.count_bits(a)),
    "s_sext_i32_i8": lambda a: ((a << U32(24)).view(I32).__rshift__(I32(24)).view(U32), None),
    "s_sext_i32_i16": lambda a: ((a << U32(16)).view(I32).__rshift__(I32(16)).view(U32), None),
}
UNARY64: dict[str, Callable] = {"s_mov_b64": lambda a: (a, None), "s_not_b64": lambda a: _is_not_zero(~a)}
CONDITIONS: dict[str, Callable[[LaunchState], np.ndarray]] = {
    "scc0": lambda state: ~state.scc,
    "scc1": lambda state: state.scc,
    "vccz": lambda state: state.registers.scalar64(VCC_OPERAND) == 0,
    "vccnz": lambda state: state.registers.scalar64(VCC_OPERAND) != 0,
    "execz": lambda state: state.registers.scalar64(EXEC_OPERAND) == 0,
    "execnz": lambda state: state.registers.scalar64(EXEC_OPERAND) != 0,
}


def behavior(instruction: GpuInstruction) -> Behavior:
    """Behavior of a scalar instruction; that of a branch returns which waves take it, [n].

    Raises:
      EmulationError: if it is unknown.
    """
    name = instruction.name
    # The groups do not overlap; the first that knows the name builds the behavior.
    for find in (_control, _table, _logic, _comparison, _other):
        found = find(instruction)
        if found is not None:
            return found
    raise EmulationError("instruction", f"the emulator does not know {name}")


def _control(instruction: GpuInstruction) -> Behavior | None:
    name = instruction.name
    # Priorities and caches do not change results; the state handles ends and barriers itself.
    if name in ("s_nop", "s_setprio", "s_sleep", "s_barrier", "s_endpgm", "s_icache_inv", "s_clause"):
        return lambda state: None
    if name == "s_branch":
        return lambda state: np.ones(state.registers.count, bool)
    if name.startswith("s_cbranch_"):
        condition = CONDITIONS.get(name.removeprefix("s_cbranch_"))
        return condition
    if name == "s_waitcnt":
        return _wait(instruction.fields["simm16"])
    if name.startswith("s_load_dword"):
        return _load(instruction)
    return None


def _wait(immediate: int) -> Behavior:
    # vmcnt: bits 0 to 3 and 14 to 15; lgkmcnt: bits 8 to 11 (CDNA3 ISA, S_WAITCNT).
    vector, local = immediate & 15 | immediate >> 10 & 48, immediate >> 8 & 15

    def run(state: LaunchState) -> None:
        in_flight = state.registers.in_flight
        # A field with all bits set means that this counter is not waited for.
        if in_flight and vector < 63:
            in_flight.wait("vm", vector, state.registers.active_waves())
        if in_flight and local < 15:
            in_flight.wait("lgkm", local, state.registers.active_waves())

    return run


def _load(instruction: GpuInstruction) -> Behavior:
    fields, destination = instruction.fields, instruction.destinations[0]
    scalar_offset = instruction.sources[1] if fields["soffset_en"] else None
    if not fields["imm"]:
        raise EmulationError("instruction", f"the emulator does not know this address: {instruction.text}")
    offset = (fields["offset"] ^ 0x100000) - 0x100000  # 21 bits with a sign

    def run(state: LaunchState) -> None:
        registers = state.registers
        # Scalar loads ignore the lowest two bits of an address.
        address = registers.scalar64(instruction.sources[0]).astype(I64) + offset
        if scalar_offset is not None:
            address = address + registers.scalar32(scalar_offset).astype(I64)
        address &= ~I64(3)
        lanes = np.ones((registers.count, 1), bool)
        words = state.memory.load(address[:, None], lanes, 4 * destination.count, state.groups)
        registers.load_scalar(destination.register, [word[:, 0] for word in words])

    return run


def _table(instruction: GpuInstruction) -> Behavior | None:
    name, sources = instruction.name, instruction.sources
    formula = BINARY.get(name) or UNARY.get(name) or WITH_CARRY.get(name)
    if formula is None:
        return None
    reads_carry = name in WITH_CARRY

    def run(state: LaunchState) -> None:
        registers = state.registers
        values = [registers.scalar32(source) for source in sources]
        # The carry of the lower half of a sum of 64 bits is the third operand of its upper half.
        result, scc = formula(*values, state.scc) if reads_carry else formula(*values)
        registers.write_scalar32(instruction.destinations[0], result)
        if scc is not None:
            state.scc = scc

    return run


def _logic(instruction: GpuInstruction) -> Behavior | None:
    match = re.fullmatch(r"s_(\w+?)(_saveexec)?_b(32|64)", instruction.name)
    if not match or match[1] not in LOGIC:
        return None
    formula, saves_exec, wide = LOGIC[match[1]], match[2], match[3] == "64"

    def run(state: LaunchState) -> None:
        registers = state.registers
        read = registers.scalar64 if wide else registers.scalar32
        write = registers.write_scalar64 if wide else registers.write_scalar32
        destination = instruction.destinations[0]
        # The old mask is saved even if its register is also the source, which is read first.
        if saves_exec:
            old = registers.scalar64(EXEC_OPERAND)
            value = formula(read(instruction.sources[0]), old)
            registers.write_scalar64(destination, old)
            destination = EXEC_OPERAND
        else:
            value = formula(*(read(source) for source in instruction.sources))
        write(destination, value)
        state.scc = value != 0

    return run


def _comparison(instruction: GpuInstruction) -> Behavior | None:
    name, sources = instruction.name, instruction.sources
    if match := re.fullmatch(r"s_bitcmp([01])_b32", name):
        return _bit_test(instruction, wanted=match[1] == "1")
    match = re.fullmatch(r"s_cmpk?_(\w+)_([ui])(32|64)", name)
    if not match or match[1] not in RELATIONS:
        return None
    relation, wide = RELATIONS[match[1]], match[3] == "64"
    kind = TYPES[match[2].upper() if wide else match[2]]

    def run(state: LaunchState) -> None:
        read = state.registers.scalar64 if wide else state.registers.scalar32
        state.scc = relation(*(read(source).view(kind) for source in sources))

    return run


def _bit_test(instruction: GpuInstruction, *, wanted: bool) -> Behavior:
    def run(state: LaunchState) -> None:
        # s_bitcmp1 sets the condition code where the bit is 1, s_bitcmp0 where it is 0.
        value, bit = (state.registers.scalar32(source) for source in instruction.sources)
        state.scc = (value >> (bit & U32(31)) & U32(1) != 0) == wanted

    return run


def _set_bit(instruction: GpuInstruction, *, one: bool) -> Behavior:
    destination = instruction.destinations[0]

    def run(state: LaunchState) -> None:
        registers = state.registers
        bit = U32(1) << (registers.scalar32(instruction.sources[0]) & U32(31))
        # The other bits stay; the condition code does not change.
        old = registers.scalar32(destination)
        registers.write_scalar32(destination, old | bit if one else old & ~bit)

    return run


def _other(instruction: GpuInstruction) -> Behavior | None:
    name, sources = instruction.name, instruction.sources
    if name in SHIFTS64:
        return _shift64(instruction)
    if name in UNARY64:
        return _unary64(instruction)
    if match := re.fullmatch(r"s_bitset([01])_b32", name):
        return _set_bit(instruction, one=match[1] == "1")
    match = re.fullmatch(r"s_cselect_b(32|64)", name)
    if not match:
        return None

    def run(state: LaunchState) -> None:
        registers = state.registers
        wide = match[1] == "64"
        read = registers.scalar64 if wide else registers.scalar32
        write = registers.write_scalar64 if wide else registers.write_scalar32
        write(instruction.destinations[0], np.where(state.scc, *(read(source) for source in sources)))

    return run


def _shift64(instruction: GpuInstruction) -> Behavior:
    formula = SHIFTS64[instruction.name]

    def run(state: LaunchState) -> None:
        registers = state.registers
        # The count is a 32-bit operand, of which six bits matter.
        count = (registers.scalar32(instruction.sources[1]) & U32(63)).astype(U64)
        value = formula(registers.scalar64(instruction.sources[0]), count)
        registers.write_scalar64(instruction.destinations[0], value)
        state.scc = value != 0

    return run


def _unary64(instruction: GpuInstruction) -> Behavior:
    formula = UNARY64[instruction.name]

    def run(state: LaunchState) -> None:
        registers = state.registers
        value, scc = formula(registers.scalar64(instruction.sources[0]))
        registers.write_scalar64(instruction.destinations[0], value)
        if scc is not None:
            state.scc = scc

    return run
