"""Instructions of the vector unit that compute each lane by itself: a table of formulas, and its modifiers.

Source: CDNA3 instruction set architecture, chapters "VOP1", "VOP2", "VOP3" and "VOPC".
"""

from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import unknown
from pallas_kernels.emulator.instruction import GpuInstruction
from pallas_kernels.emulator.registers import BITS, TYPES
from pallas_kernels.emulator.semantics import floats, integers
from pallas_kernels.emulator.semantics.lanes import selection_of
from pallas_kernels.emulator.state import LaunchState

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64
HALF = U32(0xFFFF)


def _shift(x: np.ndarray) -> np.ndarray:
    """Shifts of 32 bits use the lowest five bits of their count."""
    return x & U32(31)


def _shift64(x: np.ndarray) -> np.ndarray:
    return (x & U32(63)).astype(U64)


def _with_carry(exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest 32 bits of a sum or difference of 64 bits, and its carry or borrow."""
    return integers.low32(exact), (exact < 0) | (exact >> I64(32) != 0)


def _multiply_add(a: np.ndarray, b: np.ndarray, addend: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # A sum of 64 bits has overflowed if it is smaller than an addend.
    total = integers.product64(a, b) + addend
    return total, total < addend


def _scaled(*values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return floats.div_scale(*map(np.ascontiguousarray, np.broadcast_arrays(*values)))


def _count_below(half: int) -> Callable:
    """Bits of the lower or upper half of a mask that belong to lanes below each lane, plus a number."""
    below = (BITS - U64(1) >> U64(32 * half) & U64(0xFFFFFFFF)).astype(U32)
    return lambda mask, addend: integers.count_bits(mask & below) + addend


FORMULAS: dict[str, tuple[str, Callable, str]] = {
    # name: types of the sources, formula, types of the results; "m" is a mask of lanes
    "v_mov_b32": ("u", lambda a: a, "u"),
    "v_mov_b64": ("U", lambda a: a, "U"),
    "v_accvgpr_read": ("u", lambda a: a, "u"),
    "v_accvgpr_write": ("u", lambda a: a, "u"),
    "v_accvgpr_mov_b32": ("u", lambda a: a, "u"),
    "v_not_b32": ("u", lambda a: ~a, "u"),
    "v_bfrev_b32": ("u", integers.reverse_bits, "u"),
    "v_bcnt_u32_b32": ("uu", lambda a, b: integers.count_bits(a) + b, "u"),
    "v_ffbh_u32": ("u", integers.leading_zeros, "u"),
    "v_and_b32": ("uu", lambda a, b: a & b, "u"),
    "v_or_b32": ("uu", lambda a, b: a | b, "u"),
    "v_xor_b32": ("uu", lambda a, b: a ^ b, "u"),
    "v_or3_b32": ("uuu", lambda a, b, c: a | b | c, "u"),
    "v_and_or_b32": ("uuu", lambda a, b, c: a & b | c, "u"),
    "v_bfi_b32": ("uuu", lambda a, b, c: a & b | ~a & c, "u"),
    "v_xad_u32": ("uuu", lambda a, b, c: (a ^ b) + c, "u"),
    "v_add_u32": ("uu", lambda a, b: a + b, "u"),
    "v_sub_u32": ("uu", lambda a, b: a - b, "u"),
    "v_subrev_u32": ("uu", lambda a, b: b - a, "u"),
    "v_add_i32": ("ii", lambda a, b: a + b, "i"),
    "v_sub_i32": ("ii", lambda a, b: a - b, "i"),
    "v_add3_u32": ("uuu", lambda a, b, c: a + b + c, "u"),
    "v_add_lshl_u32": ("uuu", lambda a, b, c: (a + b) << _shift(c), "u"),
    "v_lshl_add_u32": ("uuu", lambda a, b, c: (a << _shift(b)) + c, "u"),
    "v_lshl_or_b32": ("uuu", lambda a, b, c: a << _shift(b) | c, "u"),
    # The count of this shift has three bits.
    "v_lshl_add_u64": ("UuU", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c, "U"),
    # "rev": the count is the first operand, which may be a constant.
    "v_lshlrev_b32": ("uu", lambda a, b: b << _shift(a), "u"),
    "v_lshrrev_b32": ("uu", lambda a, b: b >> _shift(a), "u"),
    "v_ashrrev_i32": ("ui", lambda a, b: b >> _shift(a).astype(I32), "i"),
    "v_lshlrev_b64": ("uU", lambda a, b: b << _shift64(a), "U"),
    "v_lshrrev_b64": ("uU", lambda a, b: b >> _shift64(a), "U"),
    "v_ashrrev_i64": ("uI", lambda a, b: b >> _shift64(a).astype(np.int64), "I"),
    "v_bfe_u32": ("uuu", integers.bit_field, "u"),
    "v_bfe_i32": ("uuu", integers.signed_bit_field, "u"),
    "v_alignbit_b32": ("uuu", integers.align_bits, "u"),
    "v_alignbyte_b32": ("uuu", lambda a, b, c: integers.align_bits(a, b, (c & U32(3)) * U32(8)), "u"),
    # Byte shuffles: Triton packs pairs of bfloat16 numbers with them.
    "v_perm_b32": ("uuu", integers.permute_bytes, "u"),
    "v_mul_lo_u32": ("uu", lambda a, b: a * b, "u"),
    "v_mul_hi_u32": ("uu", integers.high_product, "u"),
    "v_mul_hi_i32": ("ii", integers.high_product_signed, "i"),
    # Products of 24 bits are fast on this unit, and the compiler proves ranges to use them.
    "v_mul_u32_u24": ("uu", integers.product24, "u"),
    "v_mul_i32_i24": ("uu", integers.signed_product24, "u"),
    "v_mad_u32_u24": ("uuu", lambda a, b, c: integers.product24(a, b) + c, "u"),
    "v_mad_i32_i24": ("uuu", lambda a, b, c: integers.signed_product24(a, b) + c, "u"),
    # The type letters choose between signed and unsigned comparison.
    "v_max_i32": ("ii", np.maximum, "i"),
    "v_min_i32": ("ii", np.minimum, "i"),
    "v_max_u32": ("uu", np.maximum, "u"),
    "v_min_u32": ("uu", np.minimum, "u"),
    "v_max3_i32": ("iii", lambda a, b, c: np.maximum(np.maximum(a, b), c), "i"),
    "v_min3_i32": ("iii", lambda a, b, c: np.minimum(np.minimum(a, b), c), "i"),
    "v_max3_u32": ("uuu", lambda a, b, c: np.maximum(np.maximum(a, b), c), "u"),
    "v_min3_u32": ("uuu", lambda a, b, c: np.minimum(np.minimum(a, b), c), "u"),
    "v_med3_i32": ("iii", integers.median, "i"),
    "v_med3_u32": ("uuu", integers.median, "u"),
    # Instructions of 16 bits read the lower half and clear the upper half of the result.
    "v_add_u16": ("uu", lambda a, b: a + b & HALF, "u"),
    "v_sub_u16": ("uu", lambda a, b: a - b & HALF, "u"),
    "v_subrev_u16": ("uu", lambda a, b: b - a & HALF, "u"),
    "v_mul_lo_u16": ("uu", lambda a, b: (a & HALF) * (b & HALF) & HALF, "u"),
    "v_lshlrev_b16": ("uu", lambda a, b: b << (a & U32(15)) & HALF, "u"),
    "v_lshrrev_b16": ("uu", lambda a, b: (b & HALF) >> (a & U32(15)), "u"),
    "v_max_u16": ("uu", lambda a, b: np.maximum(a & HALF, b & HALF), "u"),
    "v_min_u16": ("uu", lambda a, b: np.minimum(a & HALF, b & HALF), "u"),
    "v_add_f32": ("ff", lambda a, b: a + b, "f"),
    "v_sub_f32": ("ff", lambda a, b: a - b, "f"),
    "v_subrev_f32": ("ff", lambda a, b: b - a, "f"),
    "v_mul_f32": ("ff", lambda a, b: a * b, "f"),
    # One formula: these encodings differ in where the addend comes from.
    "v_fma_f32": ("fff", floats.fma, "f"),
    "v_fmac_f32": ("fff", floats.fma, "f"),
    "v_fmamk_f32": ("fff", floats.fma, "f"),
    "v_fmaak_f32": ("fff", floats.fma, "f"),
    "v_max_f32": ("ff", floats.maximum, "f"),
    "v_min_f32": ("ff", floats.minimum, "f"),
    "v_max3_f32": ("fff", lambda a, b, c: floats.maximum(floats.maximum(a, b), c), "f"),
    "v_min3_f32": ("fff", lambda a, b, c: floats.minimum(floats.minimum(a, b), c), "f"),
    "v_div_fixup_f32": ("fff", lambda a, b, c: floats.div_fixup(*np.broadcast_arrays(a, b, c)), "f"),
    "v_ldexp_f32": ("fi", floats.scale, "f"),
    "v_frexp_mant_f32": ("f", floats.mantissa, "f"),
    "v_frexp_exp_i32_f32": ("f", floats.mantissa_exponent, "i"),
    # Functions of which the ISA bounds the error only.
    "v_exp_f32": ("f", floats.exp2, "f"),
    "v_log_f32": ("f", floats.log2, "f"),
    "v_rcp_f32": ("f", floats.reciprocal, "f"),
    "v_rcp_iflag_f32": ("f", floats.reciprocal, "f"),
    "v_rsq_f32": ("f", floats.reciprocal_root, "f"),
    "v_sqrt_f32": ("f", floats.root, "f"),
    "v_trunc_f32": ("f", np.trunc, "f"),
    "v_floor_f32": ("f", np.floor, "f"),
    "v_ceil_f32": ("f", np.ceil, "f"),
    "v_rndne_f32": ("f", np.rint, "f"),
    "v_fract_f32": ("f", lambda a: np.minimum(a - np.floor(a), np.float32(1 - 2.0**-24)), "f"),
    # Conversions round toward zero, to integers, and to nearest, to floats.
    "v_cvt_i32_f32": ("f", floats.to_int32, "i"),
    "v_cvt_u32_f32": ("f", floats.to_uint32, "u"),
    "v_cvt_f32_u32": ("u", lambda a: a.astype(np.float32), "f"),
    "v_cvt_f32_i32": ("i", lambda a: a.astype(np.float32), "f"),
    "v_cvt_f32_f16": ("u", lambda a: (a & HALF).astype(np.uint16).view(np.float16).astype(np.float32), "f"),
    "v_cvt_f16_f32": ("f", lambda a: a.astype(np.float16).view(np.uint16).astype(U32), "u"),
    "v_cvt_f32_ubyte0": ("u", lambda a: (a & U32(0xFF)).astype(np.float32), "f"),
    "v_mbcnt_lo_u32_b32": ("uu", _count_below(0), "u"),
    "v_mbcnt_hi_u32_b32": ("uu", _count_below(1), "u"),
    # "rev" exchanges the operands, since only the first one may be a constant.
    "v_add_co_u32": ("uu", lambda a, b: _with_carry(a.astype(I64) + b), "um"),
    "v_sub_co_u32": ("uu", lambda a, b: _with_carry(a.astype(I64) - b), "um"),
    "v_subrev_co_u32": ("uu", lambda a, b: _with_carry(b.astype(I64) - a), "um"),
    "v_addc_co_u32": ("uum", lambda a, b, carry: _with_carry(a.astype(I64) + b + carry), "um"),
    "v_subb_co_u32": ("uum", lambda a, b, carry: _with_carry(a.astype(I64) - b - carry), "um"),
    "v_subbrev_co_u32": ("uum", lambda a, b, carry: _with_carry(b.astype(I64) - a - carry), "um"),
    "v_mad_u64_u32": ("uuU", _multiply_add, "Um"),
    "v_div_scale_f32": ("fff", _scaled, "fm"),
    "v_div_fmas_f32": ("fffm", floats.div_fmas, "f"),
    "v_cndmask_b32": ("uum", lambda a, b, mask: np.where(mask, b, a), "u"),
    # The number is classified by its bits: a signaling NaN must not become quiet first.
    "v_cmp_class_f32": ("fu", lambda a, b: b >> floats.class_number(a.view(U32)) & U32(1) != 0, "m"),
}
FLOAT_RESULTS = {name for name, (_, _, result) in FORMULAS.items() if result == "f"}
SATURATED: dict[str, Callable] = {
    "v_add_u32": lambda a, b: np.minimum(a.astype(U64) + b, U64(0xFFFFFFFF)).astype(U32),
    "v_sub_u32": lambda a, b: np.where(b > a, U32(0), a - b),
    "v_subrev_u32": lambda a, b: np.where(a > b, U32(0), b - a),
    # With 64 bits the exact result is known.
    "v_add_i32": lambda a, b: integers.saturate(a.astype(np.int64) + b),
    "v_sub_i32": lambda a, b: integers.saturate(a.astype(np.int64) - b),
}
"""Formulas with the modifier clamp, of instructions whose result is an integer."""
RELATIONS: dict[str, Callable] = {
    "f": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    "t": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
    "tru": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: (a < b) | (a > b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    # Negated relations hold for NaNs.
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
}
COMPARED: dict[str, tuple[str, Callable]] = {
    "f32": ("f", lambda x: x),
    "u32": ("u", lambda x: x),
    "i32": ("i", lambda x: x),
    "u64": ("U", lambda x: x),
    "i64": ("I", lambda x: x),
    "u16": ("u", lambda x: x & HALF),
    "i16": ("u", lambda x: (x << U32(16)).view(I32)),
}
"""Types of comparisons: how an operand is read, and what of it is compared."""


def _comparison(relation: Callable, part: Callable) -> Callable:
    return lambda a, b: relation(part(a), part(b))


# V_CMPX would also write EXEC, which this compiler does not use.
FORMULAS |= {
    f"v_cmp_{name}_{type_name}": (2 * kind, _comparison(relation, part), "m")
    for name, relation in RELATIONS.items()
    for type_name, (kind, part) in COMPARED.items()
}


def compute(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """Behavior of an instruction of the table.

    Raises:
      EmulationError: if it is unknown, or has a modifier that is.
    """
    if instruction.name not in FORMULAS:
        raise unknown(instruction.name)
    kinds, formula, results = FORMULAS[instruction.name]
    if len(results) > 1 or instruction.name in ("v_div_fmas_f32", "v_cmp_class_f32"):
        _refuse_modifiers(instruction)
    formula, selection = _with_clamp(instruction, formula), selection_of(instruction)
    destinations, sources = instruction.destinations, instruction.sources

    def run(state: LaunchState) -> None:
        registers = state.registers
        values = [
            registers.mask(source) if kind == "m" else registers.read(source, kind)
            for source, kind in zip(sources, kinds, strict=True)
        ]
        values, lanes = selection.apply(values, registers)
        made = formula(*values)
        made = made if len(results) > 1 else (made,)
        for destination, kind, value in zip(destinations, results, made, strict=True):
            if kind == "m":
                registers.write_mask(destination, value)
            else:
                # Formulas of Python operators may widen the type.
                value = np.asarray(value).astype(TYPES[kind], copy=False)
                registers.write(destination, selection.place(value), lanes)

    return run


def _with_clamp(instruction: GpuInstruction, formula: Callable) -> Callable:
    """The formula with the modifiers of its result."""
    name, fields = instruction.name, instruction.fields
    if fields.get("omod") or (fields.get("opsel") and name not in ("v_mov_b32",)):
        raise unknown(f"omod or op_sel of {name}")
    if not fields.get("clmp"):
        return formula
    if name in SATURATED:
        return SATURATED[name]
    if name in FLOAT_RESULTS:
        # A NaN becomes 0, as the descriptors' mode DX10_CLAMP says.
        return lambda *values: np.fmin(np.fmax(formula(*values), np.float32(0)), np.float32(1))
    raise unknown(f"clamp of {name}")


def _refuse_modifiers(instruction: GpuInstruction) -> None:
    """Checks that an instruction has no modifier that its behavior would silently ignore."""
    fields = instruction.fields
    if "dpp" in fields or "src0_sel" in fields or any(fields.get(name) for name in ("clmp", "omod", "opsel")):
        raise unknown(f"this form: {instruction.text}")
