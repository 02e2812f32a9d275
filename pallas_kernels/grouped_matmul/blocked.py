"""Grouped product as loops over blocks of rows, for CPUs.

A block has rows of one group only, so that its product is a plain matrix product. Each group is split into
blocks of one size and a last block for the remainder, rounded up to one of a few sizes. There is a loop for
each size, over as many blocks as the group sizes require: its length is data. JAX cannot differentiate such a
loop, and a loop that it can differentiate is slower; therefore the gradients are written here.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fusion import as_bits, entry_in_loop, from_bits, zero_after
from pallas_kernels.grouped_matmul.operands import Operands
from pallas_kernels.precision import einsum, matmul
from pallas_kernels.product.in_place import product_in_place
from pallas_kernels.product.xla import transposed_product

BLOCK_ROWS = 512
"""Rows of a block: enough for nine tenths of a CPU's peak; weights are read once for each block."""
ROUNDINGS = 16, 64
"""Smallest and largest multiple, in rows, to which the last block of a group is rounded up. Finer ones waste
less work, but each size is a loop to compile."""
ROWS_IN_PLACE = 16
"""Number of rows up to which each reads its matrix in place, without blocks."""


def multiply(operands: Operands) -> jax.Array:
    """Multiplies each group's rows by its matrix in the stack; rows after the last group become zeros."""
    rows_PD, _, group_sizes_E, stack_MDF, first_matrix = operands
    if not 0 < rows_PD.shape[0] <= ROWS_IN_PLACE:
        return product_of_blocks(rows_PD, group_sizes_E, stack_MDF, first_matrix, _multiply)
    num_groups = group_sizes_E.shape[0]
    group_P = _groups_of_rows(group_sizes_E, rows_PD.shape[0])
    out_PF = product_in_place(rows_PD, stack_MDF, first_matrix + jnp.minimum(group_P, num_groups - 1))
    return jnp.where((group_P < num_groups)[:, None], out_PF, 0)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Blocks of one size. A block that would exceed the last row starts earlier and masks the first rows."""

    size: int
    whole: bool  # False for the last blocks of groups
    num: jax.Array  # [], number of blocks that have rows
    group: jax.Array  # [blocks], group of each block
    start: jax.Array  # [blocks], row at which the block is read
    first: jax.Array  # [blocks], first valid row
    end: jax.Array  # [blocks], row after the last valid one

    def mask(self, i: jax.Array) -> jax.Array:
        """Returns the mask of the valid rows of block i, [size, 1]."""
        row = self.start[i] + jnp.arange(self.size)
        return ((row >= self.first[i]) & (row < self.end[i]))[:, None]


def block_sizes(num_rows: int) -> tuple[int, ...]:
    """Returns the rows of a block for each loop: over whole blocks first, then over last blocks."""
    largest, (least, most) = min(BLOCK_ROWS, num_rows), ROUNDINGS
    rounding = min(max(least, num_rows // 8), most)
    return (largest, *range(rounding, largest, rounding), largest)


def _cut(group_sizes_E: jax.Array, num_rows: int) -> Iterator[_Blocks]:
    """Yields the blocks of all groups by size: first the last block of each group, then the whole blocks."""
    if num_rows == 0:
        return
    largest, *last_sizes = block_sizes(num_rows)
    end_E = jnp.cumsum(group_sizes_E)
    whole_E = jnp.maximum(group_sizes_E - 1, 0) // largest  # number of blocks before the last one
    rest_E = group_sizes_E - whole_E * largest
    smaller = 0
    for size in last_sizes:
        fits_E = ((rest_E > smaller) & (rest_E <= size)).astype(jnp.int32)
        # Each group has at most one last block, so that no size has more of them than there are groups.
        group, _ = _repeat(fits_E, group_sizes_E.shape[0])
        first, end = (end_E - rest_E)[group], end_E[group]
        yield _Blocks(size, False, fits_E.sum(), group, _start(first, size, num_rows), first, end)
        smaller = size
    if num_rows > largest:
        group, nth = _repeat(whole_E, num_rows // largest)
        first = (end_E - group_sizes_E)[group] + nth * largest
        start = _start(first, largest, num_rows)
        yield _Blocks(largest, True, whole_E.sum(), group, start, first, first + largest)


def _groups_of_rows(group_sizes_E: jax.Array, num_rows: int) -> jax.Array:
    """Returns the group of each row, [P]; E after the last group."""
    # Compares with all ends at once: the default method is a loop, which costs more than a small product.
    end_E = jnp.cumsum(group_sizes_E)
    return jnp.searchsorted(end_E, jnp.arange(num_rows), side="right", method="compare_all")


def _repeat(times_E: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Repeats each number e `times_E[e]` times; returns the numbers and their repetition index, [length]."""
    number = jnp.minimum(_groups_of_rows(times_E, length), times_E.shape[0] - 1)
    return number, jnp.arange(length) - (jnp.cumsum(times_E) - times_E)[number]


def _start(first: jax.Array, size: int, num_rows: int) -> jax.Array:
    return jnp.minimum(first, num_rows - size)


def product_of_blocks(
    rows_PX: jax.Array,
    group_sizes_E: jax.Array,
    stack_MDF: Any,
    first_matrix: jax.Array,
    multiply: Callable,
) -> jax.Array:
    """Runs `multiply(block, stack_MDF, matrix)` over all blocks, writing into zeros.

    Args:
      rows_PX: rows, sorted by group.
      group_sizes_E: number of rows of each group.
      stack_MDF: matrices of all layers, in any form that `multiply` reads.
      first_matrix: index of the first group's matrix.
      multiply: function of a block of rows, the stack, and the index of the block's matrix.
    """
    out = jax.eval_shape(multiply, rows_PX, stack_MDF, first_matrix)
    out_PY = as_bits(_zeros(out.shape, out.dtype, rows_PX))
    for blocks in _cut(group_sizes_E, rows_PX.shape[0]):

        def step(i, out_PY, blocks=blocks):
            rows = lax.dynamic_slice_in_dim(rows_PX, blocks.start[i], blocks.size)
            product = multiply(rows, stack_MDF, first_matrix + blocks.group[i])
            return _write(out_PY, product, blocks.start[i], blocks.mask(i))

        out_PY = lax.fori_loop(0, blocks.num, step, out_PY)
    return from_bits(out_PY, out.dtype)


def _zeros(shape: tuple[int, ...], dtype: Any, after: jax.Array) -> jax.Array:
    """Returns zeros for a loop to write to, created next to the loop.

    XLA creates constants at the start of the program, and copies them there for each loop: temporary memory
    of a step of `zaya bench torch` was 1,249 MB with constants and is 989 MB without.

    Args:
      shape: shape of the zeros.
      dtype: dtype of the zeros.
      after: array that the loop reads, [P, X]; the zeros depend on it.
    """
    if after.size == 0:
        return jnp.zeros(shape, dtype)
    return jnp.broadcast_to(zero_after(after, dtype), shape)


def _multiply(rows: jax.Array, stack_MDF: jax.Array, matrix: jax.Array) -> jax.Array:
    return matmul(rows, entry_in_loop(stack_MDF, matrix))


def gradients(operands: Operands, grad_PF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the rows, [P, D], and of the weights, [E, D, F].

    The gradient of a matrix is the sum of row times gradient over the rows of its group. One loop computes
    both products of a block, so that its rows are sliced once.
    """
    rows_PD, _, group_sizes_E, stack_MDF, first_matrix = operands
    num_rows, width = rows_PD.shape
    shape = group_sizes_E.shape[0], width, grad_PF.shape[1]
    zeros = _zeros(rows_PD.shape, grad_PF.dtype, grad_PF), _zeros(shape, rows_PD.dtype, grad_PF)
    sums = tuple(map(as_bits, zeros))
    for blocks in _cut(group_sizes_E, num_rows):

        def step(i, sums, blocks=blocks):
            grad_rows_PD, sums_EDF = sums
            start, group, mask = blocks.start[i], blocks.group[i], blocks.mask(i)
            rows, grads = (  # both are masked: rows outside of the group may hold any value, NaN too
                jnp.where(mask, lax.dynamic_slice_in_dim(x, start, blocks.size), 0)
                for x in (rows_PD, grad_PF)
            )
            sum_DF = transposed_product(rows, grads)
            if blocks.whole:  # the group's last block came first, and has initialized the sum
                before_DF = lax.dynamic_index_in_dim(sums_EDF, group, keepdims=False)
                sum_DF = sum_DF + from_bits(before_DF, sum_DF.dtype)
            sums_EDF = lax.dynamic_update_index_in_dim(sums_EDF, as_bits(sum_DF), group, axis=0)
            matrix_DF = entry_in_loop(stack_MDF, first_matrix + group)
            return _write(grad_rows_PD, einsum("pf,df->pd", grads, matrix_DF), start, mask), sums_EDF

        sums = lax.fori_loop(0, blocks.num, step, sums)
    grad_rows_PD, sums_EDF = (from_bits(x, like.dtype) for x, like in zip(sums, zeros, strict=True))
    return grad_rows_PD, sums_EDF


def _write(out_PY: jax.Array, block: jax.Array, start: jax.Array, mask: jax.Array) -> jax.Array:
    """Writes the valid rows of a block at their positions of `as_bits`."""
    block = as_bits(block)
    before = lax.dynamic_slice_in_dim(out_PY, start, block.shape[0])
    return lax.dynamic_update_slice_in_dim(out_PY, jnp.where(mask, block, before), start, axis=0)
