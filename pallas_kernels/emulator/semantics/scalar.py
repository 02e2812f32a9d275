"""Instructions of the scalar unit: arithmetic, comparisons, branches, waits and loads.

Source: CDNA3 instruction set architecture, chapters "SOP1", "SOP2", "SOPC", "SOPK", "SOPP" and "SMEM". The
scalar condition code (SCC) is the carry, the overflow, or whether the result is not zero, as each
instruction says.
"""

from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import unknown
from pallas_kernels.emulator.instruction import EXEC, VCC, GpuInstruction, Operand
from pallas_kernels.emulator.registers import TYPES
from pallas_kernels.emulator.semantics import integers
from pallas_kernels.emulator.state import LaunchState

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64
EXEC_OPERAND, VCC_OPERAND = Operand("scalar", EXEC, 2), Operand("scalar", VCC, 2)
Behavior = Callable[[LaunchState], np.ndarray | None]

Result = tuple[np.ndarray | None, np.ndarray | None]
"""What an instruction writes to its destination and to SCC; None where it writes nothing."""


def _is_not_zero(x: np.ndarray) -> Result:
    return x, x != 0


def _sum(a: np.ndarray, b: np.ndarray, carry: np.ndarray | bool = False) -> Result:
    """Sum of unsigned numbers, and its carry."""
    total = a.astype(U64) + b + carry
    return integers.low32(total), total >> U64(32) != 0


def _difference(a: np.ndarray, b: np.ndarray, borrow: np.ndarray | bool = False) -> Result:
    total = a.astype(I64) - b - borrow
    return integers.low32(total), total < 0


def _with_overflow(exact: np.ndarray) -> Result:
    """A signed result of 32 bits, and whether it differs from the exact one, of 64 bits."""
    result = integers.low32(exact).view(I32)
    return result, exact != result


def _bit_field(a: np.ndarray, b: np.ndarray) -> Result:
    """S_BFE_U32: the second operand has the first bit in bits 0 to 4 and the width in bits 16 to 22."""
    # Widths above 32 take all bits that are left.
    start, width = b & U32(31), b >> U32(16) & U32(127)
    wide = a.astype(U64) >> start.astype(U64)
    mask = (U64(1) << np.minimum(width, 32).astype(U64)) - U64(1)
    return _is_not_zero(integers.low32(wide & mask))


def _signed_bit_field(a: np.ndarray, b: np.ndarray) -> Result:
    start, width = b & U32(31), np.minimum(b >> U32(16) & U32(127), 32).astype(U64)
    wide = (a.astype(I64) >> start.astype(I64)).view(U64)
    field = wide & (U64(1) << width) - U64(1)
    # Flipping the field's highest bit and subtracting it extends the sign.
    sign = np.where(width == 0, U64(0), U64(1) << np.maximum(width, U64(1)) - U64(1))
    return _is_not_zero(integers.low32((field ^ sign) - sign))


def _bit(number: np.ndarray) -> np.ndarray:
    return U32(1) << (number & U32(31))


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


def _logic(formula: Callable) -> Callable[..., Result]:
    return lambda a, b: _is_not_zero(formula(a, b))


def _relation(formula: Callable) -> Callable[..., Result]:
    return lambda a, b: (None, formula(a, b))


def _shifted_sum(count: int) -> Callable[..., Result]:
    return lambda a, b: _sum(a.astype(U64) << U64(count), b)


FORMULAS: dict[str, tuple[str, Callable[..., Result]]] = {
    # name: types of what the formula reads, and formula. After the sources it may read the destination's old
    # value, or SCC, whose letter is "c".
    "s_add_u32": ("uu", _sum),
    "s_addc_u32": ("uuc", _sum),
    "s_sub_u32": ("uu", _difference),
    "s_subb_u32": ("uuc", _difference),
    "s_add_i32": ("ii", lambda a, b: _with_overflow(a.astype(I64) + b)),
    "s_addk_i32": ("ii", lambda a, b: _with_overflow(a.astype(I64) + b)),
    "s_sub_i32": ("ii", lambda a, b: _with_overflow(a.astype(I64) - b)),
    "s_mul_i32": ("uu", lambda a, b: (a * b, None)),
    "s_mulk_i32": ("uu", lambda a, b: (a * b, None)),
    "s_mul_hi_u32": ("uu", lambda a, b: (integers.high_product(a, b), None)),
    "s_mul_hi_i32": ("ii", lambda a, b: (integers.high_product_signed(a, b), None)),
    "s_lshl_b32": ("uu", lambda a, b: _is_not_zero(a << (b & U32(31)))),
    "s_lshr_b32": ("uu", lambda a, b: _is_not_zero(a >> (b & U32(31)))),
    "s_ashr_i32": ("ii", lambda a, b: _is_not_zero(a >> (b & I32(31)))),
    # The count is a 32-bit operand, of which six bits matter.
    "s_lshl_b64": ("Uu", lambda a, b: _is_not_zero(a << (b & U32(63)).astype(U64))),
    "s_lshr_b64": ("Uu", lambda a, b: _is_not_zero(a >> (b & U32(63)).astype(U64))),
    "s_ashr_i64": ("Iu", lambda a, b: _is_not_zero(a >> (b & U32(63)).astype(I64))),
    # Maxima and minima say whether the first operand was chosen.
    "s_max_i32": ("ii", lambda a, b: (np.maximum(a, b), a >= b)),
    "s_min_i32": ("ii", lambda a, b: (np.minimum(a, b), a <= b)),
    "s_max_u32": ("uu", lambda a, b: (np.maximum(a, b), a >= b)),
    "s_min_u32": ("uu", lambda a, b: (np.minimum(a, b), a <= b)),
    "s_bfe_u32": ("uu", _bit_field),
    "s_bfe_i32": ("iu", _signed_bit_field),
    "s_bfm_b32": ("uu", lambda a, b: ((_bit(a) - U32(1)) << (b & U32(31)), None)),
    "s_pack_ll_b32_b16": ("uu", lambda a, b: (a & U32(0xFFFF) | b << U32(16), None)),
    "s_pack_lh_b32_b16": ("uu", lambda a, b: (a & U32(0xFFFF) | b & U32(0xFFFF0000), None)),
    "s_pack_hh_b32_b16": ("uu", lambda a, b: (a >> U32(16) | b & U32(0xFFFF0000), None)),
    "s_mov_b32": ("u", lambda a: (a, None)),
    "s_mov_b64": ("U", lambda a: (a, None)),
    "s_movk_i32": ("u", lambda a: (a, None)),
    "s_not_b32": ("u", lambda a: _is_not_zero(~a)),
    "s_not_b64": ("U", lambda a: _is_not_zero(~a)),
    "s_brev_b32": ("u", lambda a: (integers.reverse_bits(a), None)),
    "s_flbit_i32_b32": ("u", lambda a: (integers.leading_zeros(a), None)),
    "s_abs_i32": ("i", lambda a: _is_not_zero(np.abs(a))),
    "s_bcnt1_i32_b32": ("u", lambda a: _is_not_zero(integers.count_bits(a))),
    "s_sext_i32_i8": ("i", lambda a: (a << I32(24) >> I32(24), None)),
    "s_sext_i32_i16": ("i", lambda a: (a << I32(16) >> I32(16), None)),
    "s_cselect_b32": ("uuc", lambda a, b, scc: (np.where(scc, a, b), None)),
    "s_cselect_b64": ("UUc", lambda a, b, scc: (np.where(scc, a, b), None)),
    "s_bitcmp0_b32": ("uu", lambda a, b: (None, a & _bit(b) == 0)),
    "s_bitcmp1_b32": ("uu", lambda a, b: (None, a & _bit(b) != 0)),
    # The other bits of the destination stay.
    "s_bitset0_b32": ("uu", lambda a, old: (old & ~_bit(a), None)),
    "s_bitset1_b32": ("uu", lambda a, old: (old | _bit(a), None)),
    **{f"s_lshl{count}_add_u32": ("uu", _shifted_sum(count)) for count in range(1, 5)},
    **{
        f"s_{name}_{bits}": (2 * kind, _logic(formula))
        for name, formula in LOGIC.items()
        for bits, kind in (("b32", "u"), ("b64", "U"))
    },
    **{
        f"s_{prefix}_{name}_{bits}": (2 * kind, _relation(formula))
        for prefix in ("cmp", "cmpk")
        for name, formula in RELATIONS.items()
        for bits, kind in (("u32", "u"), ("i32", "i"), ("u64", "U"))
    },
}
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
    found = _control(instruction)
    if found is not None:
        return found
    if instruction.name.endswith("_saveexec_b64"):
        return _save_exec(instruction)
    if instruction.name not in FORMULAS:
        raise unknown(instruction.name)
    kinds, formula = FORMULAS[instruction.name]
    operands = (*instruction.sources, *instruction.destinations)

    def run(state: LaunchState) -> None:
        registers = state.registers
        result, scc = formula(
            *(_read(state, operand, kind) for operand, kind in zip(operands, kinds, strict=False))
        )
        if result is not None:
            write = registers.write_scalar64 if result.dtype.itemsize == 8 else registers.write_scalar32
            write(instruction.destinations[0], result.view(f"u{result.dtype.itemsize}"))
        if scc is not None:
            state.scc = scc

    return run


def _read(state: LaunchState, operand: Operand, kind: str) -> np.ndarray:
    if kind == "c":
        return state.scc
    read = state.registers.scalar64 if TYPES[kind].itemsize == 8 else state.registers.scalar32
    return read(operand).view(TYPES[kind])


def _control(instruction: GpuInstruction) -> Behavior | None:
    name = instruction.name
    # Priorities and caches do not change results; the state handles ends and barriers itself.
    if name in ("s_nop", "s_setprio", "s_sleep", "s_barrier", "s_endpgm", "s_icache_inv", "s_clause"):
        return lambda state: None
    if name == "s_branch":
        return lambda state: np.ones(state.registers.count, bool)
    if name.startswith("s_cbranch_"):
        return CONDITIONS.get(name.removeprefix("s_cbranch_"))
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
        raise unknown(f"this address: {instruction.text}")
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


def _save_exec(instruction: GpuInstruction) -> Behavior:
    name = instruction.name.removeprefix("s_").removesuffix("_saveexec_b64")
    if name not in LOGIC:
        raise unknown(instruction.name)

    def run(state: LaunchState) -> None:
        registers = state.registers
        # The old mask is saved even if its register is also the source, which is read first.
        old = registers.scalar64(EXEC_OPERAND)
        value = LOGIC[name](registers.scalar64(instruction.sources[0]), old)
        registers.write_scalar64(instruction.destinations[0], old)
        registers.write_scalar64(EXEC_OPERAND, value)
        state.scc = value != 0

    return run
