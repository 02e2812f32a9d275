"""Grouped product and grouped SwiGLU with the kernels of `triton.py`, and their gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.grouped_matmul import triton
from pallas_kernels.grouped_matmul.operands import Operands
from pallas_kernels.grouped_matmul.triton import Blocks, Tile

BLOCKS = Blocks(
    product=Tile(rows=128, columns=256, contracted=32, num_warps=8, num_stages=2),
    swiglu=Tile(rows=128, columns=64, contracted=64, num_warps=4, num_stages=2),
    grad_weights=Tile(rows=128, columns=128, contracted=32, num_warps=4),
)
"""Block sizes, chosen by what the compiler reports for MI300X (registers, local memory, reads of it in the
main loop); no time was measured.

With 64 x 64 entries per wavefront the products need half of the bandwidth of local memory, with 64 x 32 three
quarters. If an operand must be transposed, a thread must read at least 16 of its entries for Triton to
transpose them in registers; otherwise each entry goes through local memory by itself. With a pipeline the
gradient of weights would lose that.
"""
FLOAT32_BLOCKS = dataclasses.replace(BLOCKS, product=dataclasses.replace(BLOCKS.product, contracted=16))
"""Settings for float32: with 32 contracted entries Triton would compile a race (`check_schedule`)."""
FEW_ROWS = 128
"""Number of rows up to which reading the matrices takes the time, as in decoding."""
FEW_ROWS_BLOCKS = dataclasses.replace(
    BLOCKS,
    product=Tile(rows=16, columns=64, contracted=128, num_warps=4, num_stages=2),
    swiglu=Tile(rows=16, columns=32, contracted=128, num_warps=4, num_stages=2),
)
"""Settings for few rows. Blocks are narrow, so that enough programs read a matrix at the same time: one of
2,048 x 2,048 is read by 32, and by 8 with the columns of `BLOCKS`. On an H200 the product of one row of
ZAYA1-8B took 29 us, 69 with `BLOCKS`, and that of 64 rows 58, 84 with `BLOCKS`."""
FLOAT32_FEW_ROWS_BLOCKS = dataclasses.replace(
    FEW_ROWS_BLOCKS,
    product=dataclasses.replace(FEW_ROWS_BLOCKS.product, contracted=64),
    swiglu=dataclasses.replace(FEW_ROWS_BLOCKS.swiglu, contracted=64),
)
"""Settings for few rows of float32: blocks of as many bytes."""


def blocks_for(dtype: Any, num_rows: int) -> Blocks:
    """Returns the block sizes for a dtype of the operands and a number of rows."""
    if num_rows <= FEW_ROWS:
        return FLOAT32_FEW_ROWS_BLOCKS if dtype == jnp.float32 else FEW_ROWS_BLOCKS
    return FLOAT32_BLOCKS if dtype == jnp.float32 else BLOCKS


def kernel_name(operation: str, num_rows: int) -> str:
    """Returns the name of a forward kernel: few rows have other block sizes, and are another kernel."""
    return operation + ("_few_rows" if num_rows <= FEW_ROWS else "")


def multiply(operands: Operands, blocks: Blocks) -> jax.Array:
    """Multiplies each group's rows by its matrix in the stack; rows after the last group become zeros."""
    rows_PD, _, group_sizes_E, stack_MDF, first_matrix = operands
    name = kernel_name("grouped_matmul", len(rows_PD))
    return triton.product(rows_PD, stack_MDF, group_sizes_E, first_matrix, blocks.product, name=name)


def gradients(
    operands: Operands, grad_PF: jax.Array, blocks: Blocks, *, name: str = "grouped_matmul"
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the rows and of the weights; `name` is the prefix of the kernels' names."""
    rows_PD, _, group_sizes_E, stack_MDF, first_matrix = operands
    first_matrix = jnp.asarray(first_matrix)  # jax.checkpoint returns a constant as a numpy array
    grad_rows_PD = triton.product(
        grad_PF, stack_MDF, group_sizes_E, first_matrix, blocks.product, name=name, transposed=True
    )
    grad_weights_EDF = triton.grad_weights(rows_PD, grad_PF, group_sizes_E, blocks.grad_weights, name=name)
    return grad_rows_PD, grad_weights_EDF


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def swiglu(operands, blocks):
    """Computes `silu(gate) * up` of each group's rows in one kernel."""
    return _swiglu(operands, blocks)[0]


def _swiglu(operands: Operands, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    rows_PD, _, group_sizes_E, stack_MDQ, first_matrix = operands
    name = kernel_name("grouped_swiglu", len(rows_PD))
    return triton.swiglu(rows_PD, stack_MDQ, group_sizes_E, first_matrix, blocks.swiglu, name=name)


def _swiglu_forward(operands, blocks):
    operands = operands.of_own()  # for the reason in `grouped_matmul`'s forward pass
    out_PF, gate_up_PQ = (checkpoint_name(x, KEPT) for x in _swiglu(operands, blocks))
    return out_PF, (operands, gate_up_PQ)


def _swiglu_backward(blocks, saved, grad_PF):
    operands, gate_up_PQ = saved
    gate_PF, up_PF = jnp.split(gate_up_PQ.astype(jnp.float32), 2, axis=1)
    sigmoid_PF = jax.nn.sigmoid(gate_PF)
    # d silu(g)/dg = sigmoid(g) * (1 + g * (1 - sigmoid(g))).
    grad_gate_PF = grad_PF * up_PF * sigmoid_PF * (1 + gate_PF * (1 - sigmoid_PF))
    grad_gate_up_PQ = jnp.concatenate([grad_gate_PF, grad_PF * gate_PF * sigmoid_PF], axis=1)
    grad_gate_up_PQ = grad_gate_up_PQ.astype(gate_up_PQ.dtype)
    grads = gradients(operands, grad_gate_up_PQ, blocks, name="grouped_swiglu")
    return (Operands(*grads, None, None, None),)  # pyright: ignore[reportArgumentType]


swiglu.defvjp(_swiglu_forward, _swiglu_backward)
