"""Products with weights, whose gradients and whose reading of few rows are written for the platform.

There is no kernel of ours: on GPUs the vendor's library multiplies.

Letters: A products side by side, P rows, D inputs, F outputs.
"""

from typing import Any

import jax

from pallas_kernels.product.stack import InStack, Matrix, in_stack, own_matrix
from pallas_kernels.product.xla import product_xla

__all__ = ["InStack", "Matrix", "in_stack", "own_matrix", "product"]


def product(x: jax.Array, kernel: Matrix, *, dtype: Any = None) -> jax.Array:
    """`x @ kernel`.

    Args:
      x: rows, [*A, P, D].
      kernel: weights, [*A, D, F], one matrix for each product. Few rows read those of a stack in place.
      dtype: of the result; None for that of the factors. Sums are at least as wide.

    Returns:
      [*A, P, F].
    """
    if isinstance(kernel, InStack):
        out: Any = product_xla(x, kernel.own, kernel.stack, kernel.number, dtype)
    else:
        out = product_xla(x, kernel, None, None, dtype)
    return out
