"""Operands of all implementations of the grouped product. For letters see the package."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.errors import ArgumentError
from pallas_kernels.product import Matrix, StackedMatrix


class Operands(NamedTuple):
    """Rows sorted by group, and the groups' matrices, both as a slice and as part of a stack."""

    rows_PD: jax.Array
    weights_EDF: jax.Array
    """Matrices of the groups, to which the gradient belongs."""
    group_sizes_E: jax.Array
    stack_MDF: jax.Array
    """Matrices of all layers: that of group e is number `first_matrix + e`. It has no gradient."""
    first_matrix: jax.Array

    def of_own(self) -> "Operands":
        """Returns the same operands with the weights themselves as the stack."""
        return self._replace(
            stack_MDF=lax.stop_gradient(self.weights_EDF), first_matrix=jnp.zeros((), jnp.int32)
        )


def gradients_by_jax(
    multiply: Callable[..., jax.Array], operands: Operands, grad_PF: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the rows and of the weights of a product that JAX differentiates.

    Args:
      multiply: function of rows, weights and group sizes.
      operands: operands of the product.
      grad_PF: gradient of the product.
    """
    rows_PD, weights_EDF, sizes_E, *_ = operands
    return jax.vjp(lambda rows, weights: multiply(rows, weights, sizes_E), rows_PD, weights_EDF)[1](grad_PF)


def operands_of(rows_PD: jax.Array, weights_EDF: Matrix, group_sizes_E: jax.Array) -> Operands:
    """Checks the arguments of a grouped product and returns them as operands.

    Args:
      rows_PD: rows, sorted by group.
      weights_EDF: one matrix for each group, an array or part of a stack.
      group_sizes_E: number of rows of each group, int32.

    Raises:
      ArgumentError: if shapes or dtypes do not match.
    """
    _check(rows_PD, weights_EDF, group_sizes_E)
    if isinstance(weights_EDF, StackedMatrix):
        # Layers and experts become one axis, so that an expert's matrix is read with a single index.
        groups, *matrix = weights_EDF.shape
        stack_MDF = weights_EDF.stack.reshape(-1, *matrix)
        first = (weights_EDF.number * groups).astype(jnp.int32)
        return Operands(rows_PD, weights_EDF.own, group_sizes_E, stack_MDF, first)
    return Operands(rows_PD, weights_EDF, group_sizes_E, weights_EDF, jnp.int32(0)).of_own()


def _check(rows_PD: jax.Array, weights_EDF: Matrix, group_sizes_E: jax.Array) -> None:
    shapes = f"rows {rows_PD.shape}, weights {weights_EDF.shape}, group sizes {group_sizes_E.shape}"
    if rows_PD.ndim != 2 or weights_EDF.ndim != 3 or group_sizes_E.ndim != 1:
        raise ArgumentError(f"{shapes}: they must be [P, D], [E, D, F] and [E]")
    if group_sizes_E.shape[0] != weights_EDF.shape[0]:
        raise ArgumentError(f"{shapes}: the number of matrices must equal the number of groups")
    if rows_PD.shape[1] != weights_EDF.shape[1]:
        raise ArgumentError(f"{shapes}: rows and weights must have the same width D")
    if rows_PD.dtype != weights_EDF.dtype:
        raise ArgumentError(
            f"rows are {rows_PD.dtype}, weights {weights_EDF.dtype}; they must be of one dtype"
        )
