"""`grouped_matmul` and `grouped_swiglu` in Pallas for Triton.

Rows are split into tiles of one group each: the last tile of a group is not filled with rows of the next one,
so that a program multiplies by one matrix. The rows of each tile are data, computed before the launch. There
are as many programs as any group sizes could need; the superfluous ones do nothing. Nothing is padded in
memory.

Letters are those of the package; X is the contracted width and Y the output width of a product, I counts
tiles of rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, launch, load, load_transposed, store
from pallas_kernels.blocks import KernelSettings, block_mask, valid_mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(KernelSettings):
    """Settings of one kernel.

    Attributes:
      rows: rows of a block of the result.
      columns: columns of a block of the result.
      contracted: entries of the contracted axis for each iteration of the main loop.
    """

    rows: int
    columns: int
    contracted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Settings of the kernels.

    Attributes:
      product: settings for rows times their group's matrix, and for the gradient of rows.
      swiglu: settings for the product with gate and up at once.
      grad_weights: settings for the gradient of matrices; `rows` are rows of a matrix, and `contracted`
        counts rows of the group.
    """

    product: Tile
    swiglu: Tile
    grad_weights: Tile


def check(itemsize: int, blocks: Blocks) -> None:
    """Checks that settings can be compiled and fit local memory.

    Args:
      itemsize: bytes of an entry of the operands.
      blocks: block sizes of the kernels.

    Raises:
      ArgumentError: with the wrong setting and the values that are accepted.
    """
    for name in ("product", "swiglu", "grad_weights"):
        tile = getattr(blocks, name)
        columns = tile.columns * (2 if name == "swiglu" else 1)
        # Both operands of a product, once for each stage of the pipeline that reads ahead.
        held = (tile.rows + columns) * tile.contracted * max(tile.num_stages - 1, 1)
        tile.check("grouped_matmul", "rows", "columns", "contracted", part=name, lds_bytes=held * itemsize)
        tile.check_schedule("grouped_matmul", name, (tile.rows, tile.columns, tile.contracted), itemsize)


def product(
    rows_PX: jax.Array,
    weights_EDF: jax.Array,
    group_sizes_E: jax.Array,
    first_matrix: jax.Array,
    tile: Tile,
    *,
    name: str = "grouped_matmul",
    transposed: bool = False,
) -> jax.Array:
    """Multiplies each group's rows by its matrix or its transpose, [P, Y]; zeros after the last group.

    Args:
      rows_PX: rows, sorted by group.
      weights_EDF: matrices, possibly of several layers.
      group_sizes_E: number of rows of each group.
      first_matrix: index of the first group's matrix.
      tile: settings of the kernel.
      name: name of the kernel.
      transposed: whether to multiply by the transpose, as for the gradient of rows.
    """
    num_rows, contracted = rows_PX.shape
    width = weights_EDF.shape[1 if transposed else 2]
    where = _tiles(group_sizes_E, first_matrix, num_rows, tile.rows)

    def kernel(rows, weights, where, out):
        matrix, first, end, steps = _where(where, pl.program_id(0), contracted, tile.contracted)
        column = pl.program_id(1) * tile.columns
        load = functools.partial(_load_weights, weights, matrix, tile=tile, transposed=transposed)

        def step(i, sum_IY):
            rows_IX = _load(rows, (first, tile.rows, end), (i * tile.contracted, tile.contracted, contracted))
            return sum_IY + dot(rows_IX, load(i * tile.contracted, column))

        zeros_IY = jnp.zeros((tile.rows, tile.columns), jnp.float32)
        sum_IY = lax.fori_loop(0, steps, step, zeros_IY)
        _store(out, (first, tile.rows, end), (column, tile.columns, width), sum_IY)

    grid, name = (where.shape[0], pl.cdiv(width, tile.columns)), f"{name}_grad_rows" if transposed else name
    result = jax.ShapeDtypeStruct((num_rows, width), rows_PX.dtype)
    (out_PY,) = launch(kernel, (rows_PX, weights_EDF, where), [result], tile, grid=grid, name=name)
    return out_PY


def swiglu(
    rows_PD: jax.Array,
    weights_EDQ: jax.Array,
    group_sizes_E: jax.Array,
    first_matrix: jax.Array,
    tile: Tile,
    *,
    name: str = "grouped_swiglu",
) -> tuple[jax.Array, jax.Array]:
    """Returns `silu(gate) * up`, [P, F], and for the backward pass gate and up concatenated, [P, 2*F].

    Each matrix has the columns of gate, followed by those of up. A program computes the same columns of both.
    """
    num_rows, contracted = rows_PD.shape
    width = weights_EDQ.shape[2] // 2
    where = _tiles(group_sizes_E, first_matrix, num_rows, tile.rows)

    def kernel(rows, weights, where, out, gate_up):
        matrix, first, end, steps = _where(where, pl.program_id(0), contracted, tile.contracted)
        column = pl.program_id(1) * tile.columns
        load = functools.partial(_load_weights, weights, matrix, tile=tile, width=width)

        def step(i, sums):
            rows_ID = _load(rows, (first, tile.rows, end), (i * tile.contracted, tile.contracted, contracted))
            at = i * tile.contracted
            gate_IF = sums[0] + dot(rows_ID, load(at, column))
            return gate_IF, sums[1] + dot(rows_ID, load(at, column, offset=width))

        zeros_IF = jnp.zeros((tile.rows, tile.columns), jnp.float32)
        gate_IF, up_IF = lax.fori_loop(0, steps, step, (zeros_IF, zeros_IF))
        # Stored before the activation, for the backward pass: recomputing them would cost both products.
        _store(gate_up, (first, tile.rows, end), (column, tile.columns, width), gate_IF)
        _store(gate_up, (first, tile.rows, end), (column, tile.columns, width), up_IF, offset=width)
        activated_IF = gate_IF / (1 + jnp.exp(-gate_IF)) * up_IF
        _store(out, (first, tile.rows, end), (column, tile.columns, width), activated_IF)

    grid, operands = (where.shape[0], pl.cdiv(width, tile.columns)), (rows_PD, weights_EDQ, where)
    results = [jax.ShapeDtypeStruct((num_rows, size), rows_PD.dtype) for size in (width, 2 * width)]
    out_PF, gate_up_PQ = launch(kernel, operands, results, tile, grid=grid, name=name)
    return out_PF, gate_up_PQ


def grad_weights(
    rows_PD: jax.Array,
    grad_PF: jax.Array,
    group_sizes_E: jax.Array,
    tile: Tile,
    *,
    name: str = "grouped_matmul",
) -> jax.Array:
    """Returns the gradient of each matrix, [E, D, F]: row times gradient, summed in the order of the rows."""
    width, columns = rows_PD.shape[1], grad_PF.shape[1]
    ends_E = jnp.cumsum(group_sizes_E)
    spans_E2 = jnp.stack([ends_E - group_sizes_E, ends_E], axis=1).astype(jnp.int32)

    def kernel(rows, grad, spans, out):
        group, row, column = pl.program_id(2), pl.program_id(0) * tile.rows, pl.program_id(1) * tile.columns
        first, end = spans[group, group * 0], spans[group, group * 0 + 1]

        def step(i, sum_DF):
            # Rows of the next group are masked: they read as zeros, which add nothing.
            span = first + i * tile.contracted, tile.contracted, end
            rows_ID = _load(rows, span, (row, tile.rows, width))
            return sum_DF + dot(rows_ID.T, _load(grad, span, (column, tile.columns, columns)))

        # The number of rows of a group is data, so that the loop has a traced length.
        steps = (end - first + tile.contracted - 1) // tile.contracted
        sum_DF = lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
        _store(out, (row, tile.rows, width), (column, tile.columns, columns), sum_DF, matrix=(group,))

    grid = pl.cdiv(width, tile.rows), pl.cdiv(columns, tile.columns), group_sizes_E.shape[0]
    operands, name = (rows_PD, grad_PF, spans_E2), f"{name}_grad_weights"
    result = jax.ShapeDtypeStruct((group_sizes_E.shape[0], width, columns), rows_PD.dtype)
    (grad_EDF,) = launch(kernel, operands, [result], tile, grid=grid, name=name)
    return grad_EDF


def _tiles(group_sizes_E: jax.Array, first_matrix: jax.Array, num_rows: int, size: int) -> jax.Array:
    """Returns matrix, first row and end of each tile, [I, 3]; rows after the last group have matrix -1.

    A tile that no group needs is empty: its first row equals its end.
    """
    num_groups = group_sizes_E.shape[0]
    num_ungrouped = num_rows - jnp.sum(group_sizes_E)
    # Rows after the last group are one more group, whose tiles have no matrix and store zeros.
    sizes = jnp.append(group_sizes_E, num_ungrouped).astype(jnp.int32)
    ends, tiles = jnp.cumsum(sizes), -(-sizes // size)
    tiles_end = jnp.cumsum(tiles)
    # Each group, and the rows after the last group, can leave one tile partly filled.
    number_I = jnp.arange(pl.cdiv(num_rows, size) + num_groups, dtype=jnp.int32)
    group_I = jnp.searchsorted(tiles_end, number_I, side="right", method="compare_all")
    group_I = jnp.minimum(group_I, num_groups).astype(jnp.int32)
    first_I = (ends - sizes)[group_I] + (number_I - (tiles_end - tiles)[group_I]) * size
    matrix_I = jnp.where(group_I < num_groups, first_matrix + group_I, -1)
    return jnp.stack([matrix_I, jnp.minimum(first_I, ends[group_I]), ends[group_I]], axis=1)


def _where(where, number, contracted: int, block: int):
    """Returns matrix, first row and end of a tile, and its number of iterations: 0 without a group."""
    matrix, first, end = (where[number, number * 0 + i] for i in range(3))
    is_needed = (matrix >= 0) & (first < end)
    # With no iterations the sum stays zero, which is what rows without a group must become.
    steps = is_needed.astype(jnp.int32) * pl.cdiv(contracted, block)
    return jnp.maximum(matrix, 0), first, end, steps


def _at(array, rows, columns, matrix, offset: int):
    """Returns the address of a block and the mask of its valid entries.

    Rows and columns are triples: first index, number, and end of the axis.
    """
    at = array.at[(*matrix, pl.ds(rows[0], rows[1]), pl.ds(offset + columns[0], columns[1]))]
    return at, block_mask(valid_mask(*rows), valid_mask(*columns), (rows[1], columns[1]))


def _load(array, rows, columns, *, matrix=(), offset: int = 0) -> jax.Array:
    """Loads a block; entries beyond the ends read as zeros."""
    return load(*_at(array, rows, columns, matrix, offset))


def _store(array, rows, columns, values, *, matrix=(), offset: int = 0) -> None:
    at, mask = _at(array, rows, columns, matrix, offset)
    store(at, values, mask)


def _load_weights(
    weights,
    matrix,
    contracted,
    column,
    *,
    tile: Tile,
    transposed: bool = False,
    width: int | None = None,
    offset: int = 0,
) -> jax.Array:
    """Loads a block [contracted, columns] of a matrix, or of its transpose."""
    _, height, all_columns = weights.shape
    if transposed:
        return load_transposed(
            weights,
            column + jnp.arange(tile.columns),
            contracted + jnp.arange(tile.contracted),
            first=(matrix,),
            is_row=valid_mask(column, tile.columns, height),
            is_column=valid_mask(contracted, tile.contracted, all_columns),
        )
    rows, columns = (contracted, tile.contracted, height), (column, tile.columns, width or all_columns)
    return _load(weights, rows, columns, matrix=(matrix,), offset=offset)
