"""Products whose weights' gradient is written for the platform.

Letters: P rows, D inputs, F outputs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@jax.custom_vjp
def product(x: Float[Array, "*P D"], kernel_DF: Float[Array, "D F"]) -> Float[Array, "*P F"]:
    """`x @ kernel`."""
    return x @ kernel_DF


def _forward(x, kernel_DF):
    return x @ kernel_DF, (x, kernel_DF)


def _backward(saved, grad):
    x, kernel_DF = saved
    x_PD, grad_PF = (a.reshape(-1, a.shape[-1]) for a in (x, grad))
    return grad @ kernel_DF.T, kernel_gradient(x_PD, grad_PF, dtype=kernel_DF.dtype)


product.defvjp(_forward, _backward)


def kernel_gradient(
    x_PD: Float[Array, "P D"], grad_PF: Float[Array, "P F"], *, dtype: Any = None
) -> Float[Array, "D F"]:
    """`x^T @ grad`, the sum over rows that a kernel's gradient is.

    On CPUs the transpose is written out: left to itself, XLA transposes too, but for a slower routine.

    Args:
      x_PD: the product's input.
      grad_PF: the gradient of its output.
      dtype: of the sum; None for what the factors promote to.
    """
    multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)
    # The barriers keep XLA from folding this transpose, or the result's, back into the product.
    return lax.platform_dependent(
        x_PD,
        grad_PF,
        cpu=lambda x, grad: lax.optimization_barrier(multiply(lax.optimization_barrier(x.T), grad)),
        default=lambda x, grad: multiply(x.T, grad),
    )
