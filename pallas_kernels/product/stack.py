"""Matrix number n of a stack, left there until an operation reads it.

A loop over layers hands each layer a copy of its weights. An operation that reads only a part of them, as
decoding does of the experts, or reads them once, is faster from the stack of all layers, in place.

Letters: L layers, A products side by side, D inputs, F outputs.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.typing import DTypeLike


class InStack(NamedTuple):
    """A layer's matrices, twice: as the layer's own, and as one entry of those of all layers.

    It has what arrays have to be made ready for an operation. Only operations look inside: one that
    reads the stack in place never makes `own`, and the compiler drops it.
    """

    own: jax.Array
    """[*A, D, F]. What takes the gradient."""
    stack: jax.Array
    """[L, *A, D, F]. It takes no gradient, or each layer would add to a gradient of all layers."""
    number: jax.Array
    """Of the layer, int32 []."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the layer's own matrices."""
        return self.own.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the layer's own matrices."""
        return self.own.ndim

    @property
    def dtype(self) -> Any:
        """That of all matrices of the stack."""
        return self.own.dtype

    def reshape(self, *shape: int) -> "InStack":
        """Each layer's matrices, in another shape."""
        return InStack(self.own.reshape(*shape), self.stack.reshape(len(self.stack), *shape), self.number)

    def astype(self, dtype: DTypeLike) -> "InStack":
        """In another type. Outside of a loop over layers it is the whole stack that is cast, once."""
        return InStack(self.own.astype(dtype), self.stack.astype(dtype), self.number)


Matrix = jax.Array | InStack
"""What operations take as weights."""


def in_stack(own: jax.Array, stack: jax.Array, number: jax.Array) -> InStack:
    """Entry `number` of a stack, as the slice `own` that takes the gradient and as a place in the stack."""
    return InStack(own, lax.stop_gradient(stack), number)


def own_matrix(kernel: Matrix) -> jax.Array:
    """The layer's own matrix, for an operation that reads all of it."""
    return kernel.own if isinstance(kernel, InStack) else kernel
