"""`newton_schulz` in Pallas for Triton: two kernels a step's three products.

A Gram matrix is its own transpose, and so is its square. Of such a product each pair of mirrored
blocks is made once and written twice: half of the work. What is added to a product is added before
it leaves the program. Gram matrices are written without their mean (`centre`).

Letters as in the package; S the short side, X the contracted one, I and J blocks.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, launch, load, store
from pallas_kernels.blocks import KernelSettings, block_mask, which_exist
from pallas_kernels.newton_schulz.centre import centre


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(KernelSettings):
    """Settings of the kernels.

    Attributes:
      side: of a square block of a result.
      contracted: entries that are multiplied in one step of the loop.
    """

    side: int = 128
    contracted: int = 64
    num_warps: int = 8
    num_stages: int = 2


def check(itemsize: int, blocks: Blocks) -> None:
    """Refuses settings that cannot be compiled or do not fit local memory.

    Raises:
      ValueError: with what is wrong and what would be right.
    """
    held = 2 * blocks.side * blocks.contracted * max(blocks.num_stages - 1, 1) * itemsize
    # A block that is added to the sum changes its layout there, in float32.
    blocks.check("newton_schulz", "side", "contracted", lds_bytes=max(held, blocks.side**2 * 4))


def step(x_MRC: jax.Array, coefficients: tuple[float, float, float], blocks: Blocks) -> jax.Array:
    """`a X + (b G + c G G) X` of wide matrices, `a X + X (b G + c G G)` of tall ones."""
    is_wide = x_MRC.shape[1] <= x_MRC.shape[2]
    around = centre(x_MRC, coefficients)
    rest_MSS = gram(x_MRC, around.mean_M, transposed=not is_wide, blocks=blocks)
    polynomial_MSS = _polynomial(rest_MSS, around.linear_M, coefficients[2], blocks)
    factors = (polynomial_MSS, x_MRC) if is_wide else (x_MRC, polynomial_MSS)
    return _product(*factors, x_MRC, around.factor_M, blocks)


def gram(x_MRC: jax.Array, mean_M: jax.Array, *, transposed: bool, blocks: Blocks) -> jax.Array:
    """`X X^T`, or `X^T X`, less the mean times the identity: exactly its own transpose."""

    def subtract(sum_IJ, means, matrix, first, second):
        entries = jnp.arange(blocks.side)
        on_diagonal_IJ = first + entries[:, None] == second + entries[None, :]
        return sum_IJ - jnp.where(on_diagonal_IJ, means[matrix], 0.0)

    how = _Symmetric("newton_schulz_gram", transposed=transposed, finish=subtract)
    return _symmetric(x_MRC, (mean_M,), how, blocks)


def _polynomial(rest_MSS: jax.Array, linear_M: jax.Array, square: float, blocks: Blocks) -> jax.Array:
    """`linear R + square R²`. R is its own transpose, so that its square is a Gram matrix too."""

    def add(sum_IJ, linear, rest, matrix, first, second):
        there_IJ = _load(rest, matrix, (first, blocks.side), (second, blocks.side))
        return square * sum_IJ + linear[matrix] * there_IJ.astype(jnp.float32)

    how = _Symmetric("newton_schulz_polynomial", transposed=False, finish=add)
    return _symmetric(rest_MSS, (linear_M, rest_MSS), how, blocks)


@dataclasses.dataclass(frozen=True)
class _Symmetric:
    """A product of matrices with their transposes, and what becomes of a block of it.

    Attributes:
      name: of the kernel.
      transposed: of `X^T X` instead of `X X^T`.
      finish: takes a block's sum, the references beside the matrices, the matrix's number and where the
        block begins.
    """

    name: str
    transposed: bool
    finish: Callable[..., jax.Array]


def _symmetric(
    x_MRC: jax.Array, beside: tuple[jax.Array, ...], what: _Symmetric, blocks: Blocks
) -> jax.Array:
    num_matrices, rows, columns = x_MRC.shape
    short, contracted = (columns, rows) if what.transposed else (rows, columns)
    num_blocks = pl.cdiv(short, blocks.side)
    pairs = np.stack(np.tril_indices(num_blocks), axis=1).astype(np.int32)

    def kernel(x, pairs, *references):
        *others, out = references
        pair, matrix = pl.program_id(0), pl.program_id(1)
        first, second = (pairs[pair, pair * 0 + i] * blocks.side for i in range(2))

        def load(start, at):
            if what.transposed:
                return _load(x, matrix, (at, blocks.contracted), (start, blocks.side)).T
            return _load(x, matrix, (start, blocks.side), (at, blocks.contracted))

        def add(i, sum_IJ):
            at = i * blocks.contracted
            return sum_IJ + dot(load(first, at), load(second, at).T)

        sum_IJ = what.finish(_loop(contracted, blocks, add), *others, matrix, first, second)
        block_IJ = sum_IJ.astype(out.dtype)  # before it is mirrored: that takes half of the local memory
        _store(out, matrix, first, second, block_IJ)
        _store(out, matrix, second, first, block_IJ.T, only_if=first != second)

    grid, operands = (len(pairs), num_matrices), (x_MRC, jnp.asarray(pairs), *beside)
    result = jax.ShapeDtypeStruct((num_matrices, short, short), x_MRC.dtype)
    return launch(kernel, operands, [result], blocks, grid=grid, name=what.name)[0]


def _product(
    left_MRX: jax.Array, right_MXC: jax.Array, added_MRC: jax.Array, factor_M: jax.Array, blocks: Blocks
) -> jax.Array:
    """`factor * added + left @ right`."""
    num_matrices, rows, columns = added_MRC.shape

    def kernel(left, right, added, factors, out):
        first, second = (pl.program_id(axis) * blocks.side for axis in range(2))
        matrix = pl.program_id(2)

        def add(i, sum_IJ):
            span = i * blocks.contracted, blocks.contracted
            left_IX = _load(left, matrix, (first, blocks.side), span)
            return sum_IJ + dot(left_IX, _load(right, matrix, span, (second, blocks.side)))

        sum_IJ = _loop(left_MRX.shape[2], blocks, add)
        there = _load(added, matrix, (first, blocks.side), (second, blocks.side))
        _store(out, matrix, first, second, factors[matrix] * there.astype(jnp.float32) + sum_IJ)

    grid = (pl.cdiv(rows, blocks.side), pl.cdiv(columns, blocks.side), num_matrices)
    result = jax.ShapeDtypeStruct(added_MRC.shape, added_MRC.dtype)
    operands = left_MRX, right_MXC, added_MRC, factor_M
    return launch(kernel, operands, [result], blocks, grid=grid, name="newton_schulz_product")[0]


def _loop(contracted: int, blocks: Blocks, add) -> jax.Array:
    zeros_IJ = jnp.zeros((blocks.side, blocks.side), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(contracted, blocks.contracted), add, zeros_IJ)


def _at(array, matrix, rows, columns):
    """Where a block of a matrix lies, and which of its entries exist; each span is its first and how many."""
    _, height, width = array.shape
    there = which_exist(rows[0], rows[1], height), which_exist(columns[0], columns[1], width)
    return array.at[matrix, pl.ds(*rows), pl.ds(*columns)], block_mask(*there, (rows[1], columns[1]))


def _load(array, matrix, rows, columns) -> jax.Array:
    """A block; beyond the matrix it reads zeros."""
    return load(*_at(array, matrix, rows, columns))


def _store(array, matrix, row, column, values, *, only_if=None) -> None:
    at, mask = _at(array, matrix, (row, values.shape[0]), (column, values.shape[1]))
    if only_if is not None:
        only_if = jnp.broadcast_to(only_if, values.shape)
        mask = only_if if mask is None else mask & only_if
    store(at, values, mask)
