"""An embedding table of 8-bit values with one scale per token: lookup, and the product of the tied head.

Letters are those of the package; K parts of the vocabulary, R rows of a part.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.embedding.xla import product_with_rows_xla
from pallas_kernels.fusion import entry_in_loop, rows_in_loop

PART_BYTES = 2**26
"""Largest part of the table that is dense at a time, in bytes of the compute dtype."""


class QuantizedTable(NamedTuple):
    """An embedding table as values times scales."""

    values_VD: jax.Array
    """Values: int8, or float8_e4m3fn."""
    scales_V1: jax.Array
    """Scale of each token, float32."""

    def rows(self, tokens: jax.Array) -> jax.Array:
        """Returns the dequantized rows of tokens [...], float32 [..., D]."""
        return rows_in_loop(self.values_VD, tokens).astype(jnp.float32) * self.scales_V1[tokens]


def product_with_quantized_rows(x_BTD: jax.Array, table: QuantizedTable) -> jax.Array:
    """Computes the product with all rows, float32 [B, T, V].

    The table is dequantized part by part to the dtype of `x_BTD`, so that it never exists as a whole.
    """
    num_rows, width = table.values_VD.shape
    parts = _num_parts(num_rows, width * x_BTD.dtype.itemsize)

    values_KRD = table.values_VD.reshape(parts, -1, width)
    scales_KR1 = table.scales_V1.reshape(parts, -1, 1)

    def multiply(part: jax.Array) -> jax.Array:
        rows_RD = entry_in_loop(values_KRD, part).astype(jnp.float32) * scales_KR1[part]
        return product_with_rows_xla(x_BTD, rows_RD.astype(x_BTD.dtype))

    out_KBTV = lax.map(multiply, jnp.arange(parts))
    return jnp.moveaxis(out_KBTV, 0, -2).reshape(*x_BTD.shape[:-1], num_rows)


def _num_parts(num_rows: int, row_bytes: int) -> int:
    """Smallest number of equal parts of at most `PART_BYTES`; a part is a row if nothing else divides."""
    needed = max(1, -(-num_rows * row_bytes // PART_BYTES))
    return next(parts for parts in range(needed, num_rows + 1) if num_rows % parts == 0)
