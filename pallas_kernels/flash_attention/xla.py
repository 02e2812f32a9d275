"""`flash_attention` in XLA with all scores at once, and the choice between this and `blockwise`.

Letters are those of the package; G = N/K query heads of a key head, C = K*H.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.flash_attention.reference import visible_keys
from pallas_kernels.fusion import unfused
from pallas_kernels.precision import einsum

BLOCKWISE_FROM = 1024
"""Tokens of a sequence from which `blockwise` is used. At 1,024 tokens it was 1.75 times as fast, forward
and backward, and at 512 slower (2 cores of an AMD EPYC). Memory matters only for longer sequences."""
MIN_QUERIES = 256
"""Smallest number of queries for which `blockwise` is used: products of fewer do not fill a core."""
LOWEST = float(jnp.finfo(jnp.float32).min)
"""Score of a masked pair. With minus infinity, a difference of two would be NaN."""


@jax.custom_vjp
def full_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    limits: jax.Array,
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, N, H] and the logsumexp [B, N, T]; scores and softmax are float32.

    Nothing of size T x S is kept for the backward pass, which recomputes the probabilities from the logsumexp
    ([FlashAttention] section 3.1). The arguments are those of `flash_attention_reference`.
    """
    return _forward(q_BTNH, k_BSKH, v_BSKH, limits, query_segments_BT, key_segments_BS)[0]


def _forward(q_BTNH, k_BSKH, v_BSKH, *masking):
    num_keys = k_BSKH.shape[2]
    scores_BKGTS = _scores(group_heads(q_BTNH, num_keys), k_BSKH, masking)
    top_BKGT = jax.lax.stop_gradient(scores_BKGTS.max(axis=-1))
    exp_BKGTS = jnp.exp(scores_BKGTS - top_BKGT[..., None])
    sum_BKGT = exp_BKGTS.sum(axis=-1)
    out_BKGTH = einsum("bkgts,bskh->bkgth", exp_BKGTS.astype(v_BSKH.dtype), v_BSKH)
    # The sum does not tell: a query without keys has equal scores, each of which added exp(0) to it.
    has_keys_BKGT = top_BKGT > LOWEST
    share_BKGT = jnp.where(has_keys_BKGT, 1 / sum_BKGT, 0)
    out_BTNH = ungroup_heads((out_BKGTH * share_BKGT[..., None]).astype(v_BSKH.dtype))
    logsumexp_BKGT = jnp.where(has_keys_BKGT, top_BKGT + jnp.log(sum_BKGT), -jnp.inf)
    results = out_BTNH, logsumexp_BKGT.reshape(q_BTNH.shape[0], -1, q_BTNH.shape[1])
    out_BTNH, logsumexp_BNT = (checkpoint_name(x, KEPT) for x in results)
    return (out_BTNH, logsumexp_BNT), (q_BTNH, k_BSKH, v_BSKH, masking, out_BTNH, logsumexp_BNT)


def _backward(saved, gradients):
    q_BTNH, k_BSKH, v_BSKH, masking, out_BTNH, logsumexp_BNT = saved
    grad_BTNH, grad_logsumexp_BNT = gradients
    num_keys = k_BSKH.shape[2]
    q_BKGTH, grad_BKGTH = (group_heads(x, num_keys) for x in (q_BTNH, grad_BTNH))
    # Unfused: otherwise XLA would compute a query's divisor again for each key.
    divisor_BNT = unfused(_divisor, logsumexp_BNT)
    divisor_BKGT = divisor_BNT.reshape(q_BKGTH.shape[:-1])
    probs_BKGTS = jnp.exp(_scores(q_BKGTH, k_BSKH, masking) - divisor_BKGT[..., None])
    grad_v_BSKH = _sum_over_queries(probs_BKGTS.astype(v_BSKH.dtype), grad_BKGTH)
    product = functools.partial(einsum, "bkgth,bskh->bkgts", dtype=jnp.float32)
    grad_probs_BKGTS = unfused(product, grad_BKGTH, v_BSKH)
    # The term of the softmax's normalization, the sum over s of probs * grad_probs ([FlashAttention-2]
    # section 3.1.2), less the gradient of the logsumexp.
    shared_BTN1 = unfused(_sum_of_products, grad_BTNH, out_BTNH)
    shared_BTN1 = shared_BTN1 - grad_logsumexp_BNT.transpose(0, 2, 1)[..., None]
    grad_scores_BKGTS = probs_BKGTS * (grad_probs_BKGTS - group_heads(shared_BTN1, num_keys))
    grad_scores_BKGTS = (grad_scores_BKGTS * q_BTNH.shape[-1] ** -0.5).astype(q_BTNH.dtype)
    grad_q_BKGTH = einsum("bkgts,bskh->bkgth", grad_scores_BKGTS, k_BSKH)
    grad_k_BSKH = _sum_over_queries(grad_scores_BKGTS, q_BKGTH)
    return ungroup_heads(grad_q_BKGTH), grad_k_BSKH, grad_v_BSKH, None, None, None


full_attention.defvjp(_forward, _backward)


def _scores(q_BKGTH: jax.Array, k_BSKH: jax.Array, masking: tuple[Any, ...]) -> jax.Array:
    scores_BKGTS = einsum("bkgth,bskh->bkgts", q_BKGTH, k_BSKH, dtype=jnp.float32)
    scores_BKGTS = scores_BKGTS * q_BKGTH.shape[-1] ** -0.5
    mask_BTS = visible_keys(q_BKGTH.shape[3], k_BSKH.shape[1], *masking)
    return jnp.where(mask_BTS[:, None, None], scores_BKGTS, LOWEST)


def _divisor(logsumexp_BNT: jax.Array) -> jax.Array:
    # Infinite for a query without keys, so that its probabilities are zeros.
    return jnp.where(jnp.isneginf(logsumexp_BNT), jnp.inf, logsumexp_BNT)


def _sum_of_products(x_BTNH: jax.Array, y_BTNH: jax.Array) -> jax.Array:
    return jnp.sum(x_BTNH.astype(jnp.float32) * y_BTNH.astype(jnp.float32), axis=-1, keepdims=True)


def _sum_over_queries(x_BKGTS: jax.Array, y_BKGTH: jax.Array) -> jax.Array:
    """Returns sums of products over the queries of each key, [B, S, K, H]."""
    # The product's last axis is S. Fused with the next operation, XLA would transpose the operand first.
    out_BKHS = unfused(functools.partial(einsum, "bkgts,bkgth->bkhs"), x_BKGTS, y_BKGTH)
    return out_BKHS.transpose(0, 3, 1, 2)


def group_heads(x_BTNH: jax.Array, num_key_heads: int) -> jax.Array:
    """Groups query heads by key head, with heads before time: [B, K, G, T, H]."""
    batch, time, _, width = x_BTNH.shape
    return x_BTNH.reshape(batch, time, num_key_heads, -1, width).transpose(0, 2, 3, 1, 4)


def ungroup_heads(x_BKGTH: jax.Array) -> jax.Array:
    """Inverse of `group_heads`: [B, T, N, H]."""
    batch, _, _, time, width = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, time, -1, width)


def form_of(num_queries: int, num_keys: int) -> str:
    """Returns the faster XLA form for these numbers of queries and keys: "blockwise" or "full"."""
    is_large = num_queries * num_keys >= BLOCKWISE_FROM**2
    return "blockwise" if is_large and num_queries >= MIN_QUERIES else "full"
