"""Arithmetic of float32 as the vector unit does it, on arrays of any shape.

Sources: CDNA3 instruction set architecture, chapter "Vector ALU operations". Denormal numbers are kept, as
the kernels' descriptors specify. Of the transcendental functions the ISA gives only bounds of error (1 unit
in the last place for exp2, log2, rcp, rsq and sqrt); here they are rounded from float64.
"""

import numpy as np

SMALLEST_NORMAL = np.float32(2.0**-126)
QUIET = np.uint32(0x00400000)
"""Bit that tells a quiet NaN from a signaling one."""


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c with one rounding."""
    return _sum_with_product(a, b, c).astype(np.float32)


def _sum_with_product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float64, ready for one rounding to float32.

    The product of two float32 numbers is exact in float64. The sum is rounded to odd there, so that
    rounding it to float32 afterwards gives the correctly rounded result (Boldo and Melquiond, 2008).
    """
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    # The error of a sum of two numbers is a number (Knuth's TwoSum).
    part = total - product
    error = (product - (total - part)) + (c - part)
    is_even = np.asarray(total).view(np.uint64) & np.uint64(1) == 0
    inexact = np.isfinite(total) & (error != 0) & is_even
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact, np.nextafter(total, toward), total)


def flush(x: np.ndarray) -> np.ndarray:
    """Replaces denormal numbers by zeros of the same sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def exp2(x: np.ndarray) -> np.ndarray:
    """2 to the power of x; denormal arguments and results are 0."""
    return flush(np.exp2(flush(x).astype(np.float64)).astype(np.float32))


def log2(x: np.ndarray) -> np.ndarray:
    """Logarithm to base 2; denormal arguments are 0."""
    return np.log2(flush(x).astype(np.float64)).astype(np.float32)


def reciprocal(x: np.ndarray) -> np.ndarray:
    """1 / x."""
    return (1.0 / x.astype(np.float64)).astype(np.float32)


def reciprocal_root(x: np.ndarray) -> np.ndarray:
    """1 / sqrt(x)."""
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32)


def root(x: np.ndarray) -> np.ndarray:
    """Square root of x."""
    return np.sqrt(x.astype(np.float64)).astype(np.float32)


def scale(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """x * 2**exponent, with one rounding."""
    # float64 holds the scaled number exactly; beyond these exponents it is 0 or infinite in float32.
    return np.ldexp(x.astype(np.float64), np.clip(exponent, -600, 600)).astype(np.float32)


def mantissa(x: np.ndarray) -> np.ndarray:
    """The number scaled to at least 1/2 and less than 1; 0, infinities and NaNs stay."""
    scaled, _ = np.frexp(x)
    return np.where(np.isfinite(x), scaled, quiet(np.ascontiguousarray(x))).astype(np.float32)


def mantissa_exponent(x: np.ndarray) -> np.ndarray:
    """Exponent of the power of two that `mantissa` divides by; 0 for 0, infinities and NaNs."""
    # The document says -126 for 0. LLVM relies on 0 there, as C's frexp returns it.
    _, power = np.frexp(x)
    return np.where(np.isfinite(x), power, 0).astype(np.int32)


def class_number(bits: np.ndarray) -> np.ndarray:
    """Bit of a number's class in the mask of V_CMP_CLASS_F32.

    Args:
      bits: float32 numbers as uint32.
    """
    negative, magnitude = bits >> np.uint32(31) != 0, bits & np.uint32(0x7FFFFFFF)
    infinity = np.uint32(0x7F800000)
    # Classes in the order of the mask: NaNs, then from -infinity up to +infinity.
    is_nan, is_quiet = magnitude > infinity, magnitude & QUIET != 0
    distance = np.select(
        [magnitude == infinity, magnitude >= np.uint32(0x00800000), magnitude > 0], [3, 2, 1], 0
    )
    of_number = np.where(negative, 5 - distance, 6 + distance)
    return np.where(is_nan, np.where(is_quiet, 1, 0), of_number).astype(np.uint32)


def quiet(x: np.ndarray) -> np.ndarray:
    """Makes signaling NaNs quiet, as all arithmetic does."""
    bits = x.view(np.uint32)
    return np.where(np.isnan(x), bits | QUIET, bits).view(np.float32)


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger number: a NaN loses, +0 is larger than -0."""
    a, b = np.broadcast_arrays(a, b)
    # Equal numbers differ at most in the sign of zero.
    larger = np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))
    return _with_signaling(a, b, larger)


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller number: a NaN loses, -0 is smaller than +0."""
    a, b = np.broadcast_arrays(a, b)
    smaller = np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))
    return _with_signaling(a, b, smaller)


def _with_signaling(a: np.ndarray, b: np.ndarray, result: np.ndarray) -> np.ndarray:
    """In IEEE mode, which the descriptors select, a signaling NaN wins and becomes quiet."""
    result = np.where(_is_signaling(b), quiet(b), result)
    return np.where(_is_signaling(a), quiet(a), result).astype(np.float32)


def _is_signaling(x: np.ndarray) -> np.ndarray:
    return np.isnan(x) & (np.ascontiguousarray(x).view(np.uint32) & QUIET == 0)


def to_int32(x: np.ndarray) -> np.ndarray:
    """Rounds toward zero, with saturation; NaN gives 0."""
    # float64 holds the bounds exactly, which float32 does not.
    whole = np.clip(np.trunc(x.astype(np.float64)), -(2.0**31), 2.0**31 - 1)
    return np.where(np.isnan(x), 0, whole).astype(np.int64).astype(np.int32)


def to_uint32(x: np.ndarray) -> np.ndarray:
    """Rounds toward zero, with saturation; NaN gives 0."""
    whole = np.clip(np.trunc(x.astype(np.float64)), 0.0, 2.0**32 - 1)
    return np.where(np.isnan(x), 0, whole).astype(np.uint64).astype(np.uint32)


def exponent(x: np.ndarray) -> np.ndarray:
    """Biased exponent of float32 numbers."""
    return (x.view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)).astype(np.int32)


def div_scale(
    s0: np.ndarray, denominator: np.ndarray, numerator: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """V_DIV_SCALE_F32: scales an operand of a division away from the ends of the range.

    Args:
      s0: the operand to scale, which is the denominator or the numerator.
      denominator: second operand.
      numerator: third operand.

    Returns:
      The scaled operand, and whether V_DIV_FMAS must undo the scaling.
    """
    inverse = 1.0 / denominator.astype(np.float64)
    quotient = numerator.astype(np.float64) / denominator.astype(np.float64)
    small_inverse, small_quotient = _is_denormal64(inverse), _is_denormal32(quotient)
    # Powers of two scale exactly unless the result is denormal.
    up, down = scale(s0, np.array(64)), scale(s0, np.array(-64))
    if_denominator = np.where(s0 == denominator, up, s0)
    if_numerator = np.where(s0 == numerator, up, s0)
    # The first condition that holds decides, in the order of the ISA's pseudocode.
    rules = [
        ((numerator == 0) | (denominator == 0), np.full_like(s0, np.nan), False),
        (exponent(numerator) - exponent(denominator) >= 96, if_denominator, True),
        (_is_denormal32(denominator.astype(np.float64)), up, False),
        (small_inverse & small_quotient, if_denominator, True),
        (small_inverse, down, False),
        (small_quotient, if_numerator, True),
        (exponent(numerator) <= 23, up, False),
    ]
    conditions = [condition for condition, _, _ in rules]
    scaled = np.select(conditions, [value for _, value, _ in rules], s0)
    flags = np.select(conditions, [np.full(s0.shape, flag) for _, _, flag in rules], False)
    return scaled.astype(np.float32), flags


def _is_denormal32(x: np.ndarray) -> np.ndarray:
    return (np.abs(x) < 2.0**-126) & (x != 0)


def _is_denormal64(x: np.ndarray) -> np.ndarray:
    return (np.abs(x) < 2.0**-1022) & (x != 0)


def div_fmas(a: np.ndarray, b: np.ndarray, c: np.ndarray, undo: np.ndarray) -> np.ndarray:
    """V_DIV_FMAS_F32: a * b + c, scaled back where V_DIV_SCALE requires it."""
    factor = np.where(exponent(c) > 127, 64, -64)
    total = _sum_with_product(a, b, c)
    # The scaled sum is rounded once: only so are denormal quotients rounded correctly.
    return np.where(undo, np.ldexp(total, factor), total).astype(np.float32)


def div_fixup(quotient: np.ndarray, denominator: np.ndarray, numerator: np.ndarray) -> np.ndarray:
    """V_DIV_FIXUP_F32: the quotient, or the right special value for special operands."""
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), np.float32(-1), np.float32(1))
    nan = np.uint32(0xFFC00000).view(np.float32)
    zero, infinity = np.copysign(np.float32(0), sign), np.copysign(np.float32(np.inf), sign)
    both_zero = (denominator == 0) & (numerator == 0)
    both_infinite = np.isinf(denominator) & np.isinf(numerator)
    return np.select(
        [
            np.isnan(numerator),
            np.isnan(denominator),
            both_zero | both_infinite,
            (denominator == 0) | np.isinf(numerator),
            np.isinf(denominator) | (numerator == 0),
            exponent(numerator) - exponent(denominator) < -150,
            exponent(denominator) == 255,
        ],
        [quiet(numerator), quiet(denominator), nan, infinity, zero, zero, infinity],
        np.copysign(np.abs(quotient), sign),
    ).astype(np.float32)
