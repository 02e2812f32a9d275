"""Which blocks of keys a block of queries must visit: the rest of the work is never begun.

"Causal masking" in section 3.1.1 of FlashAttention-2 (arXiv 2307.08691), with windows and documents too.

Letters: B batch, T queries, S keys, I blocks of queries, J blocks of keys.
"""

import jax
import jax.numpy as jnp


def block_spans(
    num_queries: int,
    num_keys: int,
    block_queries: int,
    block_keys: int,
    limits: jax.Array,
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """For each block of queries, where its blocks of keys begin and end; and the other way round.

    Blocks `[first, end)` hold all keys that the queries may see. Of them `[whole, edge)` hold no
    others, so that they need no mask.

    Args:
      num_queries: T.
      num_keys: S.
      block_queries: queries a block.
      block_keys: keys a block.
      limits: the first query's place among the keys, and the window.
      query_segments_BT: documents of the queries.
      key_segments_BS: documents of the keys.

    Returns:
      [B, I, 4] and [B, J, 4]: first, whole, edge and end; B is 1 without segments.
    """
    query_low_I, query_high_I = _extent(num_queries, block_queries)
    key_low_J, key_high_J = _extent(num_keys, block_keys)
    low_I1, high_I1 = (limits[0] + x[:, None] for x in (query_low_I, query_high_I))
    # The best placed pair of two blocks tells whether any pair counts, the worst placed whether all do.
    some_IJ = (key_low_J <= high_I1) & (low_I1 - key_high_J < limits[1])
    every_IJ = (key_high_J <= low_I1) & (high_I1 - key_low_J < limits[1])
    # A block that passes the last key holds rows that are not there.
    every_IJ = every_IJ & ((jnp.arange(key_low_J.shape[0]) + 1) * block_keys <= num_keys)
    some_BIJ, every_BIJ = some_IJ[None], every_IJ[None]
    if query_segments_BT is not None and key_segments_BS is not None:
        low_BI, high_BI = _segments_of_blocks(query_segments_BT, block_queries)
        low_BJ, high_BJ = _segments_of_blocks(key_segments_BS, block_keys)
        low_BI1, high_BI1, low_B1J, high_B1J = (
            low_BI[:, :, None], high_BI[:, :, None], low_BJ[:, None], high_BJ[:, None],
        )  # fmt: skip
        # Least and greatest alone: of documents that do not ascend, a block too many may be visited. Its
        # mask is exact, so that none can be missed or counted wrongly.
        some_BIJ = some_BIJ & (low_BI1 <= high_B1J) & (low_B1J <= high_BI1)
        every_BIJ = every_BIJ & (low_BI1 == high_B1J) & (low_B1J == high_BI1)
    return _spans(some_BIJ, every_BIJ), _spans(some_BIJ.mT, every_BIJ.mT)


def _extent(size: int, block: int) -> tuple[jax.Array, jax.Array]:
    """First and last index of each block."""
    low = jnp.arange(0, size, block, dtype=jnp.int32)
    return low, jnp.minimum(low + block, size) - 1


def _segments_of_blocks(segments_BT: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest segment of each block."""
    padding = ((0, 0), (0, -segments_BT.shape[1] % block))
    # The last document goes on: another number would keep the last block of queries from being whole.
    padded_BT = jnp.pad(segments_BT, padding, mode="edge")
    blocks_BIT = padded_BT.reshape(padded_BT.shape[0], -1, block)
    return blocks_BIT.min(axis=2), blocks_BIT.max(axis=2)


def _spans(some_BIJ: jax.Array, every_BIJ: jax.Array) -> jax.Array:
    index_J = jnp.arange(some_BIJ.shape[2], dtype=jnp.int32)
    num = some_BIJ.shape[2]

    def first_where(mask_BIJ: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(mask_BIJ, index_J, num), axis=2)

    end_BI = jnp.max(jnp.where(some_BIJ, index_J + 1, 0), axis=2)
    first_BI = jnp.minimum(first_where(some_BIJ), end_BI)
    # The first unbroken run of whole blocks. Documents that do not ascend may leave a second one: that
    # is masked for nothing, but right.
    whole_BI = jnp.minimum(first_where(every_BIJ), end_BI)
    edge_BI = jnp.minimum(first_where(~every_BIJ & (index_J >= whole_BI[:, :, None])), end_BI)
    return jnp.stack([first_BI, whole_BI, edge_BI, end_BI], axis=2)
