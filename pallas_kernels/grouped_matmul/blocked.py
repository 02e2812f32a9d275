"""The grouped product as loops over blocks of rows, for CPUs.

A block holds rows of one group only, so that its product is a plain matrix product. Each group is
cut into blocks of one size and one for what remains, rounded up to a few sizes; each size has a
loop of its own, over as many blocks as the group sizes need: its length is data. JAX cannot
differentiate such a loop, and the loop that it can differentiate is slower; hence gradients of its own.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.operands import Operands
from pallas_kernels.product.xla import ROWS_IN_PLACE, product_in_place, transposed_product

BLOCK_ROWS = 512
"""Enough rows for a product to reach nine tenths of a CPU's peak; its weights are read once a block."""
ROUNDING = 64
"""Rows that the last block of a group is rounded up to a multiple of."""
FEW_ROWS = 128
"""Up to so many rows have blocks of at most `ROWS_IN_PLACE`, which read the weights in place; more rows have
blocks of up to `BLOCK_ROWS`."""


def multiply(operands: Operands) -> jax.Array:
    """Each group's rows times its matrix, which is read in the stack; zeros behind the last group."""
    rows_PD, _, group_sizes_E, stack_MDF, first_matrix = operands
    if rows_PD.shape[0] == 1:
        return _product_of_one(rows_PD, group_sizes_E, stack_MDF, first_matrix)
    product = product_in_place if rows_PD.shape[0] <= FEW_ROWS else _multiply
    return _product(rows_PD, group_sizes_E, stack_MDF, first_matrix, product)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Blocks of one size. One that would pass the last row is moved up, hence `first` and `end`."""

    size: int
    whole: bool  # of a group that has more blocks; else these are the groups' last ones
    num: jax.Array  # [], blocks that hold rows
    group: jax.Array  # [blocks]
    start: jax.Array  # [blocks], row at which the block is read
    first: jax.Array  # [blocks], row from which on it counts
    end: jax.Array  # [blocks], row before which it counts

    def mask(self, i: jax.Array) -> jax.Array:
        """[size, 1], the rows of block i that count."""
        row = self.start[i] + jnp.arange(self.size)
        return ((row >= self.first[i]) & (row < self.end[i]))[:, None]


def block_sizes(num_rows: int) -> tuple[int, ...]:
    """Rows of a block, for each of the loops: one over whole blocks, and one for each size of a last one."""
    are_few = num_rows <= FEW_ROWS
    largest = min(ROWS_IN_PLACE if are_few else BLOCK_ROWS, num_rows)
    rounding = ROWS_IN_PLACE // 2 if are_few else ROUNDING
    return (largest, *range(rounding, largest, rounding), largest)


def _cut(group_sizes_E: jax.Array, num_rows: int) -> Iterator[_Blocks]:
    """The blocks of all groups, by size: first each group's last one, then the whole ones."""
    if num_rows == 0:
        return
    largest, *last_sizes = block_sizes(num_rows)
    end_E = jnp.cumsum(group_sizes_E)
    whole_E = jnp.maximum(group_sizes_E - 1, 0) // largest  # before the last block
    rest_E = group_sizes_E - whole_E * largest
    smaller = 0
    for size in last_sizes:
        fits_E = ((rest_E > smaller) & (rest_E <= size)).astype(jnp.int32)
        group, _ = _repeat(fits_E, group_sizes_E.shape[0])
        first, end = (end_E - rest_E)[group], end_E[group]
        yield _Blocks(size, False, fits_E.sum(), group, _start(first, size, num_rows), first, end)
        smaller = size
    if num_rows > largest:
        group, nth = _repeat(whole_E, num_rows // largest)
        first = (end_E - group_sizes_E)[group] + nth * largest
        start = _start(first, largest, num_rows)
        yield _Blocks(largest, True, whole_E.sum(), group, start, first, first + largest)


def _repeat(times_E: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Number e `times_E[e]` times, for each e, and how often it came before; [length]."""
    end_E = jnp.cumsum(times_E)
    index = jnp.arange(length)
    # Compared with all ends at once: the default would loop, at more cost than a small product.
    number = jnp.searchsorted(end_E, index, side="right", method="compare_all")
    number = jnp.minimum(number, times_E.shape[0] - 1)
    return number, index - (end_E - times_E)[number]


def _start(first: jax.Array, size: int, num_rows: int) -> jax.Array:
    return jnp.minimum(first, num_rows - size)


def _product(
    rows_PX: jax.Array,
    group_sizes_E: jax.Array,
    stack_MDF: jax.Array,
    first_matrix: jax.Array,
    multiply: Callable,
) -> jax.Array:
    """Runs `multiply(block, stack_MDF, matrix)` over all blocks, into zeros."""
    out = jax.eval_shape(multiply, rows_PX, stack_MDF, first_matrix)
    out_PY = _zeros(out.shape, out.dtype, rows_PX)
    for blocks in _cut(group_sizes_E, rows_PX.shape[0]):

        def step(i, out_PY, blocks=blocks):
            rows = lax.dynamic_slice_in_dim(rows_PX, blocks.start[i], blocks.size)
            product = multiply(rows, stack_MDF, first_matrix + blocks.group[i])
            return _write(out_PY, product, blocks.start[i], blocks.mask(i))

        out_PY = lax.fori_loop(0, blocks.num, step, out_PY)
    return out_PY


def _zeros(shape: tuple[int, ...], dtype: Any, after: jax.Array) -> jax.Array:
    """Zeros for a loop to write to, made where the loop is.

    Constants are made once, where the program starts, and copied for each loop there, all of them: what
    a step of `zaya bench torch` needs beside its arguments was 1,249 MB with them and is 989 MB without.

    Args:
      shape: of the zeros.
      dtype: of the zeros.
      after: what the loop reads, [P, X].
    """
    if after.size == 0:
        return jnp.zeros(shape, dtype)
    zero = (after[0, 0] < -jnp.inf).astype(dtype)  # never true, which the compiler does not see
    return jnp.broadcast_to(zero, shape)


def _multiply(rows: jax.Array, stack_MDF: jax.Array, matrix: jax.Array) -> jax.Array:
    return rows @ lax.dynamic_index_in_dim(stack_MDF, matrix, keepdims=False)


def _product_of_one(
    row_1D: jax.Array, group_sizes_E: jax.Array, stack_MDF: jax.Array, first_matrix: jax.Array
) -> jax.Array:
    """Of a single row, without a loop: the token that is decoded."""
    group, _ = _repeat(group_sizes_E, 1)
    out_1F = product_in_place(row_1D, stack_MDF, first_matrix + group[0])
    return jnp.where(group_sizes_E.sum() > 0, out_1F, 0)


def gradients(operands: Operands, grad_PF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the rows, [P, D], and of the weights: sums over each group's rows of row times gradient, [E, D, F].

    One loop forms both products of a block, whose rows are cut out once.
    """
    rows_PD, _, group_sizes_E, stack_MDF, first_matrix = operands
    num_rows, width = rows_PD.shape
    shape = group_sizes_E.shape[0], width, grad_PF.shape[1]
    sums = _zeros(rows_PD.shape, grad_PF.dtype, grad_PF), _zeros(shape, rows_PD.dtype, grad_PF)
    for blocks in _cut(group_sizes_E, num_rows):

        def step(i, sums, blocks=blocks):
            grad_rows_PD, sums_EDF = sums
            start, group, mask = blocks.start[i], blocks.group[i], blocks.mask(i)
            rows, grads = (  # both: a row that does not count may hold anything
                jnp.where(mask, lax.dynamic_slice_in_dim(x, start, blocks.size), 0)
                for x in (rows_PD, grad_PF)
            )
            sum_DF = transposed_product(rows, grads)
            if blocks.whole:  # not the group's first one here
                sum_DF = sum_DF + lax.dynamic_index_in_dim(sums_EDF, group, keepdims=False)
            sums_EDF = lax.dynamic_update_index_in_dim(sums_EDF, sum_DF, group, axis=0)
            matrix_DF = lax.dynamic_index_in_dim(stack_MDF, first_matrix + group, keepdims=False)
            return _write(grad_rows_PD, grads @ matrix_DF.T, start, mask), sums_EDF

        sums = lax.fori_loop(0, blocks.num, step, sums)
    return sums


def _write(out_PY: jax.Array, block: jax.Array, start: jax.Array, mask: jax.Array) -> jax.Array:
    """The block's rows that count, in their place."""
    before = lax.dynamic_slice_in_dim(out_PY, start, block.shape[0])
    return lax.dynamic_update_slice_in_dim(out_PY, jnp.where(mask, block, before), start, axis=0)
