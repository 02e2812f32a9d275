"""Where XLA's compiler for CPUs must be told how to cut a program into loops; elsewhere it is let be.

Letters: A products side by side, P rows, D and F columns.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, which on CPUs is not fused with what comes before and behind.

    XLA computes cheap entries where they are read, and anew for each reader. Where the reader is a
    transpose, or reads them twice, that is slower than to write them once: a transpose of the normalised
    stream took 2.0 ms with the normalisation inside of it and 0.3 ms without (2,048 x 512, 2 cores of an
    AMD EPYC, in a step of `zaya bench torch`).

    Args:
      function: of arrays.
      arguments: all that it reads; what it closes over is compiled into it.
    """
    return lax.platform_dependent(*arguments, cpu=_not_inlined(function), default=function)


def _not_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(function)(*arguments)

    return call


def transposed_product(x: jax.Array, y: jax.Array, *, dtype: Any = None) -> jax.Array:
    """`x^T @ y`, the sum over rows that the gradient of a product's weights is.

    On CPUs the transpose is written out: left to itself, XLA transposes too, but for a slower routine.

    Args:
      x: the product's input, [*A, P, D].
      y: the gradient of its output, [*A, P, F].
      dtype: of the sum; None for that of the factors.

    Returns:
      [*A, D, F].
    """
    multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)

    def written_out(x: jax.Array, y: jax.Array) -> jax.Array:
        # The barrier keeps XLA from folding the transpose into the product.
        return multiply(lax.optimization_barrier(x.mT), y)

    return lax.platform_dependent(x, y, cpu=_not_inlined(written_out), default=lambda x, y: multiply(x.mT, y))
