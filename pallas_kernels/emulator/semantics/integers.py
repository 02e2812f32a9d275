"""Integer and bit operations of the vector and scalar units, on arrays of uint32 unless said otherwise.

Source: CDNA3 instruction set architecture, chapters "Scalar ALU operations" and "Vector ALU operations".
"""

import numpy as np


def low32(x: np.ndarray) -> np.ndarray:
    """The lowest 32 bits of 64-bit numbers."""
    return (x & np.array(0xFFFFFFFF).astype(x.dtype)).astype(np.uint32)


def product64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The whole product of two unsigned numbers, uint64."""
    return a.astype(np.uint64) * b.astype(np.uint64)


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 32 bits of the product of two unsigned numbers."""
    return (product64(a, b) >> np.uint64(32)).astype(np.uint32)


def high_product_signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 32 bits of the product of two signed numbers, int32."""
    return (a.astype(np.int64) * b.astype(np.int64) >> np.int64(32)).astype(np.int32)


def unsigned24(x: np.ndarray) -> np.ndarray:
    """The lowest 24 bits as an unsigned number, uint64."""
    return (x & np.uint32(0xFFFFFF)).astype(np.uint64)


def signed24(x: np.ndarray) -> np.ndarray:
    """The lowest 24 bits as a signed number, int64."""
    return (x.view(np.int32) << np.int32(8) >> np.int32(8)).astype(np.int64)


def product24(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The lowest 32 bits of the product of two unsigned numbers of 24 bits."""
    return low32(unsigned24(a) * unsigned24(b))


def signed_product24(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The lowest 32 bits of the product of two signed numbers of 24 bits."""
    return low32(np.asarray(signed24(a) * signed24(b)).view(np.uint64))


def reverse_bits(x: np.ndarray) -> np.ndarray:
    """The bits in the opposite order."""
    result = np.zeros_like(x)
    for bit in range(32):
        result |= (x >> np.uint32(bit) & np.uint32(1)) << np.uint32(31 - bit)
    return result


def leading_zeros(x: np.ndarray) -> np.ndarray:
    """Number of zeros above the highest one; of 0 it is -1."""
    # The exponent of a float64 number is the place of its highest bit, because 32 bits are exact there.
    _, place = np.frexp(x.astype(np.float64))
    return np.where(x == 0, np.int32(-1), np.int32(32) - place).astype(np.int32).view(np.uint32)


def saturate(x: np.ndarray) -> np.ndarray:
    """The nearest number of 32 bits to one of 64 bits, both signed."""
    return np.clip(x, -(2**31), 2**31 - 1).astype(np.int32)


def bit_field(x: np.ndarray, start: np.ndarray, width: np.ndarray) -> np.ndarray:
    """`width` bits from `start` on; of both the lowest five bits count."""
    start, width = start & np.uint32(31), width & np.uint32(31)
    return x >> start & (np.uint32(1) << width) - np.uint32(1)


def signed_bit_field(x: np.ndarray, start: np.ndarray, width: np.ndarray) -> np.ndarray:
    """As `bit_field`, extended with the field's highest bit; beyond bit 31 the number's sign continues."""
    start, width = start & np.uint32(31), width & np.uint32(31)
    shifted = (x.view(np.int32) >> start.astype(np.int32)).view(np.uint32)
    field = shifted & (np.uint32(1) << width) - np.uint32(1)
    sign = np.where(width == 0, np.uint32(0), np.uint32(1) << np.maximum(width, 1) - np.uint32(1))
    return (field ^ sign) - sign


def permute_bytes(high: np.ndarray, low: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """V_PERM_B32: each byte of the selector chooses a byte of the 64 bits, a sign, 0x00 or 0xFF."""
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    result = np.zeros(np.broadcast(high, low, selector).shape, np.uint32)
    for byte in range(4):
        choice = selector >> np.uint32(8 * byte) & np.uint32(0xFF)
        plain = both >> (np.minimum(choice, 7).astype(np.uint64) * np.uint64(8)) & np.uint64(0xFF)
        # Choices 8 to 11 repeat the signs of the four halves.
        half = np.clip(choice, 8, 11).astype(np.uint64) - np.uint64(8)
        sign = (both >> (half * np.uint64(16) + np.uint64(15)) & np.uint64(1)) * np.uint64(0xFF)
        last = np.where(choice == 12, np.uint64(0), np.uint64(0xFF))
        value = np.where(choice < 8, plain, np.where(choice < 12, sign, last))
        result |= value.astype(np.uint32) << np.uint32(8 * byte)
    return result


def align_bits(high: np.ndarray, low: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """32 bits of the 64 bits of two numbers, from bit `shift` on."""
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    return low32(both >> (shift & np.uint32(31)).astype(np.uint64))


def median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The number in the middle."""
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def count_bits(x: np.ndarray) -> np.ndarray:
    """Number of bits that are 1."""
    return np.bitwise_count(x).astype(np.uint32)
