"""Products of few rows that read matrices of a stack in place.

Letters: A products in a batch, M matrices of a stack, P rows, D inputs, F outputs.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fusion import FUSED_READERS, READERS_OF_COPY, for_readers, not_inlined
from pallas_kernels.precision import einsum, matmul

MAX_BYTES_BY_ROW = 2**21
"""Size of a matrix up to which a core reads it once for each of its rows. Compared with cores that share each
matrix, products of 8 rows took 0.93 of the time with 2 MiB, 0.79 with 4, and 1.10 and 1.17 with 16; those of
one row took 0.75 with 2 MiB and 1.34 with 8 (2 cores of a Zen 3, each with a second cache of 512 KiB). On a
Zen 4 decoding of 8 rows with 2 MiB took 1.06 while a loop added the partial sums; not measured since."""
MIN_ENTRIES_IN_PLACE = 2**14
"""Smallest number of entries of a batch's matrices that are read in place, which was faster for 512 x 64 and
slower for 64 x 64."""
CACHE_PERIOD = 2**12
"""Distance in bytes of addresses that share a set of the first cache, on x86: it has 64 sets of 64 bytes. A
set has room for 8 lines (AMD Zen 4) or 12 (Intel since 2019)."""
ODD_BLOCKS = range(12, 17)
"""Possible numbers of blocks with an odd number of rows. For 512 rows, decoding with 13 took 0.95 of the time
with 12, which leave 20 rows over instead of 5; with 10 it took 1.03."""
MAX_SUMS = 64
"""Largest number of partial sums that one loop adds."""


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
    copying = functools.partial(_product_of_copies, dtype=dtype)
    cpu = copying
    if can_read_in_place(stack):
        # Rounded outside of the function that is not inlined, so that XLA fuses rounding with what follows.
        cpu = functools.partial(_rounded, product=not_inlined(_product_of_blocks), dtype=dtype)
    return lax.platform_dependent(x, stack, numbers_P, cpu=cpu, default=copying)


def can_read_in_place(stack: jax.Array) -> bool:
    """Whether a CPU reads matrices of the stack in place: large ones that can be divided into blocks."""
    return math.prod(stack.shape[1:]) >= MIN_ENTRIES_IN_PLACE and _blocks(stack) is not None


def _rounded(*operands: jax.Array, product: Callable[..., jax.Array], dtype: Any) -> jax.Array:
    return product(*operands).astype(dtype)


def _product_of_copies(x: jax.Array, stack: jax.Array, numbers_P: jax.Array, *, dtype: Any) -> jax.Array:
    def product(x: jax.Array, number: jax.Array) -> jax.Array:
        return matmul(x, lax.dynamic_index_in_dim(stack, number, keepdims=False), dtype=dtype)

    if len(numbers_P) == 1:
        return product(x, numbers_P[0])
    # One after the other, so that only one matrix is copied at a time.
    rows = jnp.moveaxis(x, -2, 0)[..., None, :]  # [P, *A, 1, D]
    out = lax.map(lambda each: product(*each), (rows, numbers_P))
    return jnp.moveaxis(out[..., 0, :], 0, -2)


class _Blocks(NamedTuple):
    """Division of a matrix into blocks of consecutive rows, of which a loop reads one row each at a time."""

    count: int
    size: int
    """Rows of a block: the number of partial sums that the loop leaves. Rows after the last block are added
    to their sum."""
    added: tuple[int, ...]
    """Number of partial sums that each of the next loops adds if cores share the matrix; XLA's reductions are
    slow for few rows."""


def _blocks(stack: jax.Array) -> _Blocks | None:
    """Divides a matrix so that the rows read at the same time do not evict each other from the first cache.

    Entries in one column of blocks that are a multiple of `CACHE_PERIOD` apart share a set of the cache, and
    evict each other's line if there are more of them than the set has room for. Each line would then be read
    for every 8 of its entries. The experts of a layer took 460 to 510 us for 8 rows with 16 blocks of 32 rows
    of 2 KiB, and 340 to 370 with 12 blocks of 41 rows: an odd number of rows is no multiple of the period (2
    cores of an AMD EPYC, matrices of 512 x 1,024 and 512 x 512 in bfloat16).

    Returns:
      The blocks; None if the matrix cannot be divided.
    """
    num_rows, row_bytes = stack.shape[-2], stack.shape[-1] * stack.dtype.itemsize
    sizes = {count: (num_rows // count - 1) | 1 for count in ODD_BLOCKS}
    # A loop that leaves few partial sums would be fused into the next one.
    odd = [(count, size) for count, size in sizes.items() if FUSED_READERS < size <= MAX_SUMS]
    if odd and row_bytes % CACHE_PERIOD:
        count, size = max(odd, key=math.prod)  # leaves the fewest rows over
        return _Blocks(count, size, (size,))
    count = min(READERS_OF_COPY, num_rows // (FUSED_READERS + 1))
    if not count or num_rows % count:
        return None
    size = rest = num_rows // count
    added = []
    while rest > MAX_SUMS:
        if rest % (FUSED_READERS + 1):
            return None
        added.append(FUSED_READERS + 1)
        rest //= added[-1]
    return _Blocks(count, size, (*added, rest))


def _product_of_blocks(x: jax.Array, stack: jax.Array, numbers_P: jax.Array) -> jax.Array:
    """Adds rows of matrices times entries of x in a loop over blocks, and then its partial sums; float32."""
    blocks = _blocks(stack)
    assert blocks is not None, "can_read_in_place"
    count, size, added = blocks
    # By row, each core computes whole products. Rows with one matrix each read it, and only a small one stays
    # in the core's cache. Otherwise cores share each matrix.
    is_by_row = stack.nbytes // len(stack) <= MAX_BYTES_BY_ROW
    axis = -2 if is_by_row else -3  # axis of the rows of a matrix

    def in_order(x_P: jax.Array) -> jax.Array:
        """Puts P, the first axis, where the loops have it."""
        return x_P if is_by_row else jnp.moveaxis(x_P, 0, -2)

    rest = range(count * size, stack.shape[-2])
    rows = _rows(stack, numbers_P, count + len(rest))
    columns_PD1 = jnp.moveaxis(x, -2, 0).astype(jnp.float32)[..., None]

    def term(first: int, num_rows: int) -> jax.Array:
        end = first + num_rows
        return in_order(columns_PD1[..., first:end, :]) * in_order(next(rows)(first, end))

    terms = [term(block * size, size) for block in range(count)]
    if is_by_row:
        # Two sums, because each addition has to wait for the one before.
        sums: Any = sum(terms[::2]) + sum(terms[1::2])
        # Added by a product: in a loop, sums that are a multiple of `CACHE_PERIOD` apart would evict each
        # other too. Experts take 0.9 of the time; matrices that cores share would take 1.3 to 1.6 of it.
        ones = jnp.ones(sums.shape[:-1], sums.dtype)
        sums = einsum("...r,...rf->...f", ones, sums)[..., None, :]
    else:
        sums = sum(terms)
        for number in added:
            sums = sum(jnp.split(sums, number, axis))
    sums = sum((term(row, 1) for row in rest), start=sums)
    out = jnp.squeeze(sums, axis)
    return jnp.moveaxis(out, 0, -2) if is_by_row else out


def _rows(
    stack: jax.Array, numbers_P: jax.Array, num_readers: int
) -> Iterator[Callable[[int, int], jax.Array]]:
    """Yields a function for each reader that returns rows first..end of each number's matrix in float32.

    The rows are a slice of the stack: XLA copies a slice that is shared.
    """
    for operand, indices in for_readers((stack, numbers_P), num_readers):

        def read(first: int, end: int, operand=operand, indices=indices) -> jax.Array:
            # Without a promise XLA would clamp the numbers.
            return operand.at[indices, ..., first:end, :].get(mode="promise_in_bounds").astype(jnp.float32)

        yield read
