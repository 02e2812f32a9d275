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
    weights: Mapping,
    *,
    layer: Int[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "P D"]:
    """`down(silu(gate(x)) * up(x))` by each row's expert; zeros for rows of class E, which skip.

    Args:
      x_PD: the block's normalised input.
      experts_P: the chosen class of each row, 0..E.
      weights: of the block's "experts": gate_up_proj [E, D, Q, F] and down_proj [E, F, D], or, where
        `layer` says which is meant, those of all layers with their leading axis L. A few tokens
        then read the experts that they chose and no other.
      layer: number of the layer.
      implementation: of the grouped products.
    """
    gate_up, down = (weights[name].astype(x_PD.dtype) for name in ("gate_up_proj", "down_proj"))
    num_experts, expert_width, width = down.shape[-3:]
    first_matrix = None if layer is None else layer * num_experts
    order_P = jnp.argsort(experts_P, stable=True)
    rank_P = jnp.argsort(order_P)
    sizes_E = expert_counts(experts_P, num_experts)
    sorted_PD = permute(x_PD, order_P, rank_P)
    multiply = functools.partial(grouped_matmul, first_matrix=first_matrix, implementation=implementation)
    gate_up = gate_up.reshape(-1, width, 2 * expert_width)
    if implementation == "pallas":
        hidden_PF = grouped_swiglu(
            sorted_PD, gate_up, sizes_E, first_matrix=first_matrix, implementation=implementation
        )
    else:
        hidden_PF = swiglu(checkpoint_name(multiply(sorted_PD, gate_up, sizes_E), KEPT))
    out_PD = multiply(hidden_PF, down.reshape(-1, expert_width, width), sizes_E)
    out_PD = checkpoint_name(out_PD, KEPT)
    return permute(out_PD, rank_P, order_P)


@jax.custom_vjp
def swiglu(gate_up_PG: Float[Array, "P G"]) -> Float[Array, "P F"]:
    """`silu(gate) * up` of the two halves of each row, G = 2*F.

    The backward pass of its own writes both halves of the gradient in one go; JAX would pad each to
    the whole width and add them up.
    """
    gate_PF, up_PF = jnp.split(gate_up_PG, 2, axis=-1)
    return jax.nn.silu(gate_PF) * up_PF


def _swiglu_forward(gate_up_PG):
    return swiglu(gate_up_PG), gate_up_PG


def _swiglu_backward(gate_up_PG, grad_PF):
    gate_PF, up_PF = jnp.split(gate_up_PG, 2, axis=-1)
    sigmoid_PF = jax.nn.sigmoid(gate_PF)
    grad_gate_PF = grad_PF * up_PF * sigmoid_PF * (1 + gate_PF * (1 - sigmoid_PF))
    return (jnp.concatenate([grad_gate_PF, grad_PF * gate_PF * sigmoid_PF], axis=-1),)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def expert_counts(experts_P: Int[Array, " P"], num_classes: int) -> Int[Array, " X"]:
    """How many rows chose each of the first `num_classes` classes."""
    return jnp.sum(experts_P[:, None] == jnp.arange(num_classes), axis=0, dtype=jnp.int32)


@jax.custom_vjp
def permute(
    x_PD: Float[Array, "P D"], order_P: Int[Array, " P"], inverse_P: Int[Array, " P"]
) -> Float[Array, "P D"]:
    """`x[order]`, whose gradient is again a gather: JAX would make a scatter of it, which is slow."""
    del inverse_P
    return x_PD[order_P]


def _permute_forward(x_PD, order_P, inverse_P):
    return x_PD[order_P], inverse_P


def _permute_backward(inverse_P, grad_PD):
    return grad_PD[inverse_P], None, None


permute.defvjp(_permute_forward, _permute_backward)
