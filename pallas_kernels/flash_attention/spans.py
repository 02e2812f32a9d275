"""Ranges of key blocks that each block of queries must visit; all other blocks are skipped.

"Causal masking" in section 3.1.1 of FlashAttention-2 (arXiv 2307.08691), extended to windows and documents.

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
    """Returns the range of key blocks for each block of queries, and of query blocks for each block of keys.

    Blocks `[first, end)` contain all keys that the queries attend to. Blocks `[whole, edge)` among them
    contain no others and need no mask.

    Args:
      num_queries: number of queries, T.
      num_keys: number of keys, S.
      block_queries: queries of a block.
      block_keys: keys of a block.
      limits: index of the first query among the keys, and the window in keys.
      query_segments_BT: document number of each query; None for one document.
      key_segments_BS: document number of each key; None for one document.

    Returns:
      first, whole, edge and end for each block of queries, [B, I, 4], and for each block of keys, [B, J, 4];
      B is 1 without segments.
    """
    query_low_I, query_high_I = _extent(num_queries, block_queries)
    key_low_J, key_high_J = _extent(num_keys, block_keys)
    low_I1, high_I1 = (limits[0] + x[:, None] for x in (query_low_I, query_high_I))
    # The most favourable (query, key) pair decides whether any entry of two blocks is unmasked, the least
    # favourable one whether all are.
    some_IJ = (key_low_J <= high_I1) & (low_I1 - key_high_J < limits[1])
    every_IJ = (key_high_J <= low_I1) & (high_I1 - key_low_J < limits[1])
    # A block beyond the last key contains rows that do not exist, and must be masked.
    every_IJ = every_IJ & ((jnp.arange(key_low_J.shape[0]) + 1) * block_keys <= num_keys)
    some_BIJ, every_BIJ = some_IJ[None], every_IJ[None]
    if query_segments_BT is not None and key_segments_BS is not None:
        low_BI, high_BI = _segments_of_blocks(query_segments_BT, block_queries)
        low_BJ, high_BJ = _segments_of_blocks(key_segments_BS, block_keys)
        low_BI1, high_BI1, low_B1J, high_B1J = (
            low_BI[:, :, None], high_BI[:, :, None], low_BJ[:, None], high_BJ[:, None],
        )  # fmt: skip
        # Minimum and maximum are enough: if document numbers do not ascend, a block too many may be visited.
        # Its mask is exact, so that no key is missed or counted wrongly.
        some_BIJ = some_BIJ & (low_BI1 <= high_B1J) & (low_B1J <= high_BI1)
        every_BIJ = every_BIJ & (low_BI1 == high_B1J) & (low_B1J == high_BI1)
    return _spans(some_BIJ, every_BIJ), _spans(some_BIJ.mT, every_BIJ.mT)


def _extent(size: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first and the last index of each block."""
    low = jnp.arange(0, size, block, dtype=jnp.int32)
    return low, jnp.minimum(low + block, size) - 1


def _segments_of_blocks(segments_BT: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the smallest and the largest document number of each block."""
    padding = ((0, 0), (0, -segments_BT.shape[1] % block))
    # Padding repeats the last document: another number would keep the last block from being whole.
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
    # The first contiguous run of whole blocks. If document numbers do not ascend there may be a second run,
    # which is masked needlessly, but correctly.
    whole_BI = jnp.minimum(first_where(every_BIJ), end_BI)
    edge_BI = jnp.minimum(first_where(~every_BIJ & (index_J >= whole_BI[:, :, None])), end_BI)
    return jnp.stack([first_BI, whole_BI, edge_BI, end_BI], axis=2)
