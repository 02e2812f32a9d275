"""`newton_schulz` in Pallas for Triton: two kernels for the three products of an iteration.

A Gram matrix is symmetric, and so is its square. Each pair of mirrored blocks of such a product is computed
once and stored twice, which halves the work. Terms that are added to a product are added before it is stored.
Gram matrices are stored without their mean (`centre`).

Letters are those of the package; S is the short side, X the contracted one, I and J count rows and columns of
a block.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, launch, load, load_transposed, store
from pallas_kernels.blocks import KernelSettings, block_mask, valid_mask
from pallas_kernels.newton_schulz.centre import centre


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(KernelSettings):
    """Settings of the kernels.

    Attributes:
      side: rows and columns of a block of a result.
      contracted: entries of the contracted axis for each iteration of the main loop.
    """

    side: int = 128
    contracted: int = 64
    num_warps: int = 8
    num_stages: int = 2


def check(itemsize: int, blocks: Blocks) -> None:
    """Checks that settings can be compiled and fit local memory.

    Args:
      itemsize: bytes of an entry of the operands.
      blocks: block sizes of the kernels.

    Raises:
      ArgumentError: with the wrong setting and the values that are accepted.
    """
    # Both operands of a product, once for each stage of the pipeline that reads ahead.
    held = 2 * blocks.side * blocks.contracted * max(blocks.num_stages - 1, 1) * itemsize
    # A block that is added to the sum is converted to the layout of the sum in local memory, in float32.
    blocks.check("newton_schulz", "side", "contracted", lds_bytes=max(held, blocks.side**2 * 4))
    blocks.check_schedule("newton_schulz", "blocks", (blocks.side, blocks.side, blocks.contracted), itemsize)


def step(x_MRC: jax.Array, coefficients: tuple[float, float, float], blocks: Blocks) -> jax.Array:
    """Runs one iteration, `a X + (b G + c G G) X`, or `a X + X (b G + c G G)` for tall matrices."""
    is_wide = x_MRC.shape[1] <= x_MRC.shape[2]
    around = centre(x_MRC, coefficients)
    rest_MSS = gram(x_MRC, around.mean_M, transposed=not is_wide, blocks=blocks)
    polynomial_MSS = _polynomial(rest_MSS, around.linear_M, coefficients[2], blocks)
    # The Gram matrix is that of the shorter side: it multiplies a wide matrix from the left and a tall one
    # from the right.
    factors = (polynomial_MSS, x_MRC) if is_wide else (x_MRC, polynomial_MSS)
    return _product(*factors, x_MRC, around.factor_M, blocks)


def gram(x_MRC: jax.Array, mean_M: jax.Array, *, transposed: bool, blocks: Blocks) -> jax.Array:
    """Returns `X X^T`, or `X^T X`, minus the mean times the identity; the result is exactly symmetric."""

    def subtract(sum_IJ, means, matrix, first, second):
        # Before the sum is rounded: bfloat16 would lose most on the diagonal (`centre`).
        entries = jnp.arange(blocks.side)
        on_diagonal_IJ = first + entries[:, None] == second + entries[None, :]
        return sum_IJ - jnp.where(on_diagonal_IJ, means[matrix], 0.0)

    how = _Symmetric("newton_schulz_gram", transposed=transposed, finish=subtract)
    return _symmetric(x_MRC, (mean_M,), how, blocks)


def _polynomial(rest_MSS: jax.Array, linear_M: jax.Array, square: float, blocks: Blocks) -> jax.Array:
    """Returns `linear R + square R²`. R is symmetric, so that its square is a Gram matrix too."""

    def add(sum_IJ, linear, rest, matrix, first, second):
        # The kernel's result is the polynomial itself: a pass of its own for this sum would read and write
        # all of R² again.
        rest_IJ = _load(rest, matrix, (first, blocks.side), (second, blocks.side))
        return square * sum_IJ + linear[matrix] * rest_IJ.astype(jnp.float32)

    how = _Symmetric("newton_schulz_polynomial", transposed=False, finish=add)
    return _symmetric(rest_MSS, (linear_M, rest_MSS), how, blocks)


@dataclasses.dataclass(frozen=True)
class _Symmetric:
    """A product of matrices with their transposes, followed by an element-wise function.

    Attributes:
      name: name of the kernel.
      transposed: whether the product is `X^T X` instead of `X X^T`.
      finish: function of a block's sum, the additional references, the index of the matrix, and the first row
        and column of the block.
    """

    name: str
    transposed: bool
    finish: Callable[..., jax.Array]


def _symmetric(
    x_MRC: jax.Array, additional: tuple[jax.Array, ...], what: _Symmetric, blocks: Blocks
) -> jax.Array:
    num_matrices, rows, columns = x_MRC.shape
    short, contracted = (columns, rows) if what.transposed else (rows, columns)
    num_blocks = pl.cdiv(short, blocks.side)
    # Lower triangle of blocks: the kernel mirrors each.
    pairs = np.stack(np.tril_indices(num_blocks), axis=1).astype(np.int32)

    def kernel(x, pairs, *references):
        *others, out = references
        pair, matrix = pl.program_id(0), pl.program_id(1)
        # The column is computed so that it is not a constant, for the reason in `from_start`.
        first, second = (pairs[pair, pair * 0 + i] * blocks.side for i in range(2))

        def factors(at):
            if what.transposed:
                left_XI, right_XJ = (_load(x, matrix, at, (start, blocks.side)) for start in (first, second))
                return left_XI.T, right_XJ
            right_XJ = _load_transposed(x, matrix, (second, blocks.side), at)
            return _load(x, matrix, (first, blocks.side), at), right_XJ

        def add(i, sum_IJ):
            return sum_IJ + dot(*factors((i * blocks.contracted, blocks.contracted)))

        sum_IJ = what.finish(_loop(contracted, blocks, add), *others, matrix, first, second)
        # Rounded before it is transposed, which then needs half of the local memory.
        block_IJ = sum_IJ.astype(out.dtype)
        _store(out, matrix, first, second, block_IJ)
        # A block on the diagonal is its own mirror image: two stores to it would race.
        _store(out, matrix, second, first, block_IJ.T, only_if=first != second)

    grid, operands = (len(pairs), num_matrices), (x_MRC, jnp.asarray(pairs), *additional)
    result = jax.ShapeDtypeStruct((num_matrices, short, short), x_MRC.dtype)
    return launch(kernel, operands, [result], blocks, grid=grid, name=what.name)[0]


def _product(
    left_MRX: jax.Array, right_MXC: jax.Array, added_MRC: jax.Array, factor_M: jax.Array, blocks: Blocks
) -> jax.Array:
    """Returns `factor * added + left @ right`."""
    num_matrices, rows, columns = added_MRC.shape

    def kernel(left, right, added, factors, out):
        first, second = (pl.program_id(axis) * blocks.side for axis in range(2))
        matrix = pl.program_id(2)

        def add(i, sum_IJ):
            span = i * blocks.contracted, blocks.contracted
            left_IX = _load(left, matrix, (first, blocks.side), span)
            return sum_IJ + dot(left_IX, _load(right, matrix, span, (second, blocks.side)))

        sum_IJ = _loop(left_MRX.shape[2], blocks, add)
        added_IJ = _load(added, matrix, (first, blocks.side), (second, blocks.side))
        # Added while the product is still float32, so that the new matrix is rounded only once.
        _store(out, matrix, first, second, factors[matrix] * added_IJ.astype(jnp.float32) + sum_IJ)

    grid = (pl.cdiv(rows, blocks.side), pl.cdiv(columns, blocks.side), num_matrices)
    result = jax.ShapeDtypeStruct(added_MRC.shape, added_MRC.dtype)
    operands = left_MRX, right_MXC, added_MRC, factor_M
    return launch(kernel, operands, [result], blocks, grid=grid, name="newton_schulz_product")[0]


def _loop(contracted: int, blocks: Blocks, add) -> jax.Array:
    # Matrix instructions accumulate in float32 for operands of either dtype.
    zeros_IJ = jnp.zeros((blocks.side, blocks.side), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(contracted, blocks.contracted), add, zeros_IJ)


def _at(array, matrix, rows, columns):
    """Returns the address of a block and its mask of valid entries; spans are (first, number)."""
    _, height, width = array.shape
    valid = valid_mask(rows[0], rows[1], height), valid_mask(columns[0], columns[1], width)
    return array.at[matrix, pl.ds(*rows), pl.ds(*columns)], block_mask(*valid, (rows[1], columns[1]))


def _load(array, matrix, rows, columns) -> jax.Array:
    """Loads a block; entries beyond the matrix read as zeros."""
    return load(*_at(array, matrix, rows, columns))


def _load_transposed(array, matrix, rows, columns) -> jax.Array:
    """Loads a block as its transpose, as the right factor of a product that contracts the columns."""
    _, height, width = array.shape
    return load_transposed(
        array,
        rows[0] + jnp.arange(rows[1]),
        columns[0] + jnp.arange(columns[1]),
        first=(matrix,),
        is_row=valid_mask(rows[0], rows[1], height),
        is_column=valid_mask(columns[0], columns[1], width),
    )


def _store(array, matrix, row, column, values, *, only_if=None) -> None:
    at, mask = _at(array, matrix, (row, values.shape[0]), (column, values.shape[1]))
    if only_if is not None:
        # The condition is one number for the whole block, and Triton's mask needs the shape of the block.
        only_if = jnp.broadcast_to(only_if, values.shape)
        mask = only_if if mask is None else mask & only_if
    store(at, values, mask)
