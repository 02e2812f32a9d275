"""Backward pass of the experts' activation in Pallas for Triton: one pass over gate and up.

The gradient of the second product's matrices needs the activations, that of the first product the gradients
of gate and up. Both are functions of gate, up and the gradient of the activations: computed together, these
are read once. XLA computes them in two passes.

Letters are those of the package; Q = 2*F, I counts rows of a block.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import exp2, from_start, launch, load, store
from pallas_kernels.blocks import KernelSettings

LOG2_E = math.log2(math.e)
WIDEST = 16_384
"""Largest width F: a program holds whole rows in registers."""
ROWS = 4
"""Rows of a block, chosen by the registers that the compiler reports for MI300X; untimed."""
SETTINGS = KernelSettings(num_warps=8)


def swiglu_backward(
    gate_up_PQ: jax.Array, scale_P: jax.Array, grad_PF: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Recomputes `scale * silu(gate) * up`, and computes the gradients of its arguments.

    Arithmetic is float32; each result is rounded once.

    Args:
      gate_up_PQ: gate, followed by up.
      scale_P: factor of each row, float32.
      grad_PF: gradient of the activations.

    Returns:
      The activations, [P, F], and the gradients of `gate_up_PQ` and `scale_P`.
    """
    num_rows, width = grad_PF.shape
    padded = pl.next_power_of_2(width)

    def kernel(gate_up, scale, grad, hidden, grad_gate_up, grad_scale):
        first = pl.program_id(0) * ROWS
        rows, is_row_I = pl.ds(first, ROWS), first + jnp.arange(ROWS) < num_rows
        mask_IF = is_row_I[:, None] & (jnp.arange(padded) < width)[None, :]
        # The columns of up start where those of gate end; the start is computed, as in `from_start`.
        of_gate, of_up = from_start(padded, first), pl.ds(width + first * 0, padded)
        gate_IF, up_IF, grad_IF = (
            load(array.at[rows, columns], mask_IF).astype(jnp.float32)
            for array, columns in ((gate_up, of_gate), (gate_up, of_up), (grad, of_gate))
        )
        scale_I1 = load(scale.at[rows], is_row_I)[:, None]
        sigmoid_IF = 1 / (1 + exp2(-gate_IF * LOG2_E))
        silu_IF = gate_IF * sigmoid_IF
        store(hidden.at[rows, of_gate], scale_I1 * silu_IF * up_IF, mask_IF)
        store(grad_scale.at[rows], jnp.sum(grad_IF * silu_IF * up_IF, axis=1), is_row_I)
        scaled_IF = grad_IF * scale_I1
        # d silu(g)/dg = sigmoid(g) * (1 + g * (1 - sigmoid(g))).
        slope_IF = sigmoid_IF * (1 + gate_IF * (1 - sigmoid_IF))
        store(grad_gate_up.at[rows, of_gate], scaled_IF * up_IF * slope_IF, mask_IF)
        store(grad_gate_up.at[rows, of_up], scaled_IF * silu_IF, mask_IF)

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (grad_PF, gate_up_PQ, scale_P)]
    operands, grid = (gate_up_PQ, scale_P, grad_PF), (pl.cdiv(num_rows, ROWS),)
    hidden_PF, grad_gate_up_PQ, grad_scale_P = launch(
        kernel, operands, results, SETTINGS, grid=grid, name="activation_backward"
    )
    return hidden_PF, grad_gate_up_PQ, grad_scale_P
