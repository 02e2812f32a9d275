"""Context-parallel attention: over gathered keys, around a ring, or within a window.

Letters: B sequences of this device, R = 2*B rows, S tokens of a chunk, T tokens of a sequence, N query heads,
K key/value heads, H head width.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention import flash_attention
from zaya_jax.config import HYBRID, HYBRID_SLIDING, ExecutionConfig, ModelConfig
from zaya_jax.model.attention.block import name_operands
from zaya_jax.model.attention.ring import ring_attention
from zaya_jax.model.attention.sequence_chunks import SharedSequences
from zaya_jax.parallel.context import (
    all_tokens,
    both_chunks,
    chunk_numbers,
    join_chunks,
    last_tokens_before,
    num_ranks,
    rank,
)


def context_parallel_attention(
    config: ModelConfig,
    execution: ExecutionConfig,
    q_RSNH: Float[Array, "R S N H"],
    k_RSKH: Float[Array, "R S K H"],
    v_RSKH: Float[Array, "R S K H"],
    is_sliding: Int[Array, ""],
    shared: SharedSequences,
) -> Float[Array, "R S N H"]:
    """Causal softmax attention of chunks to their sequences, within the window and the document.

    Args:
      config: architecture.
      execution: how keys are exchanged, and how attention is computed.
      q_RSNH: rotated queries of the chunks.
      k_RSKH: rotated keys of the chunks.
      v_RSKH: values of the chunks.
      is_sliding: whether the layer has a window; the same on all devices.
      shared: sequences that the chunks are parts of.
    """
    implementation = execution.implementation_of("attention")
    form = ring_attention if execution.context_attention == "ring" else _attend_gathered
    # Named before the exchange: keeping gathered operands would cost memory for whole sequences per device.
    operands = name_operands(q_RSNH, k_RSKH, v_RSKH)
    attend_all = functools.partial(form, shared, implementation, None)
    if HYBRID_SLIDING not in config.layer_types or config.sliding_window is None:
        return attend_all(*operands)
    window = config.sliding_window
    # Compares what each device would receive: the windows of both chunks, or all other chunks.
    is_near = window - 1 < (num_ranks() - 1) * q_RSNH.shape[1]
    within = _attend_near if is_near else form
    attend_within = functools.partial(within, shared, implementation, window)
    if HYBRID not in config.layer_types:
        return attend_within(*operands)
    # All devices are in the same layer and take the same branch, so its collectives cannot deadlock.
    return lax.cond(is_sliding != 0, attend_within, attend_all, *operands)


def _attend_gathered(
    shared: SharedSequences,
    implementation: str | None,
    window: int | None,
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
) -> jax.Array:
    """Gathers all keys and values of the sequences, one layer at a time."""
    size = q_RSNH.shape[1]
    # Joined, so that one all-gather is enough.
    k_BTKH, v_BTKH = jnp.split(all_tokens(jnp.concatenate([k_RSKH, v_RSKH], axis=2)), 2, axis=2)
    # Early chunks are in the first half of the sequence, and cannot attend to the second.
    num_keys = k_BTKH.shape[1] // 2, k_BTKH.shape[1]
    chunks = zip(
        both_chunks(q_RSNH), both_chunks(shared.segments_RS), chunk_numbers(rank()), num_keys, strict=True
    )
    results = (
        flash_attention(
            q_BSNH,
            k_BTKH[:, :keys],
            v_BTKH[:, :keys],
            window=window,
            query_start=number * size,
            query_segments_BT=segments_BS,
            key_segments_BS=shared.segments_BT[:, :keys],
            implementation=implementation,
        )[0]
        for q_BSNH, segments_BS, number, keys in chunks
    )
    return join_chunks(*results)


def _attend_near(
    shared: SharedSequences,
    implementation: str | None,
    window: int,
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
) -> jax.Array:
    """Exchanges only the keys and values within the window of each chunk."""
    # The last hop only transfers the rest of the window, not a whole chunk.
    keys_RSKH = jnp.concatenate([k_RSKH, v_RSKH], axis=2)
    before = last_tokens_before(keys_RSKH, window - 1)
    k_RUKH, v_RUKH = jnp.split(jnp.concatenate([before, keys_RSKH], axis=1), 2, axis=2)
    out_RSNH, _ = flash_attention(
        q_RSNH,
        k_RUKH,
        v_RUKH,
        window=window,
        query_start=window - 1,
        query_segments_BT=shared.segments_RS,
        key_segments_BS=shared.segments_from(window - 1),
        implementation=implementation,
    )
    return out_RSNH
