"""Ring attention: keys and values circulate between devices, which accumulate attention per pair of chunks.

[Ring] section 3, with the balanced chunks of [Llama3] section 3.3.2. Partial results are merged by their
logsumexp, like blocks within a kernel. Keys of other devices are not kept for the backward pass: they
circulate a second time, together with their accumulated gradients.

Letters: B sequences of this device, R = 2*B rows, S tokens of a chunk, N query heads, K key/value heads,
H head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.flash_attention import flash_attention
from zaya_jax.model.attention.sequence_chunks import SharedSequences
from zaya_jax.parallel.context import (
    both_chunks,
    chunk_numbers,
    join_chunks,
    num_ranks,
    rank,
    ring_shift,
)

Pair = tuple[jax.Array, jax.Array]
"""Arrays of the early and the late chunks."""
EARLY, LATE = 0, 1
"""Indices of a pair."""


def ring_attention(
    shared: SharedSequences,
    implementation: str | None,
    window: int | None,
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
) -> jax.Array:
    """Causal softmax attention of chunks to their whole sequences.

    Args:
      shared: sequences that the chunks are parts of.
      implementation: implementation of `flash_attention`.
      window: number of tokens that a query attends to; None for all.
      q_RSNH: rotated queries of the chunks.
      k_RSKH: rotated keys of the chunks.
      v_RSKH: values of the chunks.

    Returns:
      Attention output [R, S, N, H] in the dtype of the queries.
    """
    operands = both_chunks(q_RSNH), both_chunks(jnp.concatenate([k_RSKH, v_RSKH], axis=2))
    segments = shared.segments_RS, shared.segments_BT
    outputs: Any = _ring(*operands, segments, implementation, window)
    return join_chunks(*outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _ring(queries: Pair, keys: Pair, segments: Any, implementation: str | None, window: int | None) -> Pair:
    results, _ = _forward(queries, keys, segments, implementation, window)
    return results


def _forward(
    queries: Pair, keys: Pair, segments: Any, implementation: str | None, window: int | None
) -> tuple[Pair, Any]:
    attend = functools.partial(_attend, SharedSequences(*segments), implementation, window)

    def add(q: int, k: int, sums: Any, keys: Pair, source: jax.Array) -> Any:
        part = attend(chunk_numbers(rank())[q], chunk_numbers(source)[k], queries[q], keys[k])
        return _put(sums, q, _merge(sums[q], part))

    # The device's own keys first, which need no transfer.
    sums = _visit_own(add, tuple(map(_nothing, queries)), keys)
    sums = _visit_in_turn(functools.partial(_visit_others, add), sums, keys)
    # Only the sums are kept: keeping residuals of the visits would keep the keys of all devices.
    sums = jax.tree.map(lambda x: checkpoint_name(x, KEPT), sums)
    # Rounded once after the last sum, not per device.
    results = tuple(out.astype(q.dtype) for (out, _), q in zip(sums, queries, strict=True))
    return results, (queries, keys, segments, sums)  # pyright: ignore[reportReturnType]


def _visit_own(add: Any, sums: Any, keys: Pair) -> Any:
    """Pairs of a device's own chunks: each with itself, and the late one with the early one."""
    for q, k in ((EARLY, EARLY), (LATE, EARLY), (LATE, LATE)):
        sums = add(q, k, sums, keys, rank())
    return sums


def _visit_in_turn(visit: Any, carry: Any, keys: Pair) -> Any:
    """Applies `visit` to the keys of all other devices, one after the other."""

    def step(state: Any, distance: jax.Array) -> tuple[Any, None]:
        carry, keys = state
        # Forwarded before the computation, so that the transfer overlaps with it.
        following = ring_shift(keys)
        return (visit(carry, keys, _source(distance)), following), None

    last = num_ranks() - 1
    # The last visit is outside of the loop, because its keys need not be forwarded.
    (carry, keys), _ = lax.scan(step, (carry, ring_shift(keys)), jnp.arange(1, last))
    return visit(carry, keys, _source(jnp.array(last)))


def _visit_others(add: Any, sums: Any, keys: Pair, source: jax.Array) -> Any:
    """Visits the unmasked pairs with another device's chunks: two of four, for every device.

    The late chunk attends to all early ones, and the early one to no late one. For a preceding device, early
    attends to early; for a following device, late attends to late.
    """
    sums = add(LATE, EARLY, sums, keys, source)
    alike = (functools.partial(add, chunk, chunk) for chunk in (EARLY, LATE))
    return lax.cond(source < rank(), *alike, sums, keys, source)


def _backward(implementation: str | None, window: int | None, saved: Any, gradients: Pair) -> Any:
    queries, keys, segments, sums = saved
    attend = functools.partial(_attend, SharedSequences(*segments), implementation, window)
    grads = [grad.astype(jnp.float32) for grad in gradients]
    # The effect of the softmax normalization on the gradient, which is the same for all pairs of a query.
    shares = [jnp.sum(grad * out, axis=3) for grad, (out, _) in zip(grads, sums, strict=True)]

    def add(q: int, k: int, totals: Any, keys: Pair, source: jax.Array) -> Any:
        numbers = chunk_numbers(rank())[q], chunk_numbers(source)[k]
        # Recomputed: keeping the outputs of all pairs would need the memory that a ring avoids.
        (out, logsumexp), pull = jax.vjp(functools.partial(attend, *numbers), queries[q], keys[k])
        weight = _weight(logsumexp, sums[q][1]).transpose(0, 2, 1)
        # The output is the sum of parts times weights, with weight = exp(logsumexp of the part - total). The
        # derivative by a part's logsumexp is therefore its weight times (output of the part - total output).
        own = jnp.sum(grads[q] * out.astype(jnp.float32), axis=3)
        of_out = (weight[..., None] * grads[q]).astype(out.dtype)
        of_logsumexp = (weight * (own - shares[q])).transpose(0, 2, 1)
        grad_q, grad_k = pull((of_out, of_logsumexp))
        grad_queries, grad_keys = totals
        return (
            _put(grad_queries, q, grad_queries[q] + grad_q.astype(jnp.float32)),
            _put(grad_keys, k, grad_keys[k] + grad_k.astype(jnp.float32)),
        )

    no_queries, no_keys = (tuple(jnp.zeros(x.shape, jnp.float32) for x in pair) for pair in (queries, keys))

    def visit(carry: Any, keys: Pair, source: jax.Array) -> Any:
        grad_queries, grad_keys = carry
        # Gradients from other devices arrive while this device computes its own part. They are float32,
        # because bfloat16 would be rounded on each device.
        of_others = ring_shift(grad_keys)
        grad_queries, own = _visit_others(add, (grad_queries, no_keys), keys, source)
        return grad_queries, jax.tree.map(jnp.add, of_others, own)

    carry = _visit_own(add, (no_queries, no_keys), keys)
    grad_queries, grad_keys = _visit_in_turn(visit, carry, keys)
    # Each device now has the gradients of the next device's keys; one more shift returns them.
    totals = grad_queries, ring_shift(grad_keys)
    cast = [
        tuple(grad.astype(x.dtype) for grad, x in zip(pair, like, strict=True))
        for pair, like in zip(totals, (queries, keys), strict=True)
    ]
    return *cast, None


_ring.defvjp(_forward, _backward)


def _attend(
    shared: SharedSequences,
    implementation: str | None,
    window: int | None,
    q_number: jax.Array,
    k_number: jax.Array,
    q_BSNH: jax.Array,
    keys_BSKH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Queries of one chunk to keys and values of another: output [B, S, N, H] and logsumexp [B, N, S]."""
    k_BSKH, v_BSKH = jnp.split(keys_BSKH, 2, axis=2)
    return flash_attention(
        q_BSNH,
        k_BSKH,
        v_BSKH,
        window=window,
        # Queries are after all keys, before all keys, or aligned; the kernel skips masked blocks.
        query_start=(q_number - k_number) * q_BSNH.shape[1],
        query_segments_BT=shared.segments_of(q_number),
        key_segments_BS=shared.segments_of(k_number),
        implementation=implementation,
    )


def _put(pair: Any, chunk: int, value: Any) -> Any:
    """A pair with one element replaced."""
    return (value, pair[LATE]) if chunk == EARLY else (pair[EARLY], value)


def _source(distance: jax.Array) -> jax.Array:
    """The device whose keys are here after `distance` steps."""
    return (rank() - distance) % num_ranks()


def _nothing(q_BSNH: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch, size, heads, _ = q_BSNH.shape
    return jnp.zeros(q_BSNH.shape, jnp.float32), jnp.full((batch, heads, size), -jnp.inf, jnp.float32)


def _merge(sums: Any, part: Any) -> Any:
    """Merges attention over two disjoint sets of keys."""
    logsumexp_BNS = jnp.logaddexp(sums[1], part[1])
    parts = (
        out.astype(jnp.float32) * _weight(logsumexp, logsumexp_BNS).transpose(0, 2, 1)[..., None]
        for out, logsumexp in (sums, part)
    )
    return sum(parts), logsumexp_BNS


def _weight(part_BNS: jax.Array, whole_BNS: jax.Array) -> jax.Array:
    # If all keys so far are masked, both are -inf and their difference would be NaN.
    return jnp.where(
        jnp.isneginf(part_BNS), 0, jnp.exp(part_BNS - jnp.where(jnp.isneginf(whole_BNS), 0, whole_BNS))
    )
