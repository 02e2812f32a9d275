"""`cross_entropy` in Pallas for Triton: logits live and die in registers.

Forward, a program owns a block of rows and a run of the vocabulary, and keeps the maximum, the sum of
exponentials and the target's logit of its rows. Backward, a program makes a block of logits again and
writes its gradient, for one chunk of the vocabulary at a time: a row of the gradients of the hidden
states, D float32 numbers, has no place in registers, so that the two products that end in D are
plain ones.

Letters as in the package; I rows of a block, J entries of the vocabulary of a block.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, launch, load, store
from pallas_kernels.blocks import HIDDEN, KernelSettings, block_mask, check_counts, which_exist


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(KernelSettings):
    """Settings of the kernels.

    Attributes:
      rows: of a block of logits.
      entries: of the vocabulary, of a block of logits.
      width: channels that are multiplied in one step of the loop.
      run: blocks of entries that a program of the forward pass goes through.
      chunk: entries of the vocabulary whose gradient is in memory at a time.
    """

    rows: int = 128
    entries: int = 128
    width: int = 64
    run: int = 8
    chunk: int = 8192
    num_warps: int = 8
    num_stages: int = 2


def check(itemsize: int, blocks: Blocks) -> None:
    """Refuses settings that cannot be compiled or do not fit local memory.

    Raises:
      ValueError: with what is wrong and what would be right.
    """
    held = (blocks.rows + blocks.entries) * blocks.width * max(blocks.num_stages - 1, 1)
    blocks.check("cross_entropy", "rows", "entries", "width", lds_bytes=held * itemsize)
    check_counts("cross_entropy", {"run": blocks.run, "chunk": blocks.chunk})


def forward(
    hidden_PD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None, targets_P: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array]:
    """Each row's logsumexp and its target's logit, [P], float32; 0 for a target that does not exist."""
    shape = _Shape(hidden_PD, table_VD, blocks)
    num_runs = pl.cdiv(shape.num_entries, blocks.entries * blocks.run)

    def kernel(hidden, table, targets, *references):
        *biases, tops, totals, hits = references
        row, run = pl.program_id(0) * blocks.rows, pl.program_id(1)
        is_row = shape.is_row(row)
        target_I = load(targets.at[pl.ds(row, blocks.rows)], is_row, other=-1)

        def step(i, carry):
            top_I, total_I, hit_I = carry
            entry = (run * blocks.run + i) * blocks.entries
            entry_J = entry + jnp.arange(blocks.entries)
            logits_IJ = shape.logits(hidden, table, biases, row, entry)
            logits_IJ = jnp.where((entry_J < shape.num_entries)[None, :], logits_IJ, HIDDEN)
            new_top_I = jnp.maximum(top_I, jnp.max(logits_IJ, axis=1))
            total_I = total_I * jnp.exp(top_I - new_top_I)
            total_I = total_I + jnp.sum(jnp.exp(logits_IJ - new_top_I[:, None]), axis=1)
            is_target_IJ = entry_J[None, :] == target_I[:, None]
            return new_top_I, total_I, hit_I + jnp.sum(jnp.where(is_target_IJ, logits_IJ, 0), axis=1)

        zeros_I = jnp.zeros((blocks.rows,), jnp.float32)
        found = lax.fori_loop(0, blocks.run, step, (zeros_I + HIDDEN, zeros_I, zeros_I))
        for reference, values_I in zip((tops, totals, hits), found, strict=True):
            store(reference.at[run, pl.ds(row, blocks.rows)], values_I, is_row)

    grid = shape.num_row_blocks, num_runs
    results = [jax.ShapeDtypeStruct((num_runs, shape.num_rows), jnp.float32)] * 3
    operands = (hidden_PD, table_VD, targets_P, *_given(bias_V))
    top_RP, total_RP, hit_RP = launch(kernel, operands, results, blocks, grid=grid, name="cross_entropy")
    top_P = top_RP.max(axis=0)
    return top_P + jnp.log(jnp.sum(total_RP * jnp.exp(top_RP - top_P), axis=0)), hit_RP.sum(axis=0)


def grad_logits(
    hidden_PD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    targets_P: jax.Array,
    logsumexp_P: jax.Array,
    towards_all_P: jax.Array,
    towards_target_P: jax.Array,
    start: jax.Array,
    size: int,
    blocks: Blocks,
) -> jax.Array:
    """`towards_all * softmax - towards_target * is_target` of entries [start, start + size), [P, size].

    Args:
      hidden_PD: as for `forward`, and so are the next three.
      table_VD: the embedding.
      bias_V: of the logits.
      targets_P: of the rows.
      logsumexp_P: from `forward`.
      towards_all_P: what a row's softmax is multiplied by.
      towards_target_P: what comes off at its target.
      start: first entry of the chunk.
      size: entries of the chunk; all must exist.
      blocks: settings.
    """
    shape = _Shape(hidden_PD, table_VD, blocks)

    def kernel(hidden, table, targets, logsumexp, towards_all, towards_target, start, *references):
        *biases, out = references
        row, column = pl.program_id(0) * blocks.rows, pl.program_id(1) * blocks.entries
        entry = start[column * 0] + column
        column_J = column + jnp.arange(blocks.entries)
        is_row = shape.is_row(row)
        target_I, logsumexp_I, all_I, one_I = (
            load(x.at[pl.ds(row, blocks.rows)], is_row)
            for x in (targets, logsumexp, towards_all, towards_target)
        )
        logits_IJ = shape.logits(hidden, table, biases, row, entry)
        grad_IJ = jnp.exp(logits_IJ - logsumexp_I[:, None]) * all_I[:, None]
        is_target_IJ = (entry + jnp.arange(blocks.entries))[None, :] == target_I[:, None]
        grad_IJ = grad_IJ - jnp.where(is_target_IJ, one_I[:, None], 0)
        at = out.at[pl.ds(row, blocks.rows), pl.ds(column, blocks.entries)]
        store(at, grad_IJ, is_row[:, None] & (column_J < size)[None, :])

    grid = shape.num_row_blocks, pl.cdiv(size, blocks.entries)
    name = "cross_entropy_grad_logits" + ("" if size == blocks.chunk else "_rest")
    operands = (
        hidden_PD, table_VD, targets_P, logsumexp_P, towards_all_P, towards_target_P, start.reshape(1),
        *_given(bias_V),
    )  # fmt: skip
    result = jax.ShapeDtypeStruct((shape.num_rows, size), hidden_PD.dtype)
    (grad_PJ,) = launch(kernel, operands, [result], blocks, grid=grid, name=name)
    return grad_PJ


def _given(bias_V: jax.Array | None) -> tuple[jax.Array, ...]:
    return () if bias_V is None else (bias_V,)


class _Shape:
    """Sizes of a call, and the product that both kernels begin with."""

    def __init__(self, hidden_PD: jax.Array, table_VD: jax.Array, blocks: Blocks):
        self.num_rows, self.width = hidden_PD.shape
        self.num_entries, self.blocks = table_VD.shape[0], blocks
        self.num_row_blocks = pl.cdiv(self.num_rows, blocks.rows)

    def is_row(self, row) -> jax.Array:
        """Which rows of a block exist."""
        return row + jnp.arange(self.blocks.rows) < self.num_rows

    def logits(self, hidden, table, biases, row, entry) -> jax.Array:
        """A block of logits in float32; of rows and entries that do not exist it is the bias, or 0."""
        blocks = self.blocks

        def step(i, sum_IJ):
            channel = i * blocks.width
            rows_IX = self._load(hidden, row, blocks.rows, self.num_rows, channel)
            entries_JX = self._load(table, entry, blocks.entries, self.num_entries, channel)
            return sum_IJ + dot(rows_IX, entries_JX.T)

        zeros_IJ = jnp.zeros((blocks.rows, blocks.entries), jnp.float32)
        logits_IJ = lax.fori_loop(0, pl.cdiv(self.width, blocks.width), step, zeros_IJ)
        for bias in biases:
            mask_J = entry + jnp.arange(blocks.entries) < self.num_entries
            bias_J = load(bias.at[pl.ds(entry, blocks.entries)], mask_J)
            logits_IJ = logits_IJ + bias_J[None, :]
        return logits_IJ

    def _load(self, array, first, block: int, size: int, channel) -> jax.Array:
        at = array.at[pl.ds(first, block), pl.ds(channel, self.blocks.width)]
        rows = None
        if size % block or self.num_entries % self.blocks.chunk:
            rows = first + jnp.arange(block) < size
        columns = which_exist(channel, self.blocks.width, self.width)
        return load(at, block_mask(rows, columns, (block, self.blocks.width)))


def in_chunks(num_entries: int, chunk: int, visit: Callable, carry):
    """Runs `visit(carry, start, size)` over the vocabulary; it gives the carry and an array [size, ...].

    Whole chunks are a scan, so that the program does not grow with the vocabulary; what is left over
    at the end is a smaller one. The arrays come back as one [V, ...].
    """
    chunk = min(chunk, num_entries)
    whole = num_entries // chunk
    starts = jnp.arange(whole, dtype=jnp.int32) * chunk
    carry, arrays = lax.scan(lambda carry, start: visit(carry, start, chunk), carry, starts)
    arrays = jax.tree.map(lambda x: x.reshape(whole * chunk, *x.shape[2:]), arrays)
    rest = num_entries - whole * chunk
    if not rest:
        return carry, arrays
    carry, last = visit(carry, jnp.int32(whole * chunk), rest)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), arrays, last)
