"""Grouped product of AMD's Primus-Turbo, if it is installed ([Primus-Turbo] jax/lax/grouped_gemm.py).

Written from its source and never run on a GPU. A test compares this file with the specification, with a fake
of the package.
"""

import importlib

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.operands import Operands, gradients_by_jax


def multiply(operands: Operands) -> jax.Array:
    """Multiplies each group's rows by its matrix; rows after the last group become zeros."""
    return _multiply(operands.rows_PD, operands.weights_EDF, operands.group_sizes_E)


def gradients(operands: Operands, grad_PF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the rows and of the weights."""
    return gradients_by_jax(_multiply, operands, grad_PF)


def _multiply(rows_PD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    package = importlib.import_module("primus_turbo.jax.lax")
    with jax.enable_x64(True):  # its kernels accept only 64-bit sizes
        out_PF = package.grouped_gemm(rows_PD, weights_EDF, sizes_E.astype(jnp.int64))
    # The package leaves rows after the last group undefined, in the result and in its gradient.
    is_of_group_P = jnp.arange(rows_PD.shape[0]) < sizes_E.sum()
    return jnp.where(is_of_group_P[:, None], out_PF, 0)
