"""`product` in XLA: its gradient, and products of few rows that read a matrix of a stack in place.

Letters: A products in a batch, M matrices of a stack, P rows, D inputs, F outputs.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fusion import not_inlined
from pallas_kernels.precision import matmul


def transposed_product(x: jax.Array, y: jax.Array, *, dtype: Any = None) -> jax.Array:
    """Computes `x^T @ y`, the gradient of a product's weights.

    On CPUs the narrower operand is transposed explicitly. XLA would transpose as well, but for a slower
    routine.

    Args:
      x: input of the product, [*A, P, D].
      y: gradient of the output, [*A, P, F].
      dtype: dtype of the sum; None for that of the operands.

    Returns:
      Sum over rows, [*A, D, F].
    """
    multiply = functools.partial(matmul, dtype=dtype)

    def written_out(x: jax.Array, y: jax.Array) -> jax.Array:
        # The barrier keeps XLA from folding the transpose into the product.
        if y.shape[-1] < x.shape[-1]:
            return multiply(lax.optimization_barrier(y.mT), x).mT
        return multiply(lax.optimization_barrier(x.mT), y)

    return lax.platform_dependent(x, y, cpu=not_inlined(written_out), default=lambda x, y: multiply(x.mT, y))


FUSED_READERS = 15
"""Largest number of readers into each of which XLA fuses, and so repeats, a producer; with one more the
producer gets its own loop."""
ROWS_IN_PLACE = 8
"""Largest number of rows that are multiplied in place: a matrix of 512 x 1,024 took 82 us for one row, 102
for 4 and 144 for 8, while a copy and a product took 207 to 246 (2 cores of an Intel Xeon at 2.6 GHz, 64
matrices in turn)."""
MIN_ENTRIES_IN_PLACE = 2**14
"""Smallest number of entries of a batch's matrices that are read in place, which was faster for 512 x 64 and
slower for 64 x 64."""


def product_in_place(
    x: jax.Array, stack: jax.Array, number: jax.Array | int, *, dtype: Any = None
) -> jax.Array:
    """Computes `x @ stack[number]` for so few rows that reading the matrix dominates.

    On CPUs all cores read the matrix once, in place. A plain product would first copy the slice, on one core,
    and read the copy.

    Args:
      x: rows, [*A, P, D]; above `ROWS_IN_PLACE` a plain product is faster.
      stack: matrices, [M, *A, D, F].
      number: index of the matrix in the stack.
      dtype: dtype of the product; None for that of the operands. On CPUs sums are float32.

    Returns:
      Products, [*A, P, F].
    """
    dtype = dtype or jnp.result_type(x, stack)

    def product(x: jax.Array, stack: jax.Array, number: jax.Array) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(stack, number, keepdims=False)
        return matmul(x, matrix, dtype=dtype)

    def in_place(x: jax.Array, stack: jax.Array, number: jax.Array) -> jax.Array:
        columns = x.mT.astype(jnp.float32)[..., None]  # [*A, D, P, 1]
        first, *others = stages
        size = stack.shape[-2] // first
        starts = range(0, stack.shape[-2], size)
        sums: Any = sum(columns[..., i : i + size, :, :] * _rows(stack, number, i, size) for i in starts)
        for count in others:
            sums = sum(jnp.split(sums, count, axis=-3))
        return sums[..., 0, :, :].astype(dtype)

    stages = _stages(stack.shape[-2])
    is_large = math.prod(stack.shape[1:]) >= MIN_ENTRIES_IN_PLACE
    cpu = not_inlined(in_place) if stages and is_large else product
    return lax.platform_dependent(x, stack, jnp.asarray(number), cpu=cpu, default=product)


def _stages(num_rows: int) -> list[int]:
    """Returns the number of row blocks that each loop adds up; XLA's reductions are slow for few rows.

    The first loop, which reads the matrix, leaves so many rows that XLA does not fuse it into the next one.
    Empty if the number of rows cannot be split like this.
    """
    stages = [min(FUSED_READERS + 1, num_rows // (FUSED_READERS + 1))]
    while stages[-1] and num_rows % stages[-1] == 0:
        num_rows //= stages[-1]
        if num_rows <= 64:
            return [*stages, num_rows]
        stages.append(FUSED_READERS + 1)
    return []


def _rows(stack: jax.Array, number: jax.Array, first: int, count: int) -> jax.Array:
    """Returns rows of one matrix, [*A, count, 1, F], in float32.

    Each reader gets its own slice: XLA copies a slice that is shared.
    """
    start = (number, *(0,) * (stack.ndim - 3), first, 0)
    shape = (1, *stack.shape[1:-2], count, stack.shape[-1])
    return lax.dynamic_slice(stack, start, shape)[0][..., None, :].astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def product_xla(
    x: jax.Array, kernel: jax.Array, stack: jax.Array | None, number: jax.Array | None, dtype: Any
) -> jax.Array:
    """Computes `x @ kernel`; few rows read the kernel as matrix `number` of the stack, if there is one."""
    if stack is not None and number is not None and x.shape[-2] <= ROWS_IN_PLACE:
        return product_in_place(x, stack, number, dtype=dtype)
    return matmul(x, kernel, dtype=dtype)


def _forward(x, kernel, stack, number, dtype):
    del stack, number
    # Not `product_xla` itself: a remat policy that keeps products looks for plain ones.
    return matmul(x, kernel, dtype=dtype), (x, kernel)


def _backward(dtype, saved, grad):
    del dtype
    x, kernel = saved
    # Two products read the gradient. On GPUs XLA would compute a concatenated or masked one twice.
    grad = lax.platform_dependent(grad, cpu=lambda x: x, default=lax.optimization_barrier)
    grad_x = matmul(grad, kernel.mT).astype(x.dtype)
    # The gradient of a layer's matrix belongs to its slice; the stack has none.
    return grad_x, transposed_product(x, grad).astype(kernel.dtype), None, None


product_xla.defvjp(_forward, _backward)
