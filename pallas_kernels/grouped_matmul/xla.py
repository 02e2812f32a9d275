"""The grouped product without a kernel: `jax.lax.ragged_dot`, and what suits each platform."""

import jax
from jax import lax

from pallas_kernels.grouped_matmul import blocked
from pallas_kernels.grouped_matmul.operands import Operands


def multiply_ragged(operands: Operands) -> jax.Array:
    """By `ragged_dot`: a grouped product of the vendor's library on GPUs, a masked dense one on CPUs."""
    return lax.ragged_dot(operands.rows_PD, operands.weights_EDF, operands.group_sizes_E)


def gradients_ragged(operands: Operands, grad_PF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the rows and of the weights."""
    rows_PD, weights_EDF, sizes_E, *_ = operands
    _, pull_back = jax.vjp(lambda rows, weights: lax.ragged_dot(rows, weights, sizes_E), rows_PD, weights_EDF)
    return pull_back(grad_PF)


def multiply(operands: Operands) -> jax.Array:
    """By blocks on CPUs, by `ragged_dot` elsewhere."""
    return lax.platform_dependent(operands, cpu=blocked.multiply, default=multiply_ragged)


def gradients(operands: Operands, grad_PF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the rows and of the weights."""
    return lax.platform_dependent(operands, grad_PF, cpu=blocked.gradients, default=gradients_ragged)
