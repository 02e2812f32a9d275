"""Rows of the embedding. There is no kernel of ours: XLA's gather is bound by the memory that it reads.

Letters: B batch, T time, V vocabulary, D width.
"""

import jax

from pallas_kernels.embedding.xla import look_up_xla


def look_up(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Each token's row of a table, in float32 [B, T, D].

    Args:
      table_VD: the embedding.
      tokens_BT: int32, 0..V-1.

    Its gradient adds up in float32, whatever the table's type, and is rounded to that once.
    """
    return look_up_xla(table_VD, tokens_BT)
