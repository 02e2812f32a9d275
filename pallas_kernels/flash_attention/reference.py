"""The specification of `flash_attention`, in plain jnp. Letters: see the package."""

from typing import Any

import jax
import jax.numpy as jnp


def visible_keys(
    num_queries: int,
    num_keys: int,
    limits: jax.Array | tuple[Any, Any],
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> jax.Array:
    """Which keys a query may look at, [B or 1, T, S].

    Args:
      num_queries: T.
      num_keys: S.
      limits: the first query's place among the keys, and the window.
      query_segments_BT: documents of the queries.
      key_segments_BS: documents of the keys.
    """
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
    """Attention with all scores [B, N, T, S] in memory, and each query's logsumexp [B, N, T]."""
    probs_BNTS, logsumexp_BNT = probabilities(q_BTNH, k_BSKH, limits, query_segments_BT, key_segments_BS)
    v_BSNH = jnp.repeat(v_BSKH.astype(probs_BNTS.dtype), q_BTNH.shape[2] // v_BSKH.shape[2], axis=2)
    return jnp.einsum("bnts,bsnh->btnh", probs_BNTS, v_BSNH), logsumexp_BNT


def probabilities(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    limits: jax.Array | tuple[Any, Any],
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """How much each query takes of each key [B, N, T, S], and its logsumexp [B, N, T]; float32 or wider."""
    group, width = q_BTNH.shape[2] // k_BSKH.shape[2], q_BTNH.shape[3]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTNH, k_BSNH = q_BTNH.astype(wide), jnp.repeat(k_BSKH.astype(wide), group, axis=2)
    mask_BTS = visible_keys(q_BTNH.shape[1], k_BSKH.shape[1], limits, query_segments_BT, key_segments_BS)
    scores_BNTS = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * width**-0.5
    scores_BNTS = jnp.where(mask_BTS[:, None], scores_BNTS, -jnp.inf)
    is_blind_BT = ~mask_BTS.any(axis=2)[:, None, :]
    # A query that sees nothing would make NaN of its -inf, also backward.
    top_BNT = jax.lax.stop_gradient(jnp.where(is_blind_BT, 0, scores_BNTS.max(axis=3)))
    exp_BNTS = jnp.where(mask_BTS[:, None], jnp.exp(scores_BNTS - top_BNT[..., None]), 0)
    sum_BNT = jnp.where(is_blind_BT, 1, exp_BNTS.sum(axis=3))
    return exp_BNTS / sum_BNT[..., None], jnp.where(is_blind_BT, -jnp.inf, top_BNT + jnp.log(sum_BNT))
