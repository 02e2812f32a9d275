"""Products with weights, whose gradients are written for the platform.

Letters: L layers, A products side by side, P rows, D inputs, F outputs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import ROWS_IN_PLACE, product_in_place, transposed_product
from zaya_jax.pytree import pytree


@pytree
class InStack:
    """A layer's matrices, left in the stack of all layers until a product reads them there.

    It has what arrays have to be made ready for a product.
    """

    stack: Float[Array, "L *A D F"]
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one layer's."""
        return self.stack.shape[1:]

    def reshape(self, *shape: int) -> "InStack":
        """Each layer's, in another shape."""
        return InStack(self.stack.reshape(self.stack.shape[0], *shape), self.layer)

    def astype(self, dtype: DTypeLike) -> "InStack":
        """In another type. Outside of a loop over layers it is the whole stack that is cast."""
        return InStack(self.stack.astype(dtype), self.layer)


def product(
    x: Float[Array, "*A P D"], kernel: Float[Array, "*A D F"] | InStack, *, dtype: Any = None
) -> Float[Array, "*A P F"]:
    """`x @ kernel`.

    Args:
      x: rows.
      kernel: weights; with as many leading axes as x, one matrix for each product. In a stack, they take
        no gradient.
      dtype: of the result; None for that of the factors.
    """
    if isinstance(kernel, InStack):
        if x.shape[-2] <= ROWS_IN_PLACE:
            return product_in_place(x, kernel.stack, kernel.layer, dtype=dtype)
        kernel = lax.dynamic_index_in_dim(kernel.stack, kernel.layer, keepdims=False)
    out: Any = _product(x, kernel, dtype)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, kernel, dtype):
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


def _forward(x, kernel, dtype):
    # Not `_product` itself: a remat policy that keeps products looks for the plain one.
    return jnp.matmul(x, kernel, preferred_element_type=dtype), (x, kernel)


def _backward(dtype, saved, grad):
    del dtype
    x, kernel = saved
    grad_x = jnp.matmul(grad, kernel.mT).astype(x.dtype)
    return grad_x, transposed_product(x, grad).astype(kernel.dtype)


_product.defvjp(_forward, _backward)
