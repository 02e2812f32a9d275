"""What all implementations of the grouped product take. Letters: see the package."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.product import InStack, Matrix


class Operands(NamedTuple):
    """Rows sorted by group, and the groups' matrices: as they are, and where they lie in a stack."""

    rows_PD: jax.Array
    weights_EDF: jax.Array
    """What takes the gradient."""
    group_sizes_E: jax.Array
    stack_MDF: jax.Array
    """Group e's matrix is number `first_matrix + e`. It takes no gradient."""
    first_matrix: jax.Array

    def of_own(self) -> "Operands":
        """The same, from the weights alone."""
        return self._replace(
            stack_MDF=lax.stop_gradient(self.weights_EDF), first_matrix=jnp.zeros((), jnp.int32)
        )


def operands_of(rows_PD: jax.Array, weights_EDF: Matrix, group_sizes_E: jax.Array) -> Operands:
    """The operands, after a look at whether they go together.

    Raises:
      ValueError: if they do not.
    """
    _check(rows_PD, weights_EDF, group_sizes_E)
    if isinstance(weights_EDF, InStack):
        groups, *matrix = weights_EDF.shape
        stack_MDF = weights_EDF.stack.reshape(-1, *matrix)
        first = (weights_EDF.number * groups).astype(jnp.int32)
        return Operands(rows_PD, weights_EDF.own, group_sizes_E, stack_MDF, first)
    return Operands(rows_PD, weights_EDF, group_sizes_E, weights_EDF, jnp.int32(0)).of_own()


def _check(rows_PD: jax.Array, weights_EDF: Matrix, group_sizes_E: jax.Array) -> None:
    shapes = f"rows {rows_PD.shape}, weights {weights_EDF.shape}, group sizes {group_sizes_E.shape}"
    if rows_PD.ndim != 2 or weights_EDF.ndim != 3 or group_sizes_E.ndim != 1:
        raise ValueError(f"{shapes}: they must be [P, D], [E, D, F] and [E]")
    if group_sizes_E.shape[0] != weights_EDF.shape[0]:
        raise ValueError(f"{shapes}: there must be a matrix for each group, and no other")
    if rows_PD.shape[1] != weights_EDF.shape[1]:
        raise ValueError(f"{shapes}: rows and weights must share their width D")
    if rows_PD.dtype != weights_EDF.dtype:
        raise ValueError(f"rows are {rows_PD.dtype}, weights {weights_EDF.dtype}; they must be of one dtype")
