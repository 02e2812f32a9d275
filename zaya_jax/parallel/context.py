"""Collectives between the devices that share a sequence: tokens of neighbors, all tokens, sums, and a ring.

In training each device has two chunks of each of its sequences, an early and a late one
(`mesh.zigzag_order`). This module treats them as two rows: [B, 2*S, ...] on a device becomes [2*B, S, ...],
in which the chunks of a sequence are consecutive rows. Code that works token by token or row by row needs no
change for this.

Letters: B sequences of this device, C devices per sequence, S tokens per chunk, R = 2*B rows, T = 2*C*S
  tokens
per sequence, X channels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.parallel.mesh import CONTEXT, SUM_DTYPE, sum_scatter

# Chunks 0 to 7 of a sequence on C = 4 devices, by `mesh.zigzag_order`:
#
#   device    0     1     2     3
#   early     0     1     2     3
#   late      7     6     5     4
#
# Neighboring chunks are on neighboring devices, except for the two in the middle, which are on the last one.
CHUNKS = 2
"""Number of chunks of a sequence that a device has."""


def num_ranks() -> int:
    """Returns the number of devices that share a sequence, C."""
    return lax.axis_size(CONTEXT)


def rank() -> jax.Array:
    """Returns the index of this device among those that share its sequences."""
    return lax.axis_index(CONTEXT)


def chunk_numbers(of_rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the indices, of 2*C, of the two chunks of a sequence that a device has."""
    return of_rank, CHUNKS * num_ranks() - 1 - of_rank


def to_chunks(x_BT: jax.Array) -> jax.Array:
    """Reshapes [B, 2*S, ...] into rows of one chunk each, [2*B, S, ...]."""
    return x_BT.reshape(CHUNKS * x_BT.shape[0], -1, *x_BT.shape[2:])


def from_chunks(x_RS: jax.Array) -> jax.Array:
    """Reshapes rows of one chunk each, [2*B, S, ...], into [B, 2*S, ...]: the inverse of `to_chunks`."""
    return x_RS.reshape(x_RS.shape[0] // CHUNKS, -1, *x_RS.shape[2:])


def both_chunks(x_RS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the early and the late chunk of each sequence, both [B, S, ...]."""
    pairs = x_RS.reshape(-1, CHUNKS, *x_RS.shape[1:])
    return pairs[:, 0], pairs[:, 1]


def join_chunks(early: jax.Array, late: jax.Array) -> jax.Array:
    """Returns the rows [2*B, S, ...] of both chunks of each sequence: the inverse of `both_chunks`."""
    return jnp.stack([early, late], axis=1).reshape(-1, *early.shape[1:])


def shift_from_previous_chunk(x_RS: jax.Array) -> jax.Array:
    """Returns, for each row, the preceding chunk of its sequence; zeros for the first chunk."""
    ranks, (early, late) = num_ranks(), both_chunks(x_RS)
    # In zigzag order an early chunk follows that of the previous device, and a late chunk that of the next
    # device. In the middle of the sequence the last device has both chunks.
    up, down = [(i, i + 1) for i in range(ranks - 1)], [(i + 1, i) for i in range(ranks - 1)]
    before_late = jnp.where(rank() == ranks - 1, early, lax.ppermute(late, CONTEXT, down))
    return join_chunks(lax.ppermute(early, CONTEXT, up), before_late)


def last_tokens_before(x_RSX: jax.Array, count: int) -> jax.Array:
    """Returns the last `count` tokens before each chunk, [R, count, ...]; zeros before the first chunk.

    In each round, every chunk sends to the next one the tokens that it received in the previous round, so a
    token that is needed k chunks later is sent k times.
    """
    size, pieces, sent = x_RSX.shape[1], [], x_RSX
    for _ in range(-(-count // size)):
        missing = count - size * len(pieces)
        # The last round passes on only the tokens that are still missing.
        sent = shift_from_previous_chunk(sent[:, max(size - missing, 0) :])
        pieces.insert(0, sent)
    return jnp.concatenate([x_RSX[:, :0], *pieces], axis=1)


@jax.custom_vjp
def all_tokens(x_RSX: jax.Array) -> jax.Array:
    """Gathers the whole sequences, [B, T, ...]. The gradients are reduce-scattered in float32."""
    gathered = lax.all_gather(x_RSX.reshape(-1, CHUNKS, *x_RSX.shape[1:]), CONTEXT)
    # Late chunks are in descending order of devices.
    early, late = gathered[:, :, 0], gathered[::-1, :, 1]
    in_order = jnp.moveaxis(jnp.concatenate([early, late]), 0, 1)
    return in_order.reshape(in_order.shape[0], -1, *in_order.shape[3:])


def _gather(x_RSX: jax.Array) -> tuple[jax.Array, None]:
    return all_tokens(x_RSX), None


# JAX's own transpose of the all-gather would sum in the type of the values; this one sums in float32.
def _scatter(_: None, grad_BTX: jax.Array) -> tuple[jax.Array]:
    batch, ranks = grad_BTX.shape[0], num_ranks()
    chunks = grad_BTX.astype(SUM_DTYPE).reshape(batch, CHUNKS * ranks, -1, *grad_BTX.shape[2:])
    chunks = jnp.moveaxis(chunks, 1, 0)
    of_ranks = jnp.stack([chunks[:ranks], chunks[: ranks - 1 : -1]], axis=2)
    summed = sum_scatter(of_ranks, CONTEXT)
    return (summed.reshape(-1, *summed.shape[2:]).astype(grad_BTX.dtype),)


all_tokens.defvjp(_gather, _scatter)


def all_max(x: jax.Array) -> jax.Array:
    """Returns the elementwise maximum over the devices of a sequence."""
    return lax.pmax(x, CONTEXT)


def all_sum(x: jax.Array) -> jax.Array:
    """Returns the elementwise sum over the devices of a sequence, the same bits on each."""
    return lax.psum(x, CONTEXT)


def ring_shift(tree: Any) -> Any:
    """Moves arrays one step around the ring of a sequence's devices, to the next device."""
    ranks = num_ranks()
    ring = [(i, (i + 1) % ranks) for i in range(ranks)]
    return jax.tree.map(functools.partial(lax.ppermute, axis_name=CONTEXT, perm=ring), tree)
