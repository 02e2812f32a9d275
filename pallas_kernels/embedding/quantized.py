"""An embedding table of 8-bit values with one scale per token: lookup, and the product of the tied head.

Letters are those of the package; K parts of the vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.embedding.xla import product_with_rows_xla

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
        return self.values_VD[tokens].astype(jnp.float32) * self.scales_V1[tokens]


def product_with_quantized_rows(x_BTD: jax.Array, table: QuantizedTable) -> jax.Array:
    """Computes the product with all rows, float32 [B, T, V].

    The table is dequantized part by part to the dtype of `x_BTD`, so that it never exists as a whole.
    """
    num_rows, width = table.values_VD.shape
    parts = _num_parts(num_rows, width * x_BTD.dtype.itemsize)

    def multiply(part: QuantizedTable) -> jax.Array:
        rows = part.values_VD.astype(jnp.float32) * part.scales_V1
        return product_with_rows_xla(x_BTD, rows.astype(x_BTD.dtype))

    out_KBTV = lax.map(multiply, jax.tree.map(lambda x: x.reshape(parts, -1, x.shape[-1]), table))
    return jnp.moveaxis(out_KBTV, 0, -2).reshape(*x_BTD.shape[:-1], num_rows)


def _num_parts(num_rows: int, row_bytes: int) -> int:
    """Smallest number of equal parts of at most `PART_BYTES`; a part is a row if nothing else divides."""
    needed = max(1, -(-num_rows * row_bytes // PART_BYTES))
    return next(parts for parts in range(needed, num_rows + 1) if num_rows % parts == 0)
