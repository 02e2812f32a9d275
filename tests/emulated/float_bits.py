"""Exact arithmetic on the bits of binary floating-point numbers, with Python's integers and fractions only.

It serves as an independent reference, so it uses neither numpy nor anything of the emulator. All results are
rounded once, to nearest even, with denormal numbers, as the kernels' FLOAT_MODE says.
"""

import math
import struct
from fractions import Fraction

FORMATS = {16: (5, 10), 32: (8, 23), 64: (11, 52)}
"""Bits of the exponent and of the mantissa, by the width of the format."""
CODES = {16: "He", 32: "If", 64: "Qd"}
"""Codes of the `struct` module for the integer and the number of the same bits."""


def infinity(width: int, negative: bool = False) -> int:
    """Bits of an infinite number."""
    exponent, mantissa = FORMATS[width]
    return ((1 << exponent) - 1) << mantissa | int(negative) << (width - 1)


def quiet_nan(width: int) -> int:
    """Bits of the default NaN."""
    return infinity(width) | 1 << (FORMATS[width][1] - 1)


def is_nan(bits: int, width: int) -> bool:
    return bits & ~(1 << (width - 1)) > infinity(width)


def is_signaling(bits: int, width: int) -> bool:
    return is_nan(bits, width) and not bits >> (FORMATS[width][1] - 1) & 1


def is_denormal(bits: int, width: int) -> bool:
    return 0 < bits & ~(1 << (width - 1)) < 1 << FORMATS[width][1]


def is_negative(bits: int, width: int) -> bool:
    return bool(bits >> (width - 1) & 1)


def biased_exponent(bits: int, width: int) -> int:
    exponent, mantissa = FORMATS[width]
    return bits >> mantissa & ((1 << exponent) - 1)


def to_float(bits: int, width: int) -> float:
    """The number as a Python float, which represents all formats exactly."""
    integer, floating = CODES[width]
    return struct.unpack("<" + floating, struct.pack("<" + integer, bits))[0]


def to_fraction(bits: int, width: int) -> Fraction:
    """The value of a finite number."""
    return Fraction(to_float(bits, width))


def rounded(value: Fraction, width: int, *, negative_zero: bool = False) -> int:
    """Rounds to the nearest number of a format, ties to even.

    Args:
      value: exact value.
      width: bits of the format.
      negative_zero: whether an exact zero has a negative sign.
    """
    exponent_bits, mantissa_bits = FORMATS[width]
    sign = (value < 0 or (value == 0 and negative_zero)) << (width - 1)
    magnitude = abs(value)
    if not magnitude:
        return sign
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = max(_floor_log2(magnitude), 1 - bias)
    # Steps of the mantissa's last bit; the carry of rounding up moves into the exponent by itself.
    steps = round(magnitude / Fraction(2) ** (exponent - mantissa_bits))
    bits = (exponent + bias - 1 << mantissa_bits) + steps
    return sign | min(bits, infinity(width))


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if value >= Fraction(2) ** guess else guess - 1


def from_float(value: float, width: int) -> int:
    """Rounds a Python float to a format. NaN becomes the default NaN."""
    if math.isnan(value):
        return quiet_nan(width)
    if math.isinf(value):
        return infinity(width, value < 0)
    return rounded(Fraction(value), width, negative_zero=math.copysign(1, value) < 0)


def converted(bits: int, width: int, new_width: int) -> int:
    """Converts between formats. A NaN keeps its sign, the top of its payload and whether it signals."""
    if not is_nan(bits, width):
        return from_float(to_float(bits, width), new_width)
    shift = FORMATS[new_width][1] - FORMATS[width][1]
    payload = bits & ((1 << FORMATS[width][1]) - 1)
    # A narrower NaN is made quiet, because the rest of its payload may be zero.
    payload = payload << shift if shift >= 0 else payload >> -shift | 1 << (FORMATS[new_width][1] - 1)
    return infinity(new_width, is_negative(bits, width)) | payload


def fma(a: int, b: int, c: int, width: int) -> int:
    """a * b + c, rounded once."""
    x, y, z = (to_float(bits, width) for bits in (a, b, c))
    if not all(map(math.isfinite, (x, y, z))):
        return from_float(_infinite_fma(x, y, z), width)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    product_is_negative = is_negative(a, width) != is_negative(b, width)
    both_negative = product_is_negative and is_negative(c, width)
    # A zero is negative only as the sum of two negative zeros, not as a difference of equal numbers.
    return rounded(exact, width, negative_zero=both_negative)


def _infinite_fma(x: float, y: float, z: float) -> float:
    # The product of finite numbers may overflow in Python's format, and must not then count as infinite.
    if math.isfinite(x) and math.isfinite(y):
        return z
    return x * y + z


def add(a: int, b: int, width: int) -> int:
    one = from_float(1.0, width)
    return fma(a, one, b, width)


def multiply(a: int, b: int, width: int) -> int:
    """The product, rounded once. Its zero has the sign of the product, which adding zero would lose."""
    negative = is_negative(a, width) != is_negative(b, width)
    return fma(a, b, int(negative) << (width - 1), width)


def divide(a: int, b: int, width: int) -> int:
    x, y = to_float(a, width), to_float(b, width)
    negative = is_negative(a, width) != is_negative(b, width)
    if math.isnan(x) or math.isnan(y) or (x == 0 and y == 0) or (math.isinf(x) and math.isinf(y)):
        return quiet_nan(width)
    if math.isinf(x) or y == 0:
        return infinity(width, negative)
    if math.isinf(y):
        return int(negative) << (width - 1)
    return rounded(Fraction(x) / Fraction(y), width, negative_zero=negative)


def scale(bits: int, power: int, width: int) -> int:
    """The number times a power of two, rounded once."""
    if not math.isfinite(to_float(bits, width)):
        return bits
    # Beyond this range every number is zero or infinite.
    power = max(-4096, min(power, 4096))
    return rounded(
        to_fraction(bits, width) * Fraction(2) ** power, width, negative_zero=is_negative(bits, width)
    )


def to_integer(bits: int, width: int, low: int, high: int) -> int:
    """Truncates to an integer within limits; NaN is 0."""
    value = to_float(bits, width)
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return high if value > 0 else low
    return max(low, min(math.trunc(value), high))


def nearest_integer(bits: int, width: int) -> int:
    """The nearest integer as a number of the same format, ties to even, with the same sign."""
    if not math.isfinite(to_float(bits, width)):
        return bits
    value = Fraction(round(to_fraction(bits, width)))
    return rounded(value, width, negative_zero=is_negative(bits, width))


def truncated(bits: int, width: int) -> int:
    """The integer part as a number of the same format, with the same sign."""
    if not math.isfinite(to_float(bits, width)):
        return bits
    value = Fraction(math.trunc(to_fraction(bits, width)))
    return rounded(value, width, negative_zero=is_negative(bits, width))


def ulps_apart(bits: int, value: float, width: int = 32) -> float:
    """Distance of a finite number from a value, in units of the last place of the value."""
    mantissa = FORMATS[width][1]
    least = 2 - (1 << (FORMATS[width][0] - 1))
    exponent = max(math.frexp(value)[1] - 1, least) if value else least
    return abs(to_float(bits, width) - value) / math.ldexp(1.0, exponent - mantissa)
