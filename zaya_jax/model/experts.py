"""Top-1 experts without capacity: tokens are sorted by expert once, and no token is dropped.

Letters: B batch, T time, P = B*T rows, D model width, E experts, F expert width, Q gate and up.
"""

import functools
from collections.abc import Mapping

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
    layer: Int[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "P D"]:
    """`prob * down(silu(gate(x)) * up(x))` by each row's expert; zeros for rows of class E, which skip.

    Args:
      x_PD: the block's normalised input.
      experts_P: the chosen class of each row, 0..E.
      probs_P: the router's probability of that class, float32.
      weights: of the block's "experts": gate_up_proj [E, D, Q, F] and down_proj [E, F, D], or, where
        `layer` says which is meant, those of all layers with their leading axis L. A few tokens
        then read the experts that they chose and no other.
      layer: number of the layer.
      implementation: of the grouped products, by the names that `grouped_matmul` has.
    """
    gate_up, down = (weights[name].astype(x_PD.dtype) for name in ("gate_up_proj", "down_proj"))
    num_experts, expert_width, width = down.shape[-3:]
    first_matrix = None if layer is None else layer * num_experts
    order_P = jnp.argsort(experts_P, stable=True)
    rank_P = jnp.argsort(order_P)
    sizes_E = expert_counts(experts_P, num_experts)
    multiply = functools.partial(grouped_matmul, first_matrix=first_matrix, implementation=implementation)
    sorted_PD = permute(x_PD, order_P, rank_P)
    weights_P = permute(probs_P, order_P, rank_P)
    gate_up = gate_up.reshape(-1, width, 2 * expert_width)
    if implementation == "pallas":
        hidden_PF = grouped_swiglu(
            sorted_PD, gate_up, sizes_E, first_matrix=first_matrix, implementation=implementation
        )
        hidden_PF = (weights_P[:, None] * hidden_PF).astype(hidden_PF.dtype)
    else:
        hidden_PG = checkpoint_name(multiply(sorted_PD, gate_up, sizes_E), KEPT)
        hidden_PF = weighted_swiglu(hidden_PG, weights_P)
    out_PD = multiply(hidden_PF, down.reshape(-1, expert_width, width), sizes_E)
    return checkpoint_name(permute(out_PD, rank_P, order_P), KEPT)


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
    grad_gate_PF = grad_PF * up_PF * sigmoid_PF * (1 + gate_PF * (1 - sigmoid_PF))
    return jnp.concatenate([grad_gate_PF, grad_PF * gate_PF * sigmoid_PF], axis=-1), grad_weights_P


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
