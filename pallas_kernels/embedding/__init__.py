"""Embedding lookup, and products with all rows of a table, as in a tied output head. There is no custom
kernel: XLA's gather is already bound by the memory that it reads.

Letters: B batch, T time, V vocabulary, D width.
"""

import jax

from pallas_kernels.embedding.quantized import QuantizedTable, product_with_quantized_rows
from pallas_kernels.embedding.xla import look_up_xla, product_with_rows_xla


def look_up(table_VD: jax.Array | QuantizedTable, tokens_BT: jax.Array) -> jax.Array:
    """Returns each token's row of a table, float32 [B, T, D].

    The gradient is accumulated in float32 for any dtype of the table, and rounded to that once. A quantized
    table has no gradient.

    Args:
      table_VD: embedding table.
      tokens_BT: tokens, int32, 0..V-1.
    """
    if isinstance(table_VD, QuantizedTable):
        return table_VD.rows(tokens_BT)
    return look_up_xla(table_VD, tokens_BT)


def product_with_rows(x_BTD: jax.Array, table_VD: jax.Array | QuantizedTable) -> jax.Array:
    """Returns the products of hidden states with all rows of a table, float32 [B, T, V].

    Args:
      x_BTD: final hidden states, float32 or bfloat16, to which the table is converted.
      table_VD: embedding table.
    """
    if isinstance(table_VD, QuantizedTable):
        return product_with_quantized_rows(x_BTD, table_VD)
    return product_with_rows_xla(x_BTD, table_VD.astype(x_BTD.dtype))
