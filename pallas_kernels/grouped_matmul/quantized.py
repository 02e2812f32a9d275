"""Grouped product with quantized matrices, which are dequantized one at a time where they multiply.

Letters are those of the package; M matrices of all layers.
"""

import jax

from pallas_kernels.errors import ArgumentError
from pallas_kernels.grouped_matmul import blocked
from pallas_kernels.precision import matmul
from pallas_kernels.product.quantized import QuantizedMatrix, dequantize, flat_stack

IMPLEMENTATIONS = (None, "xla", "blocked")
"""Names that select this form; kernels and vendors' products read dense weights."""


def multiply_quantized(
    rows_PD: jax.Array, weights_EDF: QuantizedMatrix, group_sizes_E: jax.Array, *, implementation: str | None
) -> jax.Array:
    """Multiplies each group's rows by its dequantized matrix; rows after the last group become zeros.

    A loop over blocks of rows of one group, as in `blocked`, on every platform. At any time only one matrix
    is dense, and matrices of groups without rows are not read.

    Args:
      rows_PD: rows, sorted by group.
      weights_EDF: quantized matrices, one for each group.
      group_sizes_E: number of rows of each group, int32.
      implementation: name that the caller requests.

    Raises:
      ArgumentError: if shapes do not match, or the implementation needs dense weights.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentError(
            f'grouped_matmul: implementation is "{implementation}", which needs dense weights; for quantized '
            'ones use "xla", "blocked" or None'
        )
    shapes = f"rows {rows_PD.shape}, weights {weights_EDF.shape}, group sizes {group_sizes_E.shape}"
    if group_sizes_E.shape != weights_EDF.shape[:1] or rows_PD.shape[1] != weights_EDF.shape[1]:
        raise ArgumentError(f"{shapes}: they must be [P, D], [E, D, F] and [E]")
    stack_MDF, first_matrix = flat_stack(weights_EDF)
    return blocked.product_of_blocks(rows_PD, group_sizes_E, stack_MDF, first_matrix, _multiply)


def _multiply(rows: jax.Array, stack_MDF: QuantizedMatrix, number: jax.Array) -> jax.Array:
    return matmul(rows, dequantize(stack_MDF.index(number), rows.dtype))
