"""Sorting rows by group and back, and the activation between the experts' two products.

Letters are those of the package; Q = 2*F.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import KEPT

MAX_COMPARED = 64
"""Largest number of rows that are compared with each other instead of sorted."""


class Grouping(NamedTuple):
    """Permutation that sorts rows by group; rows without a group come last."""

    order_P: jax.Array
    """Index of the row at each sorted position."""
    rank_P: jax.Array
    """Sorted position of each row, the inverse of `order_P`."""
    sizes_E: jax.Array
    """Number of rows of each group."""

    def sort(self, x_P: jax.Array) -> jax.Array:
        """Returns rows [P, ...] sorted by group."""
        return _permute(x_P, self.order_P, self.rank_P)

    def unsort(self, x_P: jax.Array) -> jax.Array:
        """Inverse of `sort`: returns rows in their original order."""
        return _permute(x_P, self.rank_P, self.order_P)


def group_rows(groups_P: jax.Array, num_groups: int) -> Grouping:
    """Returns the stable permutation that sorts rows by group.

    Args:
      groups_P: group of each row, int32; `num_groups` or more for a row without a group.
      num_groups: number of groups, E.
    """
    order_P, rank_P = (_compare if len(groups_P) <= MAX_COMPARED else _sort)(groups_P)
    # Two integers for each row are small to keep, and without them the backward pass would sort again.
    order_P, rank_P = (checkpoint_name(x_P, KEPT) for x_P in (order_P, rank_P))
    return Grouping(order_P, rank_P, count_rows(groups_P, num_groups))


def _sort(groups_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Order and rank of many rows."""
    order_P = jnp.argsort(groups_P, stable=True)
    places_P = jnp.arange(order_P.shape[0], dtype=order_P.dtype)
    # unique_indices: each position is written once, so that the scatter needs no additions.
    return order_P, jnp.zeros_like(order_P).at[order_P].set(places_P, unique_indices=True)


def _compare(groups_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Order and rank of few rows: comparing each with all takes two operations, and no sort or scatter."""
    places_P = jnp.arange(len(groups_P), dtype=jnp.int32)
    other, own = groups_P[None], groups_P[:, None]
    is_before_PP = (other < own) | (other == own) & (places_P < places_P[:, None])
    rank_P = jnp.sum(is_before_PP, axis=1, dtype=jnp.int32)
    order_P = jnp.sum(jnp.where(rank_P == places_P[:, None], places_P, 0), axis=1, dtype=jnp.int32)
    return order_P, rank_P


def count_rows(groups_P: jax.Array, num_groups: int) -> jax.Array:
    """Counts the rows of each of the first `num_groups` groups, int32 [E]."""
    return jnp.sum(groups_P[:, None] == jnp.arange(num_groups), axis=0, dtype=jnp.int32)


@jax.custom_vjp
def _permute(x_P: jax.Array, order_P: jax.Array, inverse_P: jax.Array) -> jax.Array:
    """Returns `x[order]`, whose gradient is a gather too; JAX would use a scatter, which is slow."""
    del inverse_P
    return x_P[order_P]


def _permute_forward(x_P, order_P, inverse_P):
    return x_P[order_P], inverse_P


def _permute_backward(inverse_P, grad_P):
    return grad_P[inverse_P], None, None


_permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def weighted_swiglu(gate_up_PQ: jax.Array, scale_P: jax.Array) -> jax.Array:
    """Computes `scale * silu(gate) * up` of the two halves of each row, [P, F].

    The custom backward pass writes both halves of the gradient at once; JAX would pad each to the whole width
    and add them.
    """
    gate_PF, up_PF = _halves(gate_up_PQ)
    return (scale_P[:, None] * (jax.nn.silu(gate_PF) * up_PF)).astype(gate_up_PQ.dtype)


def _swiglu_forward(gate_up_PQ, scale_P):
    return weighted_swiglu(gate_up_PQ, scale_P), (gate_up_PQ, scale_P)


def _swiglu_backward(saved, grad_PF):
    gate_up_PQ, scale_P = saved
    gate_PF, up_PF = _halves(gate_up_PQ)
    sigmoid_PF = jax.nn.sigmoid(gate_PF)
    grad_scale_P = jnp.sum(grad_PF * (gate_PF * sigmoid_PF * up_PF), axis=-1, dtype=scale_P.dtype)
    slope_PF = up_PF * (1 + gate_PF * (1 - sigmoid_PF))
    common_PF = grad_PF * scale_P[:, None] * sigmoid_PF
    # Stacked before they are rounded: XLA then vectorizes the loop over both halves on CPUs.
    grad_P2F = jnp.stack([slope_PF * common_PF, gate_PF * common_PF], axis=1)
    return grad_P2F.reshape(gate_up_PQ.shape).astype(gate_up_PQ.dtype), grad_scale_P


def _halves(gate_up_PQ: jax.Array) -> list[jax.Array]:
    """Returns gate and up, at least in float32: operations on bfloat16 would each round their result."""
    dtype = jnp.promote_types(gate_up_PQ.dtype, jnp.float32)
    return jnp.split(gate_up_PQ.astype(dtype), 2, axis=-1)


weighted_swiglu.defvjp(_swiglu_forward, _swiglu_backward)
