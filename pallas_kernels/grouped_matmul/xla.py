"""Grouped product without a kernel: `jax.lax.ragged_dot`, and the faster form for each platform."""

import jax
from jax import lax

from pallas_kernels.grouped_matmul import blocked
from pallas_kernels.grouped_matmul.operands import Operands, gradients_by_jax
from pallas_kernels.precision import precision_of


def multiply_ragged(operands: Operands) -> jax.Array:
    """Multiplies with `ragged_dot`: the vendor's grouped product on GPUs, a masked dense product on CPUs."""
    return _ragged_dot(operands.rows_PD, operands.weights_EDF, operands.group_sizes_E)


def gradients_ragged(operands: Operands, grad_PF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the rows and of the weights."""
    return gradients_by_jax(_ragged_dot, operands, grad_PF)


def _ragged_dot(rows_PD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    # Without a precision float32 rows would be rounded to tf32 or xf32 on GPUs.
    return lax.ragged_dot(rows_PD, weights_EDF, sizes_E, precision=precision_of(rows_PD, weights_EDF))


def multiply(operands: Operands) -> jax.Array:
    """Multiplies in blocks on CPUs, with `ragged_dot` elsewhere."""
    return lax.platform_dependent(operands, cpu=blocked.multiply, default=multiply_ragged)


def gradients(operands: Operands, grad_PF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the rows and of the weights."""
    return lax.platform_dependent(operands, grad_PF, cpu=blocked.gradients, default=gradients_ragged)
