"""Causal attention with grouped queries, a sliding window and documents.

Letters: B batch, T query time, S key time, N query heads, K key/value heads, G = N/K, H head width,
C = K*H channels of all key heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cpu import apart
from zaya_jax.model.remat import KEPT


def attention_mask(
    query_T: Int[Array, " T"],
    key_S: Int[Array, " S"],
    *,
    window: Int[Array, ""] | int | None,
    query_segments_BT: Int[Array, "B T"] | None = None,
    key_segments_BS: Int[Array, "B S"] | None = None,
) -> Bool[Array, "b T S"]:
    """Which keys a query may look at: earlier or equal, within the window, of the same document.

    Args:
      query_T: index of each query in its sequence.
      key_S: index of each key; a negative one is nobody's.
      window: tokens a query sees, itself included; None for all.
      query_segments_BT: documents of the queries.
      key_segments_BS: documents of the keys.

    Returns:
      [1, T, S] without segments, else [B, T, S].
    """
    distance_TS = query_T[:, None] - key_S[None, :]
    mask_TS = (distance_TS >= 0) & (key_S >= 0)
    if window is not None:
        mask_TS = mask_TS & (distance_TS < window)
    if query_segments_BT is None or key_segments_BS is None:
        return mask_TS[None]
    return mask_TS & (query_segments_BT[:, :, None] == key_segments_BS[:, None, :])


def attend_within(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    *,
    window: Int[Array, ""] | int | None,
    segments_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """`attend` of sequences to themselves: within the window and the document."""
    index_T = jnp.arange(q_BTNH.shape[1])
    mask_BTS = attention_mask(
        index_T, index_T, window=window, query_segments_BT=segments_BT, key_segments_BS=segments_BT
    )
    return attend(q_BTNH, k_BTKH, v_BTKH, mask_BTS)


@jax.custom_vjp
def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "b T S"],
) -> Float[Array, "B T N H"]:
    """Softmax attention with scale 1/sqrt(H); scores and softmax in float32.

    Query head n belongs to key head n // G. A query that may look at nothing gets a mean of all values, a
    finite number that nobody reads, and gives no gradient: only padding is in that place. For the backward
    pass nothing of size T x S is kept: it forms the probabilities anew from their logsumexp (FlashAttention,
    arXiv 2205.14135, section 3.1).
    """
    return _attend_forward(q_BTNH, k_BSKH, v_BSKH, mask_BTS)[0]


def attend_single(
    q_B1NH: Float[Array, "B 1 N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_B1S: Bool[Array, "b 1 S"],
) -> Float[Array, "B 1 N H"]:
    """`attend` of a single query, without gradient: keys and values are read as they lie.

    A product for each key head would have both transposed first. Instead a query is as wide as all key heads
    together, with zeros for those that are not its own: K times the work, which is little for one token.
    """
    batch, size, num_keys, width = k_BSKH.shape
    num_queries = q_B1NH.shape[2]
    group = num_queries // num_keys
    own_NK1 = (jnp.arange(num_queries)[:, None] // group == jnp.arange(num_keys))[:, :, None]
    q_BNC = jnp.where(own_NK1, q_B1NH[:, 0, :, None], 0).reshape(batch, num_queries, -1)
    k_BSC, v_BSC = (x.reshape(batch, size, -1) for x in (k_BSKH, v_BSKH))
    scores_BNS = jnp.einsum("bnc,bsc->bns", q_BNC, k_BSC, preferred_element_type=jnp.float32) * width**-0.5
    scores_BNS = jnp.where(mask_B1S, scores_BNS, jnp.finfo(jnp.float32).min)
    exp_BNS = jnp.exp(scores_BNS - scores_BNS.max(axis=-1, keepdims=True))
    out_BNC = jnp.einsum("bns,bsc->bnc", exp_BNS.astype(v_BSC.dtype), v_BSC)
    out_BNKH = out_BNC.reshape(batch, num_queries, num_keys, width)
    out_BNH = jnp.sum(jnp.where(own_NK1, out_BNKH, 0), axis=2) / exp_BNS.sum(axis=-1)[..., None]
    return out_BNH[:, None].astype(v_BSKH.dtype)


def _attend_forward(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    q_BKGTH = _group(q_BTNH, k_BSKH.shape[2])
    scores_BKGTS = _scores(q_BKGTH, k_BSKH, mask_BTS)
    top_BKGT = jax.lax.stop_gradient(scores_BKGTS.max(axis=-1))
    exp_BKGTS = jnp.exp(scores_BKGTS - top_BKGT[..., None])
    sum_BKGT = exp_BKGTS.sum(axis=-1)
    out_BKGTH = jnp.einsum("bkgts,bskh->bkgth", exp_BKGTS.astype(v_BSKH.dtype), v_BSKH)
    out_BKGTH = (out_BKGTH / sum_BKGT[..., None]).astype(v_BSKH.dtype)
    # Infinite for a query that may look at nothing: its probabilities are zeros for the backward pass.
    sees_BKGT = top_BKGT > jnp.finfo(jnp.float32).min
    logsumexp_BKGT = jnp.where(sees_BKGT, top_BKGT + jnp.log(sum_BKGT), jnp.inf)
    q_BTNH, k_BSKH, v_BSKH, out_BTNH, logsumexp_BKGT = (
        checkpoint_name(x, KEPT) for x in (q_BTNH, k_BSKH, v_BSKH, _ungroup(out_BKGTH), logsumexp_BKGT)
    )
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, mask_BTS, out_BTNH, logsumexp_BKGT)


def _attend_backward(saved, grad_BTNH):
    q_BTNH, k_BSKH, v_BSKH, mask_BTS, out_BTNH, logsumexp_BKGT = saved
    num_keys = k_BSKH.shape[2]
    q_BKGTH, grad_BKGTH = (_group(x, num_keys) for x in (q_BTNH, grad_BTNH))
    probs_BKGTS = jnp.exp(_scores(q_BKGTH, k_BSKH, mask_BTS) - logsumexp_BKGT[..., None])
    grad_v_BSKH = _sum_over_queries(probs_BKGTS.astype(v_BSKH.dtype), grad_BKGTH)
    product = functools.partial(jnp.einsum, "bkgth,bskh->bkgts", preferred_element_type=jnp.float32)
    grad_probs_BKGTS = apart(product, grad_BKGTH, v_BSKH)
    # What the softmax's normalisation takes off: sum over s of probs * grad_probs.
    shared_BKGT1 = _group(apart(_sum_of_products, grad_BTNH, out_BTNH), num_keys)
    grad_scores_BKGTS = probs_BKGTS * (grad_probs_BKGTS - shared_BKGT1) * q_BTNH.shape[-1] ** -0.5
    grad_scores_BKGTS = grad_scores_BKGTS.astype(q_BTNH.dtype)
    grad_q_BKGTH = jnp.einsum("bkgts,bskh->bkgth", grad_scores_BKGTS, k_BSKH)
    grad_k_BSKH = _sum_over_queries(grad_scores_BKGTS, q_BKGTH)
    return _ungroup(grad_q_BKGTH), grad_k_BSKH, grad_v_BSKH, None


attend.defvjp(_attend_forward, _attend_backward)


def _sum_of_products(x_BTNH: jax.Array, y_BTNH: jax.Array) -> jax.Array:
    return jnp.sum(x_BTNH.astype(jnp.float32) * y_BTNH.astype(jnp.float32), axis=-1, keepdims=True)


def _sum_over_queries(x_BKGTS: jax.Array, y_BKGTH: jax.Array) -> jax.Array:
    """Sums of products over the queries of each key, [B, S, K, H]."""
    # As a product it ends with S; what follows in one loop would have it transposed first.
    out_BKHS = apart(functools.partial(jnp.einsum, "bkgts,bkgth->bkhs"), x_BKGTS, y_BKGTH)
    return out_BKHS.transpose(0, 3, 1, 2)


def _scores(q_BKGTH: jax.Array, k_BSKH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    scores_BKGTS = jnp.einsum("bkgth,bskh->bkgts", q_BKGTH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BKGTS = scores_BKGTS * q_BKGTH.shape[-1] ** -0.5
    return jnp.where(mask_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)


def _group(x_BTNH: jax.Array, num_key_heads: int) -> jax.Array:
    batch, time, _, width = x_BTNH.shape
    return x_BTNH.reshape(batch, time, num_key_heads, -1, width).transpose(0, 2, 3, 1, 4)


def _ungroup(x_BKGTH: jax.Array) -> jax.Array:
    batch, _, _, time, width = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, time, -1, width)
