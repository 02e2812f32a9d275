"""`newton_schulz` in Pallas for Triton: two kernels a step's three products.

A Gram matrix is its own transpose, and so is its square. Of such a product each pair of mirrored
blocks is made once and written twice: half of the work. What is added to a product is added before
it leaves the program.

Letters as in the package; S the short side, X the contracted one, I and J blocks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.launch import MATRIX_TILE, Launch, check_blocks, check_lds, launch


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
    a, b, c = coefficients
    is_wide = x_MRC.shape[1] <= x_MRC.shape[2]
    gram_MSS = _symmetric(x_MRC, None, (0.0, 1.0), transposed=not is_wide, blocks=blocks)
    # The second factor of the square is its own transpose, so that this is a Gram matrix too.
    polynomial_MSS = _symmetric(gram_MSS, gram_MSS, (b, c), transposed=False, blocks=blocks)
    factors = (polynomial_MSS, x_MRC) if is_wide else (x_MRC, polynomial_MSS)
    return _product(*factors, x_MRC, a, blocks)


def _symmetric(
    x_MRC: jax.Array,
    added_MSS: jax.Array | None,
    factors: tuple[float, float],
    *,
    transposed: bool,
    blocks: Blocks,
) -> jax.Array:
    """`factors[0] * added + factors[1] * X X^T`, or of `X^T X`; `added` must be its own transpose."""
    num_matrices, rows, columns = x_MRC.shape
    short, contracted = (columns, rows) if transposed else (rows, columns)
    num_blocks = pl.cdiv(short, blocks.side)
    pairs = np.stack(np.tril_indices(num_blocks), axis=1).astype(np.int32)

    def kernel(x, pairs, *references):
        *added, out = references
        pair, matrix = pl.program_id(0), pl.program_id(1)
        first, second = (pairs[pair, pair * 0 + i] * blocks.side for i in range(2))

        def load(start, at):
            if transposed:
                return _load(x, matrix, (at, blocks.contracted), (start, blocks.side)).T
            return _load(x, matrix, (start, blocks.side), (at, blocks.contracted))

        def add(i, sum_IJ):
            at = i * blocks.contracted
            return sum_IJ + _dot(load(first, at), load(second, at).T)

        sum_IJ = factors[1] * _loop(contracted, blocks, add)
        for reference in added:
            there = _load(reference, matrix, (first, blocks.side), (second, blocks.side))
            sum_IJ = sum_IJ + factors[0] * there.astype(jnp.float32)
        block_IJ = sum_IJ.astype(out.dtype)  # before it is mirrored: that takes half of the local memory
        _store(out, matrix, first, second, block_IJ)
        _store(out, matrix, second, first, block_IJ.T, only_if=first != second)

    name = "newton_schulz_gram" if added_MSS is None else "newton_schulz_polynomial"
    how = _launch(name, (len(pairs), num_matrices), blocks)
    result = jax.ShapeDtypeStruct((num_matrices, short, short), x_MRC.dtype)
    operands = (x_MRC, jnp.asarray(pairs), *(() if added_MSS is None else (added_MSS,)))
    return launch(kernel, operands, [result], how)[0]


def _product(
    left_MRX: jax.Array, right_MXC: jax.Array, added_MRC: jax.Array, factor: float, blocks: Blocks
) -> jax.Array:
    """`factor * added + left @ right`."""
    num_matrices, rows, columns = added_MRC.shape

    def kernel(left, right, added, out):
        first, second = (pl.program_id(axis) * blocks.side for axis in range(2))
        matrix = pl.program_id(2)

        def add(i, sum_IJ):
            span = i * blocks.contracted, blocks.contracted
            left_IX = _load(left, matrix, (first, blocks.side), span)
            return sum_IJ + _dot(left_IX, _load(right, matrix, span, (second, blocks.side)))

        sum_IJ = _loop(left_MRX.shape[2], blocks, add)
        there = _load(added, matrix, (first, blocks.side), (second, blocks.side))
        _store(out, matrix, first, second, factor * there.astype(jnp.float32) + sum_IJ)

    grid = (pl.cdiv(rows, blocks.side), pl.cdiv(columns, blocks.side), num_matrices)
    how = _launch("newton_schulz_product", grid, blocks)
    result = jax.ShapeDtypeStruct(added_MRC.shape, added_MRC.dtype)
    return launch(kernel, (left_MRX, right_MXC, added_MRC), [result], how)[0]


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
