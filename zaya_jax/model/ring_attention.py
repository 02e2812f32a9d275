"""Attention around a ring: keys go from device to device, and queries add up what each pair of chunks gives.

[Ring] section 3, with the even shares of [Llama3] section 3.3.2. What a pair of chunks gives is put together
by its logsumexp, as blocks are within a kernel. Nothing of other devices is kept for the backward pass: keys
go round a second time, and with them what their gradients have come to.

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
from zaya_jax.model.shared_sequences import SharedSequences
from zaya_jax.parallel.context import (
    both_chunks,
    chunk_numbers,
    join_chunks,
    num_ranks,
    rank,
    to_next,
)

Pair = tuple[jax.Array, jax.Array]
"""Of the early and the late chunks."""
EARLY, LATE = 0, 1
"""In a pair."""


def attend_around(
    shared: SharedSequences,
    implementation: str | None,
    window: int | None,
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
) -> jax.Array:
    """Causal softmax attention of chunks to their whole sequences.

    Args:
      shared: where the chunks stand.
      implementation: of `flash_attention`, for each pair of chunks.
      window: tokens that a query sees; None for all.
      q_RSNH: rotated queries of the chunks.
      k_RSKH: rotated keys of the chunks.
      v_RSKH: values of the chunks.

    Returns:
      [R, S, N, H] in the dtype of the queries.
    """
    operands = both_chunks(q_RSNH), both_chunks(jnp.concatenate([k_RSKH, v_RSKH], axis=2))
    segments = shared.segments_RS, shared.segments_BT
    found: Any = _ring(*operands, segments, implementation, window)
    return join_chunks(*found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _ring(queries: Pair, keys: Pair, segments: Any, implementation: str | None, window: int | None) -> Pair:
    results, _ = _forward(queries, keys, segments, implementation, window)
    return results


def _forward(
    queries: Pair, keys: Pair, segments: Any, implementation: str | None, window: int | None
) -> tuple[Pair, Any]:
    attend = functools.partial(_attend, SharedSequences(*segments), implementation, window)

    def add(q: int, k: int, sums: Any, keys: Pair, source: jax.Array) -> Any:
        found = attend(chunk_numbers(rank())[q], chunk_numbers(source)[k], queries[q], keys[k])
        return _put(sums, q, _merge(sums[q], found))

    # A device's own first: what it has is not sent to it.
    sums = _visit_own(add, tuple(map(_nothing, queries)), keys)
    sums = _visit_in_turn(functools.partial(_visit_others, add), sums, keys)
    # And nothing of the visits, or all keys that have come by would be kept.
    sums = jax.tree.map(lambda x: checkpoint_name(x, KEPT), sums)
    # Rounded behind the last sum, not at each device.
    results = tuple(out.astype(q.dtype) for (out, _), q in zip(sums, queries, strict=True))
    return results, (queries, keys, segments, sums)  # pyright: ignore[reportReturnType]


def _visit_own(add: Any, sums: Any, keys: Pair) -> Any:
    """Pairs of a device's own chunks: each with itself, and the late one with the early one."""
    for q, k in ((EARLY, EARLY), (LATE, EARLY), (LATE, LATE)):
        sums = add(q, k, sums, keys, rank())
    return sums


def _visit_in_turn(visit: Any, carry: Any, keys: Pair) -> Any:
    """What visits to the keys of all other devices make of a carry."""

    def step(state: Any, distance: jax.Array) -> tuple[Any, None]:
        carry, keys = state
        # Sent on before they are attended to: nobody waits for them before the step is over.
        following = to_next(keys)
        return (visit(carry, keys, _source(distance)), following), None

    last = num_ranks() - 1
    # The last visit is none of the loop's: nobody asks for its keys.
    (carry, keys), _ = lax.scan(step, (carry, to_next(keys)), jnp.arange(1, last))
    return visit(carry, keys, _source(jnp.array(last)))


def _visit_others(add: Any, sums: Any, keys: Pair, source: jax.Array) -> Any:
    """Pairs with another device's chunks that are seen: two of four, whole, whichever device it is.

    The late chunk sees all early ones, and the early one no late one. Of a device before this one the early
    chunk is seen by the early one, of a device behind it the late one by the late one.
    """
    sums = add(LATE, EARLY, sums, keys, source)
    alike = (functools.partial(add, chunk, chunk) for chunk in (EARLY, LATE))
    return lax.cond(source < rank(), *alike, sums, keys, source)


def _backward(implementation: str | None, window: int | None, saved: Any, gradients: Pair) -> Any:
    queries, keys, segments, sums = saved
    attend = functools.partial(_attend, SharedSequences(*segments), implementation, window)
    grads = [grad.astype(jnp.float32) for grad in gradients]
    # What moving a pair's weight against the others' changes: the same for all pairs of a query.
    shares = [jnp.sum(grad * out, axis=3) for grad, (out, _) in zip(grads, sums, strict=True)]

    def add(q: int, k: int, found: Any, keys: Pair, source: jax.Array) -> Any:
        numbers = chunk_numbers(rank())[q], chunk_numbers(source)[k]
        # Forward once more: kept, the outputs of all pairs would be what a ring is there to avoid.
        (out, logsumexp), pull = jax.vjp(functools.partial(attend, *numbers), queries[q], keys[k])
        weight = _weight(logsumexp, sums[q][1]).transpose(0, 2, 1)
        # The output of all is the sum of parts times weights, and a weight is exp(part - all): so a part's
        # logsumexp moves it by its weight times (the part's output - that of all).
        own = jnp.sum(grads[q] * out.astype(jnp.float32), axis=3)
        of_out = (weight[..., None] * grads[q]).astype(out.dtype)
        of_logsumexp = (weight * (own - shares[q])).transpose(0, 2, 1)
        grad_q, grad_k = pull((of_out, of_logsumexp))
        grad_queries, grad_keys = found
        return (
            _put(grad_queries, q, grad_queries[q] + grad_q.astype(jnp.float32)),
            _put(grad_keys, k, grad_keys[k] + grad_k.astype(jnp.float32)),
        )

    no_queries, no_keys = (tuple(jnp.zeros(x.shape, jnp.float32) for x in pair) for pair in (queries, keys))

    def visit(carry: Any, keys: Pair, source: jax.Array) -> Any:
        grad_queries, grad_keys = carry
        # What others have found of these keys comes while this device finds its own part. In float32, as all
        # that is summed over devices: in bfloat16 each stop would round once more.
        of_others = to_next(grad_keys)
        grad_queries, own = _visit_others(add, (grad_queries, no_keys), keys, source)
        return grad_queries, jax.tree.map(jnp.add, of_others, own)

    carry = _visit_own(add, (no_queries, no_keys), keys)
    grad_queries, grad_keys = _visit_in_turn(visit, carry, keys)
    # The last device has gradients of the keys of the one behind it: one more step brings them home.
    found = grad_queries, to_next(grad_keys)
    as_given = [
        tuple(grad.astype(x.dtype) for grad, x in zip(pair, like, strict=True))
        for pair, like in zip(found, (queries, keys), strict=True)
    ]
    return *as_given, None


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
        # Behind all of the keys, before all of them, or at the first: the kernel visits what is seen.
        query_start=(q_number - k_number) * q_BSNH.shape[1],
        query_segments_BT=shared.segments_of(q_number),
        key_segments_BS=shared.segments_of(k_number),
        implementation=implementation,
    )


def _put(pair: Any, chunk: int, value: Any) -> Any:
    """A pair with another value of one chunk."""
    return (value, pair[LATE]) if chunk == EARLY else (pair[EARLY], value)


def _source(distance: jax.Array) -> jax.Array:
    """The device whose keys are here when they have gone so many steps."""
    return (rank() - distance) % num_ranks()


def _nothing(q_BSNH: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch, size, heads, _ = q_BSNH.shape
    return jnp.zeros(q_BSNH.shape, jnp.float32), jnp.full((batch, heads, size), -jnp.inf, jnp.float32)


def _merge(sums: Any, found: Any) -> Any:
    """Two parts of a softmax over keys as one."""
    logsumexp_BNS = jnp.logaddexp(sums[1], found[1])
    parts = (
        out.astype(jnp.float32) * _weight(part, logsumexp_BNS).transpose(0, 2, 1)[..., None]
        for out, part in (sums, found)
    )
    return sum(parts), logsumexp_BNS


def _weight(part_BNS: jax.Array, whole_BNS: jax.Array) -> jax.Array:
    # Of keys that nobody sees, in a sum in which nobody sees any yet: their difference would be NaN.
    return jnp.where(
        jnp.isneginf(part_BNS), 0, jnp.exp(part_BNS - jnp.where(jnp.isneginf(whole_BNS), 0, whole_BNS))
    )
