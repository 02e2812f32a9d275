"""`product` in XLA: its gradient, and products of few rows that read a matrix of a stack in place.

Letters: A products in a batch, M matrices of a stack, P rows, D inputs, F outputs.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fusion import FUSED_READERS, READERS_OF_COPY, for_readers, not_inlined
from pallas_kernels.host_cpu import num_cores
from pallas_kernels.precision import einsum, matmul


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
        # For the reason in `matmul`, which does it for bfloat16 results only.
        product = not_inlined(multiply) if x.dtype == jnp.bfloat16 else multiply
        # The barrier keeps XLA from folding the transpose into the product.
        if y.shape[-1] < x.shape[-1]:
            return product(lax.optimization_barrier(y.mT), x).mT
        return product(lax.optimization_barrier(x.mT), y)

    return lax.platform_dependent(x, y, cpu=not_inlined(written_out), default=lambda x, y: multiply(x.mT, y))


MAX_BYTES_BY_ROW = 2**20
"""Size of a matrix up to which a core reads it once for each of its rows. With 1 MiB, decoding took 0.95 of
the time for 8 rows and 0.91 for 4; with 2 MiB it would have taken 1.06 (2 cores of an AMD EPYC, each with a
cache of 1 MiB)."""
MIN_ENTRIES_IN_PLACE = 2**14
"""Smallest number of entries of a batch's matrices that are read in place, which was faster for 512 x 64 and
slower for 64 x 64."""


def product_in_place(x: jax.Array, stack: jax.Array, numbers_P: jax.Array, *, dtype: Any = None) -> jax.Array:
    """Computes `x[..., p, :] @ stack[numbers_P[p]]` for each row p, of so few that reading dominates.

    On CPUs all cores read the matrices, in place. A plain product would first copy them. Rows with the same
    matrix should follow each other: then it is in a cache for all but the first.

    Args:
      x: rows, [*A, P, D].
      stack: matrices, [M, *A, D, F].
      numbers_P: index of each row's matrix in the stack.
      dtype: dtype of the product; None for that of the operands. On CPUs sums are float32.

    Returns:
      Products, [*A, P, F].
    """
    dtype = dtype or jnp.result_type(x, stack)

    def product(x: jax.Array, stack: jax.Array, number: jax.Array) -> jax.Array:
        return matmul(x, lax.dynamic_index_in_dim(stack, number, keepdims=False), dtype=dtype)

    def products(x: jax.Array, stack: jax.Array, numbers_P: jax.Array) -> jax.Array:
        if len(numbers_P) == 1:
            return product(x, stack, numbers_P[0])
        # One after the other, so that only one matrix is copied at a time.
        rows = jnp.moveaxis(x, -2, 0)[..., None, :]  # [P, *A, 1, D]
        out = lax.map(lambda each: product(each[0], stack, each[1]), (rows, numbers_P))
        return jnp.moveaxis(out[..., 0, :], 0, -2)

    def in_place(x: jax.Array, stack: jax.Array, numbers_P: jax.Array) -> jax.Array:
        first, *others = stages
        # By row, each core computes whole products, and its partial sums stay in its own cache. Rows with one
        # matrix each read it, and only a small one stays in that cache. Otherwise cores share each matrix.
        axis = -2 if is_by_row else -3  # axis of the rows of a matrix

        def in_order(x_P: jax.Array) -> jax.Array:
            """Puts P, the first axis, where the loops have it."""
            return x_P if is_by_row else jnp.moveaxis(x_P, 0, -2)

        columns = in_order(jnp.moveaxis(x, -2, 0).astype(jnp.float32)[..., None])
        factors = zip(jnp.split(columns, first, axis), _blocks(stack, numbers_P, first), strict=True)
        sums: Any = sum(column * in_order(rows) for column, rows in factors)
        for count in others:
            sums = sum(jnp.split(sums, count, axis))
        out = jnp.squeeze(sums, axis).astype(dtype)
        return jnp.moveaxis(out, 0, -2) if is_by_row else out

    is_small = stack.nbytes // len(stack) <= MAX_BYTES_BY_ROW
    is_by_row = is_small and _is_even(len(numbers_P))
    # With 16 blocks a loop writes fewer partial sums than with 8. But for bfloat16 matrices of 2,048 x 4,096
    # it took 1.03 to 1.08 of the time (2 cores of an AMD EPYC).
    num_readers = FUSED_READERS + 1 if is_small or stack.dtype != jnp.bfloat16 else READERS_OF_COPY
    stages = _stages(stack.shape[-2], num_readers)
    is_large = math.prod(stack.shape[1:]) >= MIN_ENTRIES_IN_PLACE
    cpu = not_inlined(in_place) if stages and is_large else products
    return lax.platform_dependent(x, stack, numbers_P, cpu=cpu, default=products)


def _stages(num_rows: int, num_readers: int) -> list[int]:
    """Returns the number of row blocks that each loop adds up; XLA's reductions are slow for few rows.

    The first loop, which reads the matrix, leaves so many rows that XLA does not fuse it into the next one.
    Empty if the number of rows cannot be split like this.
    """
    stages = [min(num_readers, num_rows // (FUSED_READERS + 1))]
    while stages[-1] and num_rows % stages[-1] == 0:
        num_rows //= stages[-1]
        if num_rows <= 64:
            return [*stages, num_rows]
        stages.append(FUSED_READERS + 1)
    return []


def _is_even(num_rows: int) -> bool:
    """Whether XLA divides rows evenly among cores; otherwise the last core gets the remainder."""
    return num_rows % num_cores() == 0 or num_cores() % num_rows == 0


def _blocks(stack: jax.Array, numbers_P: jax.Array, count: int) -> Iterator[jax.Array]:
    """Yields the blocks of rows of each number's matrix, [P, *A, D / count, F] in float32.

    Each block is a slice of the stack: XLA copies a slice that is shared.
    """
    size = stack.shape[-2] // count
    for block, (operand, indices) in enumerate(for_readers((stack, numbers_P), count)):
        # Without a promise XLA would clamp the numbers.
        rows = operand.at[indices, ..., block * size : (block + 1) * size, :].get(mode="promise_in_bounds")
        yield rows.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def product_xla(
    x: jax.Array, kernel: jax.Array, stack: jax.Array | None, number: jax.Array | None, dtype: Any
) -> jax.Array:
    """Computes `x @ kernel`; a single row reads the kernel as matrix `number` of the stack, if there is one.

    For one row of 512 x 1,024 float32 that took 76 us, and a copy and a product 121; for two rows 106 and 92
    (2 cores of an AMD EPYC, 64 matrices in turn).
    """
    if stack is not None and number is not None and x.shape[-2] == 1:
        return product_in_place(x, stack, number[None], dtype=dtype)
    return matmul(x, kernel, dtype=dtype)


def _forward(x, kernel, stack, number, dtype):
    del stack, number
    # Not in place: the backward pass reads the layer's own matrix anyway.
    return matmul(x, kernel, dtype=dtype), (x, kernel)


def _backward(dtype, saved, grad):
    del dtype
    x, kernel = saved
    # A result may be wider than its operands, as logits are. The products of its gradient are not.
    grad = grad.astype(jnp.promote_types(x.dtype, kernel.dtype))
    # Two products read the gradient. On GPUs XLA would compute a concatenated or masked one twice.
    grad = lax.platform_dependent(grad, cpu=lambda x: x, default=lax.optimization_barrier)
    grad_x = einsum("...pf,...df->...pd", grad, kernel).astype(x.dtype)
    # The gradient of a layer's matrix belongs to its slice; the stack has none.
    return grad_x, transposed_product(x, grad).astype(kernel.dtype), None, None


product_xla.defvjp(_forward, _backward)
