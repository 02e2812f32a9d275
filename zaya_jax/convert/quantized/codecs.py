"""Codecs of quantized matrices in NumPy: FP8, INT8 and MXFP4.

A matrix is stored as values of few bits and scales; its weights are their products, computed in float32.
Matrices have the axes of PyTorch, outputs R by inputs C, because all formats group along the inputs:

- "fp8": float8 E4M3 ([OCP-FP8]), bias 7, no infinities, 0x7F and 0xFF are NaN.
- "int8": two's complement.
- "mxfp4": two E2M1 values per byte, the one with the even column in the low bits, and one E8M0 scale, a power
  of two, for 32 columns ([MX]).

Letters: R outputs, C inputs, G groups of inputs that share a scale.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int8, UInt8

FormatName = Literal["fp8", "int8", "mxfp4"]
MX_BLOCK = 32
"""Inputs that share a scale in MX formats."""
MAX_E4M3 = 448.0
MAX_E2M1 = 6.0
MAX_INT8 = 127.0
E8M0_BIAS = 127
E8M0_NAN = 255
"""The only E8M0 scale that is not a power of two."""

Values = UInt8[np.ndarray, "R *C"] | Int8[np.ndarray, "R C"]
Scales = Float32[np.ndarray, "R *G"] | UInt8[np.ndarray, "R *G"]


@dataclasses.dataclass(frozen=True)
class QuantizedValues:
    """A matrix as values and scales.

    Attributes:
      values: shape [R, C]: E4M3 bits as uint8, or int8; or E2M1 pairs as uint8, [R, C / 2].
      scales: shape [R, G]: float32, or E8M0 bits as uint8.
    """

    values: np.ndarray
    scales: np.ndarray


@dataclasses.dataclass(frozen=True)
class Codec:
    """A quantized format.

    Attributes:
      name: name of the format.
      values_dtype: name of the values' type in safetensors.
      scales_dtype: name of the type in which an export stores scales.
      values_per_byte: number of values in a byte.
      group_size: inputs that share a scale in an export; None for all inputs of an output.
      bits: bits of a value.
      encode: function from float32 [R, C] to `QuantizedValues`, one scale per output or block.
      unpack: function from stored values to float32 [R, C], before scaling.
      scale: function from stored scales to float32.
    """

    name: FormatName
    values_dtype: str
    scales_dtype: str
    values_per_byte: int
    group_size: int | None
    bits: int
    encode: Callable[[np.ndarray], QuantizedValues]
    unpack: Callable[[np.ndarray], np.ndarray]
    scale: Callable[[np.ndarray], np.ndarray]

    def decode(self, quantized: QuantizedValues) -> Float32[np.ndarray, "R C"]:
        """Computes the weights: each value times the scale of its group, rounded once to float32."""
        values_RC, scales_RG = self.unpack(quantized.values), self.scale(quantized.scales)
        return values_RC * repeat_scales(scales_RG, values_RC.shape[1])

    def num_groups(self, num_columns: int) -> int:
        """Number of scales per output in an export."""
        return 1 if self.group_size is None else num_columns // self.group_size


def repeat_scales(scales_RG: np.ndarray, num_columns: int) -> np.ndarray:
    """Scales that broadcast with [R, C], from those of G groups of equal size."""
    if scales_RG.shape[1] == 1:
        return scales_RG
    # Readers of blocks make groups equal before, by the largest common size.
    assert num_columns % scales_RG.shape[1] == 0, "groups have equal sizes"
    return np.repeat(scales_RG, num_columns // scales_RG.shape[1], axis=1)


def _row_scales(matrix_RC: np.ndarray, largest: float) -> np.ndarray:
    """One scale per output, with which its largest weight becomes the largest value of the format."""
    max_R1 = np.abs(matrix_RC).max(axis=1, keepdims=True)
    scales_R1 = (max_R1 / np.float32(largest)).astype(np.float32)
    # An output of zeros, or of numbers so small that their scale is not a normal number, has scale 1.
    return np.where(scales_R1 < np.finfo(np.float32).tiny, np.float32(1), scales_R1)


def _encode_fp8(matrix_RC: np.ndarray) -> QuantizedValues:
    scales_R1 = _row_scales(matrix_RC, MAX_E4M3)
    # The quotient may exceed 448 by a rounding error, and E4M3 has no infinity: it would become NaN.
    scaled_RC = np.clip(matrix_RC / scales_R1, -MAX_E4M3, MAX_E4M3)
    return QuantizedValues(scaled_RC.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales_R1)


def _encode_int8(matrix_RC: np.ndarray) -> QuantizedValues:
    scales_R1 = _row_scales(matrix_RC, MAX_INT8)
    # -128 is not used, so that the range is symmetric.
    scaled_RC = np.clip(np.rint(matrix_RC / scales_R1), -MAX_INT8, MAX_INT8)
    return QuantizedValues(scaled_RC.astype(np.int8), scales_R1)


def _encode_mxfp4(matrix_RC: np.ndarray) -> QuantizedValues:
    # Blocks are along the inputs, so that a product can apply a scale to 32 terms of its sum.
    blocks_RGB = matrix_RC.reshape(len(matrix_RC), -1, MX_BLOCK)
    exponents_RG = block_exponents(np.abs(blocks_RGB).max(axis=2))
    # A division by a power of two is exact.
    scaled_RGB = np.ldexp(blocks_RGB, -exponents_RG[:, :, None])
    clipped_RC = np.clip(scaled_RGB, -MAX_E2M1, MAX_E2M1).reshape(matrix_RC.shape)
    # Rounds to the nearest, ties to even, in the low four bits of a byte.
    bits_RC = clipped_RC.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    # The order of [Compressed-tensors]: an even column is in the low bits.
    packed = bits_RC[:, ::2] | (bits_RC[:, 1::2] << 4)
    return QuantizedValues(packed, (exponents_RG + E8M0_BIAS).astype(np.uint8))


def block_exponents(max_RG: np.ndarray) -> np.ndarray:
    """Exponents of the scales of blocks, from their largest absolute weights, int32.

    The rule of [Compressed-tensors] and of vLLM's reference: a scale maps the largest weight into [3.5, 7),
    where 7 becomes 6. [MX] would map it into [4, 8), and clip more.
    """
    mantissa_RG, exponent_RG = np.frexp(max_RG)  # mantissas in [0.5, 1), so twice that in [1, 2)
    floor_RG = exponent_RG - 1 + (mantissa_RG >= 0.875)
    # Blocks of zeros have exponent 0, and so a scale of 1.
    return np.where(max_RG > 0, np.clip(floor_RG - 2, -126, 127), 0).astype(np.int32)


def _e4m3_table() -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _e2m1_table() -> np.ndarray:
    # Two bits of exponent and one of mantissa; 0.5 is the only subnormal number.
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([magnitudes, -magnitudes])


_E4M3, _E2M1 = _e4m3_table(), _e2m1_table()


def _unpack_fp8(values: np.ndarray) -> np.ndarray:
    # A table of 256 numbers, several times as fast as a conversion.
    return _E4M3[values]


def _unpack_int8(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def _unpack_mxfp4(values: np.ndarray) -> np.ndarray:
    # Written into one array: a stack of both halves would be copied once more.
    out = np.empty((len(values), 2 * values.shape[1]), np.float32)
    out[:, ::2], out[:, 1::2] = _E2M1[values & 0xF], _E2M1[values >> 4]
    return out


def _as_float32(scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float32)


def powers_of_two(scales: np.ndarray) -> np.ndarray:
    """Float32 values of E8M0 bits; NaN for 255."""
    # 2^128 would overflow, and its bits are those of NaN.
    exponents = np.minimum(scales, E8M0_NAN - 1).astype(np.int32) - E8M0_BIAS
    powers = np.ldexp(np.float32(1), exponents)
    return np.where(scales == E8M0_NAN, np.float32(np.nan), powers)


CODECS: dict[str, Codec] = {
    "fp8": Codec("fp8", "F8_E4M3", "F32", 1, None, 8, _encode_fp8, _unpack_fp8, _as_float32),
    "int8": Codec("int8", "I8", "F32", 1, None, 8, _encode_int8, _unpack_int8, _as_float32),
    "mxfp4": Codec("mxfp4", "U8", "U8", 2, MX_BLOCK, 4, _encode_mxfp4, _unpack_mxfp4, powers_of_two),
}
"""Formats by name."""
