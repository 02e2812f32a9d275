"""`grouped_matmul` as a loop over blocks of rows, for CPUs.

A block holds rows of one group only, so that its product is a plain matrix product. The loop runs
over the blocks that the group sizes need, no more: its length is data. JAX cannot differentiate
such a loop, and the loop that it can differentiate is slower; hence the backward pass of its own.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

MAX_BLOCK_ROWS = 128


@jax.custom_vjp
def grouped_matmul_blocked(
    rows_PD: jax.Array, weights_EDF: jax.Array, group_sizes_E: jax.Array, first_matrix: jax.Array
) -> jax.Array:
    """See `grouped_matmul`."""
    return _product(rows_PD, weights_EDF, group_sizes_E, first_matrix, lambda block, weights: block @ weights)


def _forward(rows_PD, weights_EDF, group_sizes_E, first_matrix):
    out_PF = grouped_matmul_blocked(rows_PD, weights_EDF, group_sizes_E, first_matrix)
    return out_PF, (rows_PD, weights_EDF, group_sizes_E, first_matrix)


def _backward(saved, grad_PF):
    rows_PD, weights_EDF, group_sizes_E, first_matrix = saved
    grad_rows_PD = _product(
        grad_PF, weights_EDF, group_sizes_E, first_matrix, lambda block, weights: block @ weights.T
    )
    grad_weights_EDF = _weights_gradient(rows_PD, grad_PF, group_sizes_E)
    if grad_weights_EDF.shape != weights_EDF.shape:
        everyone = jnp.zeros_like(weights_EDF)
        grad_weights_EDF = lax.dynamic_update_slice_in_dim(everyone, grad_weights_EDF, first_matrix, axis=0)
    return grad_rows_PD, grad_weights_EDF, None, None


grouped_matmul_blocked.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Where each block lies. One that would pass the last row is moved up, hence `first` and `end`."""

    num: jax.Array  # [], blocks that hold rows
    group: jax.Array  # [blocks]
    start: jax.Array  # [blocks], row at which the block is read
    first: jax.Array  # [blocks], row from which on it counts
    end: jax.Array  # [blocks], row before which it counts


def _cut(group_sizes_E: jax.Array, num_rows: int, size: int) -> _Blocks:
    num_groups = group_sizes_E.shape[0]
    blocks_E = -(-group_sizes_E // size)
    blocks_end_E = jnp.cumsum(blocks_E)
    rows_end_E = jnp.cumsum(group_sizes_E)
    block = jnp.arange(-(-num_rows // size) + num_groups)
    # Compared with all ends at once: the default would loop, at more cost than a small product.
    group = jnp.searchsorted(blocks_end_E, block, side="right", method="compare_all")
    group = jnp.minimum(group, num_groups - 1)
    nth_of_group = block - (blocks_end_E - blocks_E)[group]
    first = (rows_end_E - group_sizes_E)[group] + nth_of_group * size
    return _Blocks(
        num=blocks_end_E[-1],
        group=group,
        start=jnp.minimum(first, num_rows - size),
        first=first,
        end=rows_end_E[group],
    )


def _mask(blocks: _Blocks, i: jax.Array, size: int) -> jax.Array:
    row = blocks.start[i] + jnp.arange(size)
    return ((row >= blocks.first[i]) & (row < blocks.end[i]))[:, None]


def _product(
    rows_PX: jax.Array,
    weights_EDF: jax.Array,
    group_sizes_E: jax.Array,
    first_matrix: jax.Array,
    multiply: Callable,
) -> jax.Array:
    """Runs `multiply(block, weights_DF)` over all blocks, into zeros."""
    num_rows = rows_PX.shape[0]
    out = jax.eval_shape(multiply, rows_PX, weights_EDF[0])
    if num_rows == 0:
        return jnp.zeros(out.shape, out.dtype)
    size = min(MAX_BLOCK_ROWS, num_rows)
    blocks = _cut(group_sizes_E, num_rows, size)

    def step(i, out):
        block = lax.dynamic_slice_in_dim(rows_PX, blocks.start[i], size)
        product = multiply(
            block, lax.dynamic_index_in_dim(weights_EDF, first_matrix + blocks.group[i], keepdims=False)
        )
        before = lax.dynamic_slice_in_dim(out, blocks.start[i], size)
        product = jnp.where(_mask(blocks, i, size), product, before)
        return lax.dynamic_update_slice_in_dim(out, product, blocks.start[i], axis=0)

    return lax.fori_loop(0, blocks.num, step, jnp.zeros(out.shape, out.dtype))


def _weights_gradient(rows_PD: jax.Array, grad_PF: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """Sum over each group's rows of row times gradient, [E, D, F]."""
    num_rows, width = rows_PD.shape
    zeros_EDF = jnp.zeros((group_sizes_E.shape[0], width, grad_PF.shape[1]), rows_PD.dtype)
    if num_rows == 0:
        return zeros_EDF
    size = min(MAX_BLOCK_ROWS, num_rows)
    blocks = _cut(group_sizes_E, num_rows, size)

    def step(i, sums_EDF):
        mask = _mask(blocks, i, size)
        block, grad = (
            jnp.where(mask, lax.dynamic_slice_in_dim(x, blocks.start[i], size), 0) for x in (rows_PD, grad_PF)
        )
        sum_DF = lax.dynamic_index_in_dim(sums_EDF, blocks.group[i], keepdims=False) + block.T @ grad
        return lax.dynamic_update_index_in_dim(sums_EDF, sum_DF, blocks.group[i], axis=0)

    return lax.fori_loop(0, blocks.num, step, zeros_EDF)
