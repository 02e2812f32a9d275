"""`grouped_matmul` and `grouped_swiglu` with their gradients, by the kernels of `triton.py`."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.grouped_matmul import triton
from pallas_kernels.grouped_matmul.triton import Blocks, Tile

KEPT = "grouped_swiglu"
"""Name (`jax.ad_checkpoint.checkpoint_name`) of gate, up and the result of `grouped_swiglu`."""
BLOCKS = Blocks(
    product=Tile(rows=128, columns=128, contracted=64, num_warps=8, num_stages=2),
    swiglu=Tile(rows=128, columns=64, contracted=64, num_warps=8, num_stages=2),
    grad_weights=Tile(rows=128, columns=128, contracted=64, num_warps=8, num_stages=2),
)
"""Chosen from what the compiler says for MI300X (registers, local memory); no time was measured."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def product(rows_PD, weights_EDF, group_sizes_E, stack_MDF, first_matrix, blocks):
    """See `grouped_matmul`. Reads the stack; the weights take the gradient."""
    if rows_PD.size == 0:
        return jnp.zeros((rows_PD.shape[0], weights_EDF.shape[2]), rows_PD.dtype)
    return triton.product(rows_PD, stack_MDF, group_sizes_E, first_matrix, blocks.product)


def _forward(rows_PD, weights_EDF, group_sizes_E, stack_MDF, first_matrix, blocks):
    out_PF = product(rows_PD, weights_EDF, group_sizes_E, stack_MDF, first_matrix, blocks)
    return out_PF, (rows_PD, group_sizes_E, stack_MDF, first_matrix)


def _backward(blocks, saved, grad_PF, name="grouped_matmul"):
    rows_PD, group_sizes_E, stack_MDF, first_matrix = saved
    if rows_PD.size == 0:
        no_weights_EDF = jnp.zeros((*group_sizes_E.shape, *stack_MDF.shape[1:]), stack_MDF.dtype)
        return jnp.zeros_like(rows_PD), no_weights_EDF, None, None, None
    first_matrix = jnp.asarray(first_matrix)  # a constant comes back from a checkpoint as numpy's
    grad_rows_PD = triton.product(
        grad_PF, stack_MDF, group_sizes_E, first_matrix, blocks.product, name=name, transposed=True
    )
    grad_weights_EDF = triton.grad_weights(rows_PD, grad_PF, group_sizes_E, blocks.grad_weights, name=name)
    return grad_rows_PD, grad_weights_EDF, None, None, None


product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def swiglu(rows_PD, weights_EDQ, group_sizes_E, stack_MDQ, first_matrix, blocks):
    """See `grouped_swiglu`."""
    return _swiglu_forward(rows_PD, weights_EDQ, group_sizes_E, stack_MDQ, first_matrix, blocks)[0]


def _swiglu_forward(rows_PD, weights_EDQ, group_sizes_E, stack_MDQ, first_matrix, blocks):
    saved = rows_PD, group_sizes_E, stack_MDQ, first_matrix
    if rows_PD.size == 0:
        gate_up_PQ = jnp.zeros((rows_PD.shape[0], weights_EDQ.shape[2]), rows_PD.dtype)
        return jnp.split(gate_up_PQ, 2, axis=1)[0], (saved, gate_up_PQ)
    out_PF, gate_up_PQ = (
        checkpoint_name(x, KEPT)
        for x in triton.swiglu(rows_PD, stack_MDQ, group_sizes_E, first_matrix, blocks.swiglu)
    )
    return out_PF, (saved, gate_up_PQ)


def _swiglu_backward(blocks, saved, grad_PF):
    saved, gate_up_PQ = saved
    gate_PF, up_PF = jnp.split(gate_up_PQ.astype(jnp.float32), 2, axis=1)
    sigmoid_PF = jax.nn.sigmoid(gate_PF)
    grad_gate_PF = grad_PF * up_PF * sigmoid_PF * (1 + gate_PF * (1 - sigmoid_PF))
    grad_gate_up_PQ = jnp.concatenate([grad_gate_PF, grad_PF * gate_PF * sigmoid_PF], axis=1)
    return _backward(blocks, saved, grad_gate_up_PQ.astype(gate_up_PQ.dtype), "grouped_swiglu")


swiglu.defvjp(_swiglu_forward, _swiglu_backward)
