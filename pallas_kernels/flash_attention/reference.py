"""Specification of `flash_attention` in plain jnp. For letters see the package."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.precision import einsum


def visible_keys(
    num_queries: int,
    num_keys: int,
    limits: jax.Array | tuple[Any, Any],
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> jax.Array:
    """Mask of the keys that each query attends to, [B or 1, T, S].

    Args:
      num_queries: number of queries, T.
      num_keys: number of keys, S.
      limits: index of the first query among the keys, and the window in keys.
      query_segments_BT: document number of each query; None for one document.
      key_segments_BS: document number of each key; None for one document.
    """
    # Zero for the query's own key, negative for later ones.
    distance_TS = limits[0] + jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)
    mask_BTS = ((distance_TS >= 0) & (distance_TS < limits[1]))[None]
    if query_segments_BT is None or key_segments_BS is None:
        return mask_BTS
    return mask_BTS & (query_segments_BT[:, :, None] == key_segments_BS[:, None, :])


def flash_attention_reference(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    limits: jax.Array,
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns attention by way of all scores [B, N, T, S], and the logsumexp of each query [B, N, T]."""
    probs_BNTS, logsumexp_BNT = probabilities(q_BTNH, k_BSKH, limits, query_segments_BT, key_segments_BS)
    v_BSNH = jnp.repeat(v_BSKH.astype(probs_BNTS.dtype), q_BTNH.shape[2] // v_BSKH.shape[2], axis=2)
    return einsum("bnts,bsnh->btnh", probs_BNTS, v_BSNH), logsumexp_BNT


def probabilities(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    limits: jax.Array | tuple[Any, Any],
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns probabilities [B, N, T, S] and the logsumexp [B, N, T] of each query, in float32 or wider."""
    group, width = q_BTNH.shape[2] // k_BSKH.shape[2], q_BTNH.shape[3]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTNH, k_BSNH = q_BTNH.astype(wide), jnp.repeat(k_BSKH.astype(wide), group, axis=2)
    mask_BTS = visible_keys(q_BTNH.shape[1], k_BSKH.shape[1], limits, query_segments_BT, key_segments_BS)
    scores_BNTS = einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * width**-0.5
    scores_BNTS = jnp.where(mask_BTS[:, None], scores_BNTS, -jnp.inf)
    is_empty_BT = ~mask_BTS.any(axis=2)[:, None, :]
    # A query without keys would turn minus infinity into NaN, in the gradient too.
    top_BNT = jax.lax.stop_gradient(jnp.where(is_empty_BT, 0, scores_BNTS.max(axis=3)))
    exp_BNTS = jnp.where(mask_BTS[:, None], jnp.exp(scores_BNTS - top_BNT[..., None]), 0)
    sum_BNT = jnp.where(is_empty_BT, 1, exp_BNTS.sum(axis=3))
    return exp_BNTS / sum_BNT[..., None], jnp.where(is_empty_BT, -jnp.inf, top_BNT + jnp.log(sum_BNT))
