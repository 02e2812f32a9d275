"""The experts' second product together with the activation before it, for their joint backward pass.

Letters are those of the package; Q = 2*F.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import triton
from pallas_kernels.grouped_matmul.activation import swiglu_backward
from pallas_kernels.grouped_matmul.operands import Operands
from pallas_kernels.grouped_matmul.rows import weighted_swiglu
from pallas_kernels.grouped_matmul.triton import Blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def activated_product(
    gate_up_PQ: jax.Array,
    scale_P: jax.Array,
    down: Operands,
    multiply: Callable[[Operands], jax.Array],
    blocks: Blocks,
) -> jax.Array:
    """Multiplies `scale * silu(gate) * up` by the matrix of each group, [P, D].

    The backward pass is by the kernels, and keeps only the arguments.

    Args:
      gate_up_PQ: gate, followed by up, of rows that are sorted by group.
      scale_P: factor of each row, float32.
      down: matrices and sizes of the groups; its rows are None.
      multiply: the product of the forward pass.
      blocks: block sizes of the kernels.
    """
    del blocks
    hidden_PF: Any = weighted_swiglu(gate_up_PQ, scale_P)
    return multiply(down._replace(rows_PD=hidden_PF))


def _forward(gate_up_PQ, scale_P, down, multiply, blocks):
    down = down.of_own()  # for the reason in `grouped_matmul`'s forward pass
    return activated_product(gate_up_PQ, scale_P, down, multiply, blocks), (gate_up_PQ, scale_P, down)


def _backward(multiply, blocks, saved, grad_PD):
    del multiply
    gate_up_PQ, scale_P, (_, _, sizes_E, stack_MFD, first) = saved
    first = jnp.asarray(first)  # jax.checkpoint returns a constant as a numpy array
    grad_PF = triton.product(grad_PD, stack_MFD, sizes_E, first, blocks.product, transposed=True)
    hidden_PF, grad_gate_up_PQ, grad_scale_P = swiglu_backward(gate_up_PQ, scale_P, grad_PF)
    grad_EFD = triton.grad_weights(hidden_PF, grad_PD, sizes_E, blocks.grad_weights)
    # The stack has no gradient, because that belongs to the slice of the layer.
    return grad_gate_up_PQ, grad_scale_P, Operands(None, grad_EFD, None, None, None)  # pyright: ignore[reportArgumentType]


activated_product.defvjp(_forward, _backward)
