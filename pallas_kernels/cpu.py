"""Where XLA's compiler for CPUs must be told how to cut a program into loops; elsewhere it is let be.

Letters: A products side by side, M matrices of a stack, P rows, D and F columns.
"""

import functools
import math
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

    return lax.platform_dependent(x, y, cpu=_not_inlined(written_out), default=lambda x, y: multiply(x.mT, y))


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
    cpu = _not_inlined(in_place) if stages and is_large else product
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
