"""What the devices of one sequence say to each other: neighbours' tokens, all of them, sums, or a ring.

In training each device has two chunks of every one of its sequences, an early and a late one
(`mesh.zigzag_order`), and here they are two rows: [B, 2*S, ...] on a device is [2*B, S, ...], the chunks of a
row behind each other. So all that works token by token, or row by row, needs to know of none of this.

Letters: B sequences of this device, C devices of a sequence, S tokens of a chunk, R = 2*B rows, T = 2*C*S
tokens of a sequence, X channels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.parallel.mesh import CONTEXT, SUM_DTYPE

CHUNKS = 2
"""Of a sequence, on a device."""


def num_ranks() -> int:
    """How many devices share a sequence, C."""
    return lax.axis_size(CONTEXT)


def rank() -> jax.Array:
    """The number of this device among those of its sequences."""
    return lax.axis_index(CONTEXT)


def chunk_numbers(of_rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of the 2*C chunks of a sequence a device has."""
    return of_rank, CHUNKS * num_ranks() - 1 - of_rank


def to_chunks(x_BT: jax.Array) -> jax.Array:
    """[B, 2*S, ...] as rows of a chunk each, [2*B, S, ...]."""
    return x_BT.reshape(CHUNKS * x_BT.shape[0], -1, *x_BT.shape[2:])


def from_chunks(x_RS: jax.Array) -> jax.Array:
    """What `to_chunks` was given, [B, 2*S, ...]."""
    return x_RS.reshape(x_RS.shape[0] // CHUNKS, -1, *x_RS.shape[2:])


def both_chunks(x_RS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The early and the late chunk of each sequence, [B, S, ...] both."""
    pairs = x_RS.reshape(-1, CHUNKS, *x_RS.shape[1:])
    return pairs[:, 0], pairs[:, 1]


def join_chunks(early: jax.Array, late: jax.Array) -> jax.Array:
    """Rows [2*B, S, ...] of both chunks of each sequence."""
    return jnp.stack([early, late], axis=1).reshape(-1, *early.shape[1:])


def from_chunk_before(x_RS: jax.Array) -> jax.Array:
    """What the chunk before has of each row; zeros where there is none.

    Early chunks come from the device before, late ones from the one behind, and in the middle of the
    sequence the last device has both.
    """
    ranks, (early, late) = num_ranks(), both_chunks(x_RS)
    up, down = [(i, i + 1) for i in range(ranks - 1)], [(i + 1, i) for i in range(ranks - 1)]
    before_late = jnp.where(rank() == ranks - 1, early, lax.ppermute(late, CONTEXT, down))
    return join_chunks(lax.ppermute(early, CONTEXT, up), before_late)


def last_tokens_before(x_RSX: jax.Array, count: int) -> jax.Array:
    """The last `count` tokens before each chunk, [R, count, ...]; zeros before the first one.

    They come from chunk to chunk, once for each chunk that they reach back; no token comes twice.
    """
    size, pieces, sent = x_RSX.shape[1], [], x_RSX
    for _ in range(-(-count // size)):
        missing = count - size * len(pieces)
        # Whoever hands on what came to it hands on no more than what is still asked for.
        sent = from_chunk_before(sent[:, max(size - missing, 0) :])
        pieces.insert(0, sent)
    return jnp.concatenate([x_RSX[:, :0], *pieces], axis=1)


@jax.custom_vjp
def all_tokens(x_RSX: jax.Array) -> jax.Array:
    """The whole sequences, [B, T, ...]: gathered once, and their gradients reduce-scattered in float32."""
    gathered = lax.all_gather(x_RSX.reshape(-1, CHUNKS, *x_RSX.shape[1:]), CONTEXT)
    early, late = gathered[:, :, 0], gathered[::-1, :, 1]
    in_order = jnp.moveaxis(jnp.concatenate([early, late]), 0, 1)
    return in_order.reshape(in_order.shape[0], -1, *in_order.shape[3:])


def _gather(x_RSX: jax.Array) -> tuple[jax.Array, None]:
    return all_tokens(x_RSX), None


def _scatter(_: None, grad_BTX: jax.Array) -> tuple[jax.Array]:
    batch, ranks = grad_BTX.shape[0], num_ranks()
    chunks = grad_BTX.astype(SUM_DTYPE).reshape(batch, CHUNKS * ranks, -1, *grad_BTX.shape[2:])
    chunks = jnp.moveaxis(chunks, 1, 0)
    of_ranks = jnp.stack([chunks[:ranks], chunks[: ranks - 1 : -1]], axis=2)
    summed = lax.psum_scatter(of_ranks, CONTEXT)
    return (summed.reshape(-1, *summed.shape[2:]).astype(grad_BTX.dtype),)


all_tokens.defvjp(_gather, _scatter)


def all_max(x: jax.Array) -> jax.Array:
    """The largest of the values that a sequence's devices have, element by element."""
    return lax.pmax(x, CONTEXT)


def all_sum(x: jax.Array) -> jax.Array:
    """The sum of the values that a sequence's devices have, element by element; the same bits on each."""
    return lax.psum(x, CONTEXT)


def to_next(tree: Any) -> Any:
    """A step around the ring of a sequence's devices: each gets what the one before it has."""
    ranks = num_ranks()
    around = [(i, (i + 1) % ranks) for i in range(ranks)]
    return jax.tree.map(functools.partial(lax.ppermute, axis_name=CONTEXT, perm=around), tree)
