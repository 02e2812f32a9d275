"""`flash_attention` without a kernel: all scores of a call at once, and which form suits a length.

Letters: as in the package; G = N/K query heads a key head, C = K*H.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.flash_attention.reference import visible_keys
from pallas_kernels.fusion import unfused

BLOCKWISE_FROM = 1024
"""Tokens of a sequence from which on `blockwise` is taken: it was 1.75 times as fast at 1,024, forward and
backward on 2 cores of an AMD EPYC, and slower at 512; its memory matters only beyond."""
FEWEST_QUERIES = 256
"""To other keys, for which `blockwise` is taken: blocks of fewer do not fill a core's products."""
LOWEST = float(jnp.finfo(jnp.float32).min)
"""A score that is not to be seen. Not minus infinity, from which a difference would be NaN."""


@jax.custom_vjp
def full_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    limits: jax.Array,
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, H] and logsumexp [B, N, T], by way of all scores; these and the softmax in float32.

    For the backward pass nothing of size T x S is kept: it forms the probabilities anew from their
    logsumexp ([FlashAttention] section 3.1).
    """
    return _forward(q_BTNH, k_BSKH, v_BSKH, limits, query_segments_BT, key_segments_BS)[0]


def _forward(q_BTNH, k_BSKH, v_BSKH, *masking):
    num_keys = k_BSKH.shape[2]
    scores_BKGTS = _scores(group_heads(q_BTNH, num_keys), k_BSKH, masking)
    top_BKGT = jax.lax.stop_gradient(scores_BKGTS.max(axis=-1))
    exp_BKGTS = jnp.exp(scores_BKGTS - top_BKGT[..., None])
    sum_BKGT = exp_BKGTS.sum(axis=-1)
    out_BKGTH = jnp.einsum("bkgts,bskh->bkgth", exp_BKGTS.astype(v_BSKH.dtype), v_BSKH)
    sees_BKGT = top_BKGT > LOWEST
    share_BKGT = jnp.where(sees_BKGT, 1 / sum_BKGT, 0)
    out_BTNH = ungroup_heads((out_BKGTH * share_BKGT[..., None]).astype(v_BSKH.dtype))
    logsumexp_BKGT = jnp.where(sees_BKGT, top_BKGT + jnp.log(sum_BKGT), -jnp.inf)
    results = out_BTNH, logsumexp_BKGT.reshape(q_BTNH.shape[0], -1, q_BTNH.shape[1])
    out_BTNH, logsumexp_BNT = (checkpoint_name(x, KEPT) for x in results)
    return (out_BTNH, logsumexp_BNT), (q_BTNH, k_BSKH, v_BSKH, masking, out_BTNH, logsumexp_BNT)


def _backward(saved, gradients):
    q_BTNH, k_BSKH, v_BSKH, masking, out_BTNH, logsumexp_BNT = saved
    grad_BTNH, grad_logsumexp_BNT = gradients
    num_keys = k_BSKH.shape[2]
    q_BKGTH, grad_BKGTH = (group_heads(x, num_keys) for x in (q_BTNH, grad_BTNH))
    # Infinite for a query that sees nothing: its probabilities are then zeros.
    divisor_BNT = jnp.where(jnp.isneginf(logsumexp_BNT), jnp.inf, logsumexp_BNT)
    divisor_BKGT = divisor_BNT.reshape(q_BKGTH.shape[:-1])
    probs_BKGTS = jnp.exp(_scores(q_BKGTH, k_BSKH, masking) - divisor_BKGT[..., None])
    grad_v_BSKH = _sum_over_queries(probs_BKGTS.astype(v_BSKH.dtype), grad_BKGTH)
    product = functools.partial(jnp.einsum, "bkgth,bskh->bkgts", preferred_element_type=jnp.float32)
    grad_probs_BKGTS = unfused(product, grad_BKGTH, v_BSKH)
    # What the softmax's normalisation takes off, the sum over s of probs * grad_probs ([FlashAttention-2]
    # section 3.1.2), less what comes in through the logsumexp.
    shared_BTN1 = unfused(_sum_of_products, grad_BTNH, out_BTNH)
    shared_BTN1 = shared_BTN1 - grad_logsumexp_BNT.transpose(0, 2, 1)[..., None]
    grad_scores_BKGTS = probs_BKGTS * (grad_probs_BKGTS - group_heads(shared_BTN1, num_keys))
    grad_scores_BKGTS = (grad_scores_BKGTS * q_BTNH.shape[-1] ** -0.5).astype(q_BTNH.dtype)
    grad_q_BKGTH = jnp.einsum("bkgts,bskh->bkgth", grad_scores_BKGTS, k_BSKH)
    grad_k_BSKH = _sum_over_queries(grad_scores_BKGTS, q_BKGTH)
    return ungroup_heads(grad_q_BKGTH), grad_k_BSKH, grad_v_BSKH, None, None, None


full_attention.defvjp(_forward, _backward)


def _scores(q_BKGTH: jax.Array, k_BSKH: jax.Array, masking: tuple[Any, ...]) -> jax.Array:
    scores_BKGTS = jnp.einsum("bkgth,bskh->bkgts", q_BKGTH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BKGTS = scores_BKGTS * q_BKGTH.shape[-1] ** -0.5
    mask_BTS = visible_keys(q_BKGTH.shape[3], k_BSKH.shape[1], *masking)
    return jnp.where(mask_BTS[:, None, None], scores_BKGTS, LOWEST)


def _sum_of_products(x_BTNH: jax.Array, y_BTNH: jax.Array) -> jax.Array:
    return jnp.sum(x_BTNH.astype(jnp.float32) * y_BTNH.astype(jnp.float32), axis=-1, keepdims=True)


def _sum_over_queries(x_BKGTS: jax.Array, y_BKGTH: jax.Array) -> jax.Array:
    """Sums of products over the queries of each key, [B, S, K, H]."""
    # As a product it ends with S; what follows in one loop would have it transposed first.
    out_BKHS = unfused(functools.partial(jnp.einsum, "bkgts,bkgth->bkhs"), x_BKGTS, y_BKGTH)
    return out_BKHS.transpose(0, 3, 1, 2)


def group_heads(x_BTNH: jax.Array, num_key_heads: int) -> jax.Array:
    """Query heads under their key heads, ahead of time: [B, K, G, T, H]."""
    batch, time, _, width = x_BTNH.shape
    return x_BTNH.reshape(batch, time, num_key_heads, -1, width).transpose(0, 2, 3, 1, 4)


def ungroup_heads(x_BKGTH: jax.Array) -> jax.Array:
    """`group_heads` undone: heads side by side, [B, T, N, H]."""
    batch, _, _, time, width = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, time, -1, width)


def form_of(num_queries: int, num_keys: int) -> str:
    """Which of the forms without a kernel suits so many queries and keys."""
    is_large = num_queries * num_keys >= BLOCKWISE_FROM**2
    return "blockwise" if is_large and num_queries >= FEWEST_QUERIES else "full"
