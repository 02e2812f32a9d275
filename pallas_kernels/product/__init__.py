"""Matrix products with weights, with gradients and products of few rows that suit the platform.

There is no custom kernel: on GPUs the vendor's library multiplies.

Letters: A products in a batch, P rows, D inputs, F outputs.
"""

from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import PRODUCT
from pallas_kernels.product.quantized import AnyMatrix, QuantizedMatrix, dequantize, quantize
from pallas_kernels.product.stack import Matrix, StackedMatrix, in_stack, own_matrix
from pallas_kernels.product.xla import product_xla


def product(x: jax.Array, kernel: Matrix, *, dtype: Any = None, after: jax.Array | None = None) -> jax.Array:
    """Computes `x @ kernel`.

    Args:
      x: rows, [*A, P, D].
      kernel: weights, [*A, D, F], one matrix for each product. Few rows read matrices of a stack in place.
      dtype: dtype of the result; None for that of the operands. Sums are at least as wide. The gradient of a
        wider result is rounded to the operands' dtype, so that its products are not slower ones in float32.
      after: array before which few rows do not copy their matrix out of a stack on CPUs; None for `x`.

    Returns:
      Products, [*A, P, F], with the checkpoint name `PRODUCT`.
    """
    if isinstance(kernel, StackedMatrix):
        after = lax.stop_gradient(x if after is None else after)
        out: Any = product_xla(x, kernel.own, kernel.stack, kernel.number, after, dtype)
    else:
        out = product_xla(x, kernel, None, None, None, dtype)
    return checkpoint_name(out, PRODUCT)
