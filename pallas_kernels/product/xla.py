"""`product` without a kernel: its gradient, and the reading of a matrix where it lies in its stack.

Letters: A products side by side, M matrices of a stack, P rows, D inputs, F outputs.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fusion import not_inlined


def transposed_product(x: jax.Array, y: jax.Array, *, dtype: Any = None) -> jax.Array:
    """`x^T @ y`, the sum over rows that the gradient of a product's weights is.

    On CPUs the transpose is written out, that of the narrower factor: left to itself, XLA transposes too,
    but for a slower routine.

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
        if y.shape[-1] < x.shape[-1]:
            return multiply(lax.optimization_barrier(y.mT), x).mT
        return multiply(lax.optimization_barrier(x.mT), y)

    return lax.platform_dependent(x, y, cpu=not_inlined(written_out), default=lambda x, y: multiply(x.mT, y))


FUSED_READERS = 15
"""XLA emits what a loop reads anew for each place where it is read, up to so many; from one more on it
leaves that to a loop of its own."""
ROWS_IN_PLACE = 8
"""Up to so many rows share one reading in place: 512 x 1,024 took 82 us for one row, 102 for 4 and 144 for 8,
where a copy and a product took 207 to 246 (2 cores of an Intel Xeon of 2.6 GHz, 64 matrices in turn)."""
SMALLEST_IN_PLACE = 2**14
"""Entries of a matrix, or of those of products side by side, from which on they are read in place: that was
faster for 512 x 64 and slower for 64 x 64."""


def product_in_place(
    x: jax.Array, stack: jax.Array, number: jax.Array | int, *, dtype: Any = None
) -> jax.Array:
    """`x @ stack[number]` for so few rows that it is bound by the reading of the matrix.

    On CPUs the cores read it together, once and where it lies. A product would have the slice copied first,
    on one core, and read the copy.

    Args:
      x: the rows, [*A, P, D]; above `ROWS_IN_PLACE` a product is faster.
      stack: matrices, [M, *A, D, F].
      number: of the matrix among them.
      dtype: of the product; None for that of the factors. On CPUs the sums are float32's.

    Returns:
      [*A, P, F].
    """
    dtype = dtype or jnp.result_type(x, stack)

    def product(x: jax.Array, stack: jax.Array, number: jax.Array) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(stack, number, keepdims=False)
        return jnp.matmul(x, matrix, preferred_element_type=dtype)

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
    is_large = math.prod(stack.shape[1:]) >= SMALLEST_IN_PLACE
    cpu = not_inlined(in_place) if stages and is_large else product
    return lax.platform_dependent(x, stack, jnp.asarray(number), cpu=cpu, default=product)


def _stages(num_rows: int) -> list[int]:
    """How many blocks of rows each loop adds up, by slices; few rows are too few for XLA's reductions.

    The first loop, which reads the matrix, leaves so many rows that XLA does not pull it into the next.
    Empty if the rows cannot be cut so.
    """
    stages = [min(FUSED_READERS + 1, num_rows // (FUSED_READERS + 1))]
    while stages[-1] and num_rows % stages[-1] == 0:
        num_rows //= stages[-1]
        if num_rows <= 64:
            return [*stages, num_rows]
        stages.append(FUSED_READERS + 1)
    return []


def _rows(stack: jax.Array, number: jax.Array, first: int, count: int) -> jax.Array:
    """Rows of one matrix, [*A, count, 1, F], in float32.

    A slice of its own for each reader: a shared one is copied.
    """
    start = (number, *(0,) * (stack.ndim - 3), first, 0)
    shape = (1, *stack.shape[1:-2], count, stack.shape[-1])
    return lax.dynamic_slice(stack, start, shape)[0][..., None, :].astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def product_xla(
    x: jax.Array, kernel: jax.Array, stack: jax.Array | None, number: jax.Array | None, dtype: Any
) -> jax.Array:
    """`x @ kernel`; few rows read the kernel as matrix `number` of the stack, if there is one."""
    if stack is not None and number is not None and x.shape[-2] <= ROWS_IN_PLACE:
        return product_in_place(x, stack, number, dtype=dtype)
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


def _forward(x, kernel, stack, number, dtype):
    del stack, number
    # Not `product_xla` itself: a remat policy that keeps products looks for the plain one.
    return jnp.matmul(x, kernel, preferred_element_type=dtype), (x, kernel)


def _backward(dtype, saved, grad):
    del dtype
    x, kernel = saved
    # Two products read it. Elsewhere than on CPUs XLA would make a joined or masked one twice, for each.
    grad = lax.platform_dependent(grad, cpu=lambda x: x, default=lax.optimization_barrier)
    grad_x = jnp.matmul(grad, kernel.mT).astype(x.dtype)
    # The stack takes no gradient: that of a layer's matrix goes to the layer's own slice.
    return grad_x, transposed_product(x, grad).astype(kernel.dtype), None, None


product_xla.defvjp(_forward, _backward)
