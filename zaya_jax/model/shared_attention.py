"""Attention of sequences that several devices share: to all keys, gathered or around a ring, or to near ones.

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
from zaya_jax.model.attention import name_operands
from zaya_jax.model.ring_attention import attend_around
from zaya_jax.model.shared_sequences import SharedSequences
from zaya_jax.parallel.context import (
    all_tokens,
    both_chunks,
    chunk_numbers,
    join_chunks,
    last_tokens_before,
    num_ranks,
    rank,
)


def attend_across(
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
      config: of the network.
      execution: how keys come together, and by which implementation queries meet them.
      q_RSNH: rotated queries of the chunks.
      k_RSKH: rotated keys of the chunks.
      v_RSKH: values of the chunks.
      is_sliding: whether the layer has a window; the same on all devices.
      shared: where the chunks stand.
    """
    implementation = execution.implementation_of("attention")
    form = attend_around if execution.context_attention == "ring" else _attend_gathered
    # Before they go to other devices: kept, those of a whole sequence would grow with it on each of them.
    operands = name_operands(q_RSNH, k_RSKH, v_RSKH)
    attend_all = functools.partial(form, shared, implementation, None)
    if HYBRID_SLIDING not in config.layer_types or config.sliding_window is None:
        return attend_all(*operands)
    window = config.sliding_window
    # What each device is sent: both chunks' windows, or the other devices' chunks.
    is_near = window - 1 < (num_ranks() - 1) * q_RSNH.shape[1]
    within = _attend_near if is_near else form
    attend_within = functools.partial(within, shared, implementation, window)
    if HYBRID not in config.layer_types:
        return attend_within(*operands)
    # All devices are in the same layer, and so take the same branch: none waits in a collective alone.
    return lax.cond(is_sliding != 0, attend_within, attend_all, *operands)


def _attend_gathered(
    shared: SharedSequences,
    implementation: str | None,
    window: int | None,
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
) -> jax.Array:
    """Each device has all keys and values of its sequences, a layer at a time."""
    size = q_RSNH.shape[1]
    # Side by side, so that one gather brings both.
    k_BTKH, v_BTKH = jnp.split(all_tokens(jnp.concatenate([k_RSKH, v_RSKH], axis=2)), 2, axis=2)
    # No early chunk is behind the middle: what it cannot see is not looked at.
    seen = k_BTKH.shape[1] // 2, k_BTKH.shape[1]
    chunks = zip(
        both_chunks(q_RSNH), both_chunks(shared.segments_RS), chunk_numbers(rank()), seen, strict=True
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
    """Each chunk gets the keys and values that its window reaches, and no others."""
    # The last hop takes no more than what is left of the window: a wider message would be the next chunk's.
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
