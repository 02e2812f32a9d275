"""Products with weights, whose gradients are written for the platform.

Letters: A products side by side, P rows, D inputs, F outputs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cpu import transposed_product


def product(
    x: Float[Array, "*A P D"], kernel: Float[Array, "*A D F"], *, dtype: Any = None
) -> Float[Array, "*A P F"]:
    """`x @ kernel`.

    Args:
      x: rows.
      kernel: weights; with as many leading axes as x, one matrix for each product.
      dtype: of the result; None for that of the factors.
    """
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
