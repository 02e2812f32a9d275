"""A matrix of a stack, which operations can read in place.

A scan over layers copies the weights of each layer out of the stack of all layers. An operation that reads
only part of them, as decoding does with experts, or reads them once, is faster if it reads the stack in
place.

Letters: L layers, A products in a batch, D inputs, F outputs.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.typing import DTypeLike


class StackedMatrix(NamedTuple):
    """A layer's matrices in two forms: as the slice of the layer, and as an entry of the stack of all layers.

    It has the array attributes that callers need to prepare an operand. Only operations look inside: if one
    reads the stack in place, the slice is unused and the compiler removes it.
    """

    own: jax.Array
    """Slice of this layer, [*A, D, F], to which the gradient belongs."""
    stack: jax.Array
    """Matrices of all layers, [L, *A, D, F]. Without gradient: each layer would add to one of all layers."""
    number: jax.Array
    """Index of the layer, int32 []."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer's matrices."""
        return self.own.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the layer's matrices."""
        return self.own.ndim

    @property
    def dtype(self) -> Any:
        """Dtype of all matrices of the stack."""
        return self.own.dtype

    def reshape(self, *shape: int) -> "StackedMatrix":
        """Reshapes the matrices of each layer."""
        return StackedMatrix(
            self.own.reshape(*shape), self.stack.reshape(len(self.stack), *shape), self.number
        )

    def astype(self, dtype: DTypeLike) -> "StackedMatrix":
        """Converts the matrices. Outside of a scan over layers the whole stack is converted once."""
        return StackedMatrix(self.own.astype(dtype), self.stack.astype(dtype), self.number)


Matrix = jax.Array | StackedMatrix
"""Type of the weights that operations accept."""


def in_stack(own: jax.Array, stack: jax.Array, number: jax.Array) -> StackedMatrix:
    """Returns entry `number` of a stack, with its slice `own`, to which the gradient belongs."""
    return StackedMatrix(own, lax.stop_gradient(stack), number)


def own_matrix(kernel: Matrix) -> jax.Array:
    """Returns the slice of the layer, for an operation that reads all of it."""
    return kernel.own if isinstance(kernel, StackedMatrix) else kernel
