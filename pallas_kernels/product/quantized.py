"""A matrix whose weights are stored as values of few bits and scales, and are computed where they are used.

Letters: A products in a batch, D inputs, F outputs, G groups of inputs that share a scale.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.fusion import entry_in_loop
from pallas_kernels.product.stack import StackedMatrix, own_matrix

_E8M0_BIAS = 127
_MAX_INT8 = 127.0
_MX_BLOCK = 32
"""Inputs that share a scale in MXFP4."""


class QuantizedMatrix(NamedTuple):
    """Matrices [*A, D, F] as values times scales.

    The type of the values tells the format: int8; float8_e4m3fn; or uint8, which has two E2M1 numbers per
      byte, that
    of the even input in the low bits. Scales are float32, or E8M0 bits as uint8.
    """

    values: jax.Array | StackedMatrix
    """Values, [*A, D, F], or [*A, D / 2, F] for pairs."""
    scales: jax.Array | StackedMatrix
    """Scales, [*A, G, F], each of D / G inputs of an output."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [*A, D, F] of the matrices after dequantization."""
        *batch, inputs, outputs = self.values.shape
        return (*batch, inputs * (2 if self.values.dtype == jnp.uint8 else 1), outputs)

    def index(self, number: jax.Array) -> "QuantizedMatrix":
        """The matrix of a stack [M, D, F]."""
        values, scales = (entry_in_loop(own_matrix(x), number) for x in self)
        return QuantizedMatrix(values, scales)


AnyMatrix = jax.Array | StackedMatrix | QuantizedMatrix
"""Type of weights that may be quantized."""


def flat_stack(matrix: QuantizedMatrix) -> tuple[QuantizedMatrix, jax.Array]:
    """Returns matrices [M, D, F] of all layers as one stack, and the index of the first one of this layer."""
    if not isinstance(matrix.values, StackedMatrix):
        return matrix, jnp.int32(0)
    stacks = (x.stack.reshape(-1, *x.stack.shape[-2:]) for x in matrix if isinstance(x, StackedMatrix))
    first = (matrix.values.number * matrix.shape[0]).astype(jnp.int32)
    return QuantizedMatrix(*stacks), first


def dequantize(matrix: QuantizedMatrix, dtype: DTypeLike) -> jax.Array:
    """Computes the weights [*A, D, F]: values times scales in float32, rounded once to `dtype`."""
    values, scales = own_matrix(matrix.values), own_matrix(matrix.scales)
    if values.dtype == jnp.uint8:
        values = _unpack(values)
    values = values.astype(jnp.float32)
    *batch, inputs, outputs = values.shape
    groups = scales.shape[-2]
    # One axis for groups and one for their inputs, so that scales broadcast instead of being repeated.
    grouped = values.reshape(*batch, groups, inputs // groups, outputs)
    weights = grouped * _as_float32(scales)[..., None, :]
    return weights.reshape(*batch, inputs, outputs).astype(dtype)


def quantize(weights: jax.Array, values_dtype: DTypeLike) -> QuantizedMatrix:
    """Quantizes matrices [*A, D, F] as `zaya_jax.convert.quantized.codecs` does, on the device.

    Args:
      weights: matrices in floating point.
      values_dtype: int8, with a scale per output; or uint8, which selects MXFP4, with one per 32 inputs.
    """
    weights = weights.astype(jnp.float32)
    if jnp.dtype(values_dtype) == jnp.int8:
        max_F = jnp.abs(weights).max(axis=-2, keepdims=True)
        # Not a constant, because XLA would multiply by its rounded reciprocal.
        scales = max_F / jnp.where(max_F >= 0, _MAX_INT8, jnp.nan)
        # An output of zeros, or of numbers so small that their scale is not a normal number, has scale 1.
        scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)
        values = jnp.clip(jnp.rint(weights / scales), -_MAX_INT8, _MAX_INT8)
        return QuantizedMatrix(values.astype(jnp.int8), scales)
    *batch, inputs, outputs = weights.shape
    blocks = weights.reshape(*batch, inputs // _MX_BLOCK, _MX_BLOCK, outputs)
    exponents = _block_exponents(jnp.abs(blocks).max(axis=-2))
    # A power of two, by its bits: the product is exact.
    inverse = lax.bitcast_convert_type((_E8M0_BIAS - exponents) << 23, jnp.float32)
    codes = _e2m1_codes(blocks * inverse[..., None, :]).reshape(*batch, inputs // 2, 2, outputs)
    pairs = codes[..., 0, :] | (codes[..., 1, :] << 4)
    return QuantizedMatrix(pairs, (exponents + _E8M0_BIAS).astype(jnp.uint8))


def _block_exponents(largest: jax.Array) -> jax.Array:
    """Exponents of the scales of blocks, which map the largest weight into [3.5, 7)."""
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    # The two highest bits of the mantissa are set from 1.75 on.
    floor = (bits >> 23) - _E8M0_BIAS + ((bits >> 21) & 3 == 3)
    return jnp.where(largest > 0, jnp.clip(floor - 2, -126, 127), 0)


def _e2m1_codes(x: jax.Array) -> jax.Array:
    """E2M1 bits of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6; ties go to an even mantissa."""
    size = jnp.abs(x)
    # The midpoints between neighbors: of every second one, the upper neighbor is even.
    steps = (size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0)
    code = sum(step.astype(jnp.uint8) for step in steps)
    return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def _unpack(pairs: jax.Array) -> jax.Array:
    """E2M1 numbers times 2, int8 [*A, D, F], from pairs [*A, D / 2, F]."""
    # Shifts broadcast: on a CPU `jnp.stack` took four times as long as all other operations here.
    bits = (pairs[..., None, :] >> jnp.uint8([[0], [4]])) & 0xF
    magnitude = bits & 7
    # 0, 1, 2, 3, 4, 6, 8, 12: from 4 on, the leading one and one bit of mantissa are shifted by the exponent.
    shift = jnp.maximum(magnitude >> 1, 1) - 1
    doubled = jnp.where(magnitude < 4, magnitude, (2 | (magnitude & 1)) << shift).astype(jnp.int8)
    signed = jnp.where(bits >= 8, -doubled, doubled)
    *batch, half, _, outputs = signed.shape
    return signed.reshape(*batch, 2 * half, outputs)


def _as_float32(scales: jax.Array) -> Any:
    if scales.dtype != jnp.uint8:
        return scales
    # E8M0 has the exponent of float32; one less, because the values are doubled. Below the normal numbers the
    # weights are zero.
    exponent = jnp.maximum(scales.astype(jnp.uint32), 1) - 1
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)
