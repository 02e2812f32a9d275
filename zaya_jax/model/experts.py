"""Top-1 experts without capacity: tokens are sorted by expert once, and no token is dropped.

Letters: B batch, T time, P = B*T rows, D model width, E experts, F expert width, Q gate and up.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import Implementation, grouped_matmul, grouped_swiglu
from zaya_jax.model.remat import KEPT


def apply_experts(
    x_PD: Float[Array, "P D"],
    experts_P: Int[Array, " P"],
    probs_P: Float[Array, " P"],
    weights: Mapping,
    *,
    stacked: Mapping | None = None,
    layer: Int[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "P D"]:
    """`prob * down(silu(gate(x)) * up(x))` by each row's expert; zeros for rows of class E, which skip.

    Args:
      x_PD: the block's normalised input.
      experts_P: the chosen class of each row, 0..E.
      probs_P: the router's probability of that class, float32.
      weights: of the block's "experts": gate_up_proj [E, D, Q, F] and down_proj [E, F, D].
      stacked: those of all layers, with their leading axis L, and no gradient: read in place where the
        implementation can, so that no slice of them is copied, and a few tokens read the experts
        that they chose and no other.
      layer: number of the layer among them.
      implementation: of the grouped products, by the names that `grouped_matmul` has.
    """
    gate_up_EDG, down_EFD = _matrices(weights, x_PD.dtype)
    gate_up_MDG, down_MFD = (None, None) if stacked is None else _matrices(stacked, x_PD.dtype)
    first_matrix = 0 if layer is None else layer * down_EFD.shape[0]
    order_P, rank_P = _sort(experts_P)
    sizes_E = expert_counts(experts_P, down_EFD.shape[0])
    multiply = functools.partial(grouped_matmul, first_matrix=first_matrix, implementation=implementation)
    sorted_PD = permute(x_PD, order_P, rank_P)
    weights_P = permute(probs_P, order_P, rank_P)
    if implementation == "pallas":
        hidden_PF = grouped_swiglu(
            sorted_PD,
            gate_up_EDG,
            sizes_E,
            stack_MDQ=gate_up_MDG,
            first_matrix=first_matrix,
            implementation=implementation,
        )
        hidden_PF = (weights_P[:, None] * hidden_PF).astype(hidden_PF.dtype)
    else:
        hidden_PG = multiply(sorted_PD, gate_up_EDG, sizes_E, stack_MDF=gate_up_MDG)
        hidden_PF = weighted_swiglu(checkpoint_name(hidden_PG, KEPT), weights_P)
    out_PD = multiply(hidden_PF, down_EFD, sizes_E, stack_MDF=down_MFD)
    return checkpoint_name(permute(out_PD, rank_P, order_P), KEPT)


def _matrices(weights: Mapping, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Gate and up side by side, and down, with all leading axes as one."""
    gate_up, down = (weights[name].astype(dtype) for name in ("gate_up_proj", "down_proj"))
    expert_width, width = down.shape[-2:]
    return gate_up.reshape(-1, width, 2 * expert_width), down.reshape(-1, expert_width, width)


def _sort(experts_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which row comes at each place, by expert, and which place each row gets."""
    order_P = jnp.argsort(experts_P, stable=True)
    places_P = jnp.arange(order_P.shape[0], dtype=order_P.dtype)
    rank_P = jnp.zeros_like(order_P).at[order_P].set(places_P, unique_indices=True)
    return checkpoint_name(order_P, KEPT), checkpoint_name(rank_P, KEPT)


@jax.custom_vjp
def weighted_swiglu(gate_up_PG: Float[Array, "P G"], weights_P: Float[Array, " P"]) -> Float[Array, "P F"]:
    """`weight * silu(gate) * up` of the two halves of each row, G = 2*F.

    An expert's output is weighted here, before its last product: that is the same at the width F, and
    the backward pass then needs no unweighted output. A backward pass of its own writes both halves of the
    gradient in one go; JAX would pad each to the whole width and add them up.
    """
    gate_PF, up_PF = jnp.split(gate_up_PG, 2, axis=-1)
    return (weights_P[:, None] * (jax.nn.silu(gate_PF) * up_PF)).astype(gate_up_PG.dtype)


def _weighted_swiglu_forward(gate_up_PG, weights_P):
    return weighted_swiglu(gate_up_PG, weights_P), (gate_up_PG, weights_P)


def _weighted_swiglu_backward(saved, grad_PF):
    gate_up_PG, weights_P = saved
    gate_PF, up_PF = jnp.split(gate_up_PG, 2, axis=-1)
    sigmoid_PF = jax.nn.sigmoid(gate_PF)
    grad_weights_P = jnp.sum(grad_PF * (gate_PF * sigmoid_PF * up_PF), axis=-1, dtype=weights_P.dtype)
    grad_PF = (grad_PF * weights_P[:, None]).astype(grad_PF.dtype)
    # One expression for both halves: one loop writes them, where a concatenation would copy them.
    is_gate_21 = (jnp.arange(2) == 0)[:, None]
    gate_P1F, up_P1F, sigmoid_P1F = (x[:, None] for x in (gate_PF, up_PF, sigmoid_PF))
    slope_P2F = jnp.where(is_gate_21, up_P1F * (1 + gate_P1F * (1 - sigmoid_P1F)), gate_P1F)
    grad_P2F = slope_P2F * (grad_PF * sigmoid_PF)[:, None]
    return grad_P2F.reshape(gate_up_PG.shape).astype(gate_up_PG.dtype), grad_weights_P


weighted_swiglu.defvjp(_weighted_swiglu_forward, _weighted_swiglu_backward)


def expert_counts(experts_P: Int[Array, " P"], num_classes: int) -> Int[Array, " X"]:
    """How many rows chose each of the first `num_classes` classes."""
    return jnp.sum(experts_P[:, None] == jnp.arange(num_classes), axis=0, dtype=jnp.int32)


@jax.custom_vjp
def permute(
    x_PD: Float[Array, "P *D"], order_P: Int[Array, " P"], inverse_P: Int[Array, " P"]
) -> Float[Array, "P *D"]:
    """`x[order]`, whose gradient is again a gather: JAX would make a scatter of it, which is slow."""
    del inverse_P
    return x_PD[order_P]


def _permute_forward(x_PD, order_P, inverse_P):
    return x_PD[order_P], inverse_P


def _permute_backward(inverse_P, grad_PD):
    return grad_PD[inverse_P], None, None


permute.defvjp(_permute_forward, _permute_backward)
