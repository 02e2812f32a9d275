"""The grouped product of AMD's Primus-Turbo, if that is installed ([Primus-Turbo] jax/lax/grouped_gemm.py).

Written from its source; never run on a GPU here. A test holds this file to the specification with a
stand-in for the package.
"""

import importlib

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.operands import Operands


def multiply(operands: Operands) -> jax.Array:
    """Each group's rows times its matrix; zeros behind the last group."""
    return _multiply(operands.rows_PD, operands.weights_EDF, operands.group_sizes_E)


def gradients(operands: Operands, grad_PF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the rows and of the weights."""
    rows_PD, weights_EDF, sizes_E, *_ = operands
    _, pull_back = jax.vjp(lambda rows, weights: _multiply(rows, weights, sizes_E), rows_PD, weights_EDF)
    return pull_back(grad_PF)


def _multiply(rows_PD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    package = importlib.import_module("primus_turbo.jax.lax")
    with jax.enable_x64(True):  # its kernels take sizes of 64 bits alone
        out_PF = package.grouped_gemm(rows_PD, weights_EDF, sizes_E.astype(jnp.int64))
    # Nothing is said of rows behind the last group, in the result and in its gradient.
    is_of_group_P = jnp.arange(rows_PD.shape[0]) < sizes_E.sum()
    return jnp.where(is_of_group_P[:, None], out_PF, 0)
