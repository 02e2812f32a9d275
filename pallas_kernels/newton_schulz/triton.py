"""`newton_schulz` in Pallas for Triton: two kernels a step's three products.

A Gram matrix is its own transpose, and so is its square. Of such a product each pair of mirrored
blocks is made once and written twice: half of the work. What is added to a product is added before
it leaves the program. Gram matrices are written without their mean (`centre`).

Letters as in the package; S the short side, X the contracted one, I and J blocks.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.launch import MATRIX_TILE, Launch, check_blocks, check_lds, launch
from pallas_kernels.newton_schulz.centre import centre


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Settings of the kernels.

    Attributes:
      side: of a square block of a result.
      contracted: entries that are multiplied in one step of the loop.
      num_warps: wavefronts a program.
      num_stages: of the pipeline.
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
    sides = {"side": blocks.side, "contracted": blocks.contracted}
    check_blocks("newton_schulz", sides, smallest=MATRIX_TILE)
    check_blocks("newton_schulz", {"num_warps": blocks.num_warps})
    held = 2 * blocks.side * blocks.contracted * max(blocks.num_stages - 1, 1) * itemsize
    # A block that is added to the sum changes its layout there, in float32.
    check_lds("newton_schulz", max(held, blocks.side**2 * 4), blocks)


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
            return sum_IJ + _dot(load(first, at), load(second, at).T)

        sum_IJ = what.finish(_loop(contracted, blocks, add), *others, matrix, first, second)
        block_IJ = sum_IJ.astype(out.dtype)  # before it is mirrored: that takes half of the local memory
        _store(out, matrix, first, second, block_IJ)
        _store(out, matrix, second, first, block_IJ.T, only_if=first != second)

    how = _launch(what.name, (len(pairs), num_matrices), blocks)
    result = jax.ShapeDtypeStruct((num_matrices, short, short), x_MRC.dtype)
    return launch(kernel, (x_MRC, jnp.asarray(pairs), *beside), [result], how)[0]


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
            return sum_IJ + _dot(left_IX, _load(right, matrix, span, (second, blocks.side)))

        sum_IJ = _loop(left_MRX.shape[2], blocks, add)
        there = _load(added, matrix, (first, blocks.side), (second, blocks.side))
        _store(out, matrix, first, second, factors[matrix] * there.astype(jnp.float32) + sum_IJ)

    grid = (pl.cdiv(rows, blocks.side), pl.cdiv(columns, blocks.side), num_matrices)
    how = _launch("newton_schulz_product", grid, blocks)
    result = jax.ShapeDtypeStruct(added_MRC.shape, added_MRC.dtype)
    return launch(kernel, (left_MRX, right_MXC, added_MRC, factor_M), [result], how)[0]


def _launch(name: str, grid: tuple[int, ...], blocks: Blocks) -> Launch:
    return Launch(grid=grid, num_warps=blocks.num_warps, num_stages=blocks.num_stages, name=name)


def _loop(contracted: int, blocks: Blocks, add) -> jax.Array:
    zeros_IJ = jnp.zeros((blocks.side, blocks.side), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(contracted, blocks.contracted), add, zeros_IJ)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _masks(array, *spans) -> list[jax.Array]:
    """Which rows and columns of a block exist, where their number alone does not say that all do."""
    masks = []
    for axis, (first, size) in enumerate(spans):
        if array.shape[axis + 1] % size:
            there = first + jnp.arange(size) < array.shape[axis + 1]
            masks.append(there[:, None] if axis == 0 else there[None, :])
    return masks


def _load(array, matrix, rows, columns) -> jax.Array:
    """A block; each span is its first entry and how many; beyond the matrix it reads zeros."""
    at = array.at[matrix, pl.ds(*rows), pl.ds(*columns)]
    masks = _masks(array, rows, columns)
    if not masks:
        return triton.load(at)
    mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (rows[1], columns[1]))
    return triton.load(at, mask=mask, other=0)


def _store(array, matrix, row, column, values, *, only_if=None) -> None:
    spans = tuple(zip((row, column), values.shape, strict=True))
    masks = _masks(array, *spans)
    if only_if is not None:
        masks.append(jnp.broadcast_to(only_if, (1, 1)))
    mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), values.shape) if masks else None
    at = array.at[matrix, pl.ds(*spans[0]), pl.ds(*spans[1])]
    triton.store(at, values.astype(array.dtype), mask=mask)
