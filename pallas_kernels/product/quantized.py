"""A matrix whose weights are stored as values of few bits and scales, and are computed where they are used.

Letters: A products in a batch, D inputs, F outputs, G groups of inputs that share a scale.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.product.stack import StackedMatrix, own_matrix

_E8M0_BIAS = 127


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
        """Shape of the matrices."""
        *batch, inputs, outputs = self.values.shape
        return (*batch, inputs * (2 if self.values.dtype == jnp.uint8 else 1), outputs)

    def index(self, number: jax.Array) -> "QuantizedMatrix":
        """The matrix of a stack [M, D, F]."""
        values, scales = (lax.dynamic_index_in_dim(own_matrix(x), number, keepdims=False) for x in self)
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


def _unpack(pairs: jax.Array) -> jax.Array:
    """E2M1 numbers times 2, int8 [*A, D, F], from pairs [*A, D / 2, F]."""
    bits = jnp.stack([pairs & 0xF, pairs >> 4], axis=-2)
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
