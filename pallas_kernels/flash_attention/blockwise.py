"""`flash_attention` without a kernel, for long sequences: one pair of query and key blocks at a time.

Memory grows with T + S, not with T x S ([FlashAttention] algorithms 1 and 4). For self-attention, a scan of
known length visits only the pairs on or below the diagonal: XLA runs a loop of unknown length from the host.
If the position of the queries among the keys is traced, the scan has all pairs and skips the masked ones.

Letters: B batch, T queries, S keys, N query heads, K key/value heads, G = N/K, H head width, J blocks of
queries or of keys, Q queries of a block; within a block S are its keys.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.flash_attention.reference import visible_keys
from pallas_kernels.flash_attention.xla import LOWEST
from pallas_kernels.precision import einsum

MIN_BLOCK, MAX_BLOCK = 256, 2048
"""Limits of the tokens of a block, which is a sixteenth of the sequence. Smaller products do not fill a core;
larger blocks have more than 16 MiB of scores per head."""


class _Blocks(NamedTuple):
    """Queries, keys and values split into blocks; the block is the first axis."""

    q_JBKGQH: jax.Array
    k_JBKSH: jax.Array
    v_JBKSH: jax.Array
    segments: tuple[jax.Array, jax.Array] | None
    """Document numbers of queries and keys, [J, B, Q] and [J, B, S]."""
    num_keys: int
    """Number of keys without padding."""


class _CausalWindow(NamedTuple):
    """The keys that a query attends to, apart from documents."""

    start: jax.Array | int | None
    """Index of the first query among the keys; None for self-attention."""
    window: jax.Array | int | None


class _Softmax(NamedTuple):
    """Running sums of the online softmax over the keys so far, for each query of all blocks; float32."""

    out_JBKGQH: jax.Array
    """Sum of values, weighted by exp(score - top)."""
    sum_JBKGQ: jax.Array
    top_JBKGQ: jax.Array


def blockwise_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    window: jax.Array | int | None,
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
    *,
    query_start: jax.Array | int | None = None,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, N, H] and the logsumexp [B, N, T] of attention.

    Args:
      q_BTNH: queries; head n reads key head n // G.
      k_BSKH: keys.
      v_BSKH: values.
      window: number of keys that a query attends to, its own included; None for all. Blocks outside of the
        window are skipped.
      query_segments_BT: document number of each query; None for one document.
      key_segments_BS: document number of each key; None for one document.
      query_start: index of the first query among the keys; None for self-attention, T = S.
      block: tokens of a block; None selects it by the length.
    """
    time, num_keys = q_BTNH.shape[1], k_BSKH.shape[1]
    assert query_start is not None or time == num_keys, (
        "without query_start, queries and keys must be one sequence"
    )
    # A block that is longer than the queries would pad them, and add work for nothing.
    block = min(block or block_of(max(time, num_keys)), time)
    q_BTNH, k_BSKH, v_BSKH = (_pad(x, block) for x in (q_BTNH, k_BSKH, v_BSKH))
    segments = None
    if query_segments_BT is not None and key_segments_BS is not None:
        # Outputs of padded queries are dropped and padded keys are masked, so that their document does not
        # matter.
        segments = tuple(_pad(x, block, mode="edge") for x in (query_segments_BT, key_segments_BS))
    causal = _CausalWindow(query_start, window)
    results: Any = _attend(q_BTNH, k_BSKH, v_BSKH, causal, segments, block, num_keys)
    out_BTNH, logsumexp_BNT = results
    return out_BTNH[:, :time], logsumexp_BNT[:, :, :time]


def block_of(time: int) -> int:
    """Returns the tokens of a block for `time` tokens, the larger number of queries and keys."""
    sixteenth = 1 << max(time // 16, 1).bit_length() - 1
    return min(max(sixteenth, MIN_BLOCK), MAX_BLOCK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q_BTNH, k_BSKH, v_BSKH, causal, segments, block, num_keys):
    return _forward(q_BTNH, k_BSKH, v_BSKH, causal, segments, block, num_keys)[0]


def _forward(q_BTNH, k_BSKH, v_BSKH, causal, segments, block, num_keys):
    blocks = _cut(q_BTNH, k_BSKH, v_BSKH, segments, block, num_keys)
    shape = blocks.q_JBKGQH.shape
    start = _Softmax(
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.full(shape[:-1], LOWEST),
    )
    done = _over_pairs(functools.partial(_add_keys, blocks, causal), start, blocks, causal)
    # The sum does not tell: a query without keys has equal scores, each of which added exp(0) to it.
    has_keys_JBKGQ = done.top_JBKGQ > LOWEST
    share_JBKGQ = jnp.where(has_keys_JBKGQ, 1 / done.sum_JBKGQ, 0)
    out_JBKGQH = (done.out_JBKGQH * share_JBKGQ[..., None]).astype(v_BSKH.dtype)
    logsumexp_JBKGQ = jnp.where(has_keys_JBKGQ, done.top_JBKGQ + jnp.log(done.sum_JBKGQ), -jnp.inf)
    results = _join(out_JBKGQH), _join(logsumexp_JBKGQ[..., None])[..., 0].swapaxes(1, 2)
    out_BTNH, logsumexp_BNT = (checkpoint_name(x, KEPT) for x in results)
    saved = q_BTNH, k_BSKH, v_BSKH, causal, segments, out_BTNH, logsumexp_BNT
    return (out_BTNH, logsumexp_BNT), saved


def _backward(block, num_keys, saved, gradients):
    q_BTNH, k_BSKH, v_BSKH, causal, segments, out_BTNH, logsumexp_BNT = saved
    grad_BTNH, grad_logsumexp_BNT = gradients
    blocks = _cut(q_BTNH, k_BSKH, v_BSKH, segments, block, num_keys)
    # The term of the softmax's normalization, the sum over s of probs * grad_probs ([FlashAttention-2]
    # section 3.1.2), less the gradient of the logsumexp.
    shared_BTN = jnp.sum(grad_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=-1)
    shared_BTN = shared_BTN - grad_logsumexp_BNT.swapaxes(1, 2)
    # Infinite for a query without keys, so that its probabilities are zeros.
    divisor_BTN = jnp.where(jnp.isneginf(logsumexp_BNT), jnp.inf, logsumexp_BNT).swapaxes(1, 2)
    cut = functools.partial(_cut_heads, num_key_heads=k_BSKH.shape[2], block=block)
    per_query = cut(grad_BTNH), cut(shared_BTN[..., None])[..., 0], cut(divisor_BTN[..., None])[..., 0]
    step = functools.partial(_add_gradients, blocks, causal, *per_query)
    # Sums over blocks are float32 until the last block was added, whatever the dtype of the operands.
    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (blocks.q_JBKGQH, blocks.k_JBKSH, blocks.v_JBKSH))
    grad_q_JBKGQH, grad_k_JBKSH, grad_v_JBKSH = _over_pairs(step, start, blocks, causal)
    return (
        _join(grad_q_JBKGQH.astype(q_BTNH.dtype)),
        _join(grad_k_JBKSH[:, :, :, None].astype(k_BSKH.dtype)),
        _join(grad_v_JBKSH[:, :, :, None].astype(v_BSKH.dtype)),
        None,
        None,
    )


_attend.defvjp(_forward, _backward)


def _over_pairs(step, carry, blocks: _Blocks, causal: _CausalWindow):
    """Scans `step(carry, i, j)` over the pairs of query block i and key block j that may be unmasked."""
    num_queries, num_keys = len(blocks.q_JBKGQH), len(blocks.k_JBKSH)
    pairs = [
        (i, j) for i in range(num_queries) for j in range(num_keys) if causal.start is not None or j <= i
    ]

    def visit(carry, pair):
        # The barrier ties the pair to the carry. Otherwise remat would see that masks depend on no gradient,
        # compute them for all pairs before the scan and keep them: T x S entries.
        carry, (i, j) = lax.optimization_barrier((carry, pair))
        is_visible = _is_visible(blocks, causal, i, j)
        if is_visible is None:
            return step(carry, i, j), None
        return lax.cond(is_visible, lambda: step(carry, i, j), lambda: carry), None

    numbers = np.array(pairs, np.int32)
    return lax.scan(visit, carry, (numbers[:, 0], numbers[:, 1]))[0]


def _is_visible(blocks: _Blocks, causal: _CausalWindow, i: jax.Array, j: jax.Array) -> jax.Array | None:
    """Whether query block i and key block j have an unmasked pair; None if the scan holds no others."""
    in_reach = None
    if causal.window is not None:  # distance of the first query to the last key
        in_reach = _distance(blocks, causal, i - j - 1) + 1 < causal.window
    if causal.start is None:
        return in_reach
    is_causal = _distance(blocks, causal, i - j + 1) > 0  # distance of the last query to the first key
    return is_causal if in_reach is None else is_causal & in_reach


def _distance(blocks: _Blocks, causal: _CausalWindow, num_blocks: jax.Array) -> jax.Array:
    """Distance in tokens from a key to a later query that are the first of blocks `num_blocks` apart."""
    between = num_blocks * blocks.k_JBKSH.shape[-2]
    return between if causal.start is None else between + causal.start


def _add_keys(blocks: _Blocks, causal: _CausalWindow, sums: _Softmax, i: jax.Array, j: jax.Array) -> _Softmax:
    """Adds the keys of block j to the running sums of the queries of block i."""
    scores_BKGQS = _scores(blocks, causal, i, j)
    old_BKGQ, v_BKSH = _at(sums.top_JBKGQ, i), _at(blocks.v_JBKSH, j)
    top_BKGQ = jnp.maximum(old_BKGQ, scores_BKGQS.max(axis=-1))
    exp_BKGQS = jnp.exp(scores_BKGQS - top_BKGQ[..., None])
    # Rescales sums that used an earlier maximum.
    shrink_BKGQ = jnp.exp(old_BKGQ - top_BKGQ)
    # Rounded to the dtype of the values: a product of two dtypes would convert the values to float32 first.
    values_BKGQH = _product("bkgqs,bksh->bkgqh", exp_BKGQS.astype(v_BKSH.dtype), v_BKSH)
    out_BKGQH = _at(sums.out_JBKGQH, i) * shrink_BKGQ[..., None] + values_BKGQH
    sum_BKGQ = _at(sums.sum_JBKGQ, i) * shrink_BKGQ + exp_BKGQS.sum(axis=-1)
    return _Softmax(
        _put(sums.out_JBKGQH, i, out_BKGQH),
        _put(sums.sum_JBKGQ, i, sum_BKGQ),
        _put(sums.top_JBKGQ, i, top_BKGQ),
    )


def _add_gradients(
    blocks: _Blocks, causal: _CausalWindow, grad_JBKGQH, shared_JBKGQ, divisor_JBKGQ, grads, i, j
):
    """Adds the contribution of query block i and key block j to the gradients of both."""
    grad_q_JBKGQH, grad_k_JBKSH, grad_v_JBKSH = grads
    q_BKGQH, grad_BKGQH = _at(blocks.q_JBKGQH, i), _at(grad_JBKGQH, i)
    k_BKSH, v_BKSH = _at(blocks.k_JBKSH, j), _at(blocks.v_JBKSH, j)
    probs_BKGQS = jnp.exp(_scores(blocks, causal, i, j) - _at(divisor_JBKGQ, i)[..., None])
    grad_v_BKSH = _product("bkgqs,bkgqh->bksh", probs_BKGQS.astype(v_BKSH.dtype), grad_BKGQH)
    grad_scores_BKGQS = _product("bkgqh,bksh->bkgqs", grad_BKGQH, v_BKSH) - _at(shared_JBKGQ, i)[..., None]
    grad_scores_BKGQS = probs_BKGQS * grad_scores_BKGQS * q_BKGQH.shape[-1] ** -0.5
    grad_scores_BKGQS = grad_scores_BKGQS.astype(q_BKGQH.dtype)
    grad_q_BKGQH = _product("bkgqs,bksh->bkgqh", grad_scores_BKGQS, k_BKSH)
    grad_k_BKSH = _product("bkgqs,bkgqh->bksh", grad_scores_BKGQS, q_BKGQH)
    return (
        _put(grad_q_JBKGQH, i, _at(grad_q_JBKGQH, i) + grad_q_BKGQH),
        _put(grad_k_JBKSH, j, _at(grad_k_JBKSH, j) + grad_k_BKSH),
        _put(grad_v_JBKSH, j, _at(grad_v_JBKSH, j) + grad_v_BKSH),
    )


def _scores(blocks: _Blocks, causal: _CausalWindow, i: jax.Array, j: jax.Array) -> jax.Array:
    q_BKGQH, k_BKSH = _at(blocks.q_JBKGQH, i), _at(blocks.k_JBKSH, j)
    block = k_BKSH.shape[-2]
    limits = (
        _distance(blocks, causal, i - j),
        np.iinfo(np.int32).max if causal.window is None else causal.window,
    )
    segments = (None, None) if blocks.segments is None else map(_at, blocks.segments, (i, j))
    mask_BQS = visible_keys(block, block, limits, *segments)
    if causal.start is not None:  # in self-attention the causal mask already excludes the padding
        mask_BQS &= j * block + jnp.arange(block) < blocks.num_keys
    scores_BKGQS = _product("bkgqh,bksh->bkgqs", q_BKGQH, k_BKSH) * q_BKGQH.shape[-1] ** -0.5
    return jnp.where(mask_BQS[:, None, None], scores_BKGQS, LOWEST)


_product = functools.partial(einsum, dtype=jnp.float32)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, value, index, axis=0)


def _pad(x_BT: jax.Array, block: int, **options: Any) -> jax.Array:
    """Pads the token axis to whole blocks."""
    return jnp.pad(x_BT, [(0, 0), (0, -x_BT.shape[1] % block), *[(0, 0)] * (x_BT.ndim - 2)], **options)


def _cut(q_BTNH, k_BSKH, v_BSKH, segments, block: int, num_keys: int) -> _Blocks:
    cut = functools.partial(_cut_heads, num_key_heads=k_BSKH.shape[2], block=block)
    if segments is not None:
        segments = tuple(x_BT.reshape(len(x_BT), -1, block).swapaxes(0, 1) for x_BT in segments)
    return _Blocks(cut(q_BTNH), cut(k_BSKH)[:, :, :, 0], cut(v_BSKH)[:, :, :, 0], segments, num_keys)


def _cut_heads(x_BTNH: jax.Array, num_key_heads: int, block: int) -> jax.Array:
    batch, _, _, width = x_BTNH.shape
    x_BJQKGH = x_BTNH.reshape(batch, -1, block, num_key_heads, x_BTNH.shape[2] // num_key_heads, width)
    # Blocks come first, because the scan slices them, and heads before tokens, as batched products need them.
    return x_BJQKGH.transpose(1, 0, 3, 4, 2, 5)


def _join(x_JBKGQH: jax.Array) -> jax.Array:
    num_blocks, batch, key_heads, group, block, width = x_JBKGQH.shape
    x_BJQKGH = x_JBKGQH.transpose(1, 0, 4, 2, 3, 5)
    return x_BJQKGH.reshape(batch, num_blocks * block, key_heads * group, width)
