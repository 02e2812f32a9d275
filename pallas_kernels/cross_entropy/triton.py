"""`cross_entropy` in Pallas for Triton: logits stay in registers.

Forward, a program owns a block of rows and a run of vocabulary blocks, and keeps the maximum and the sum of
exponentials of its rows: the online softmax of FlashAttention (arXiv 2205.14135, section 3.1), over the
vocabulary instead of keys. Backward, a program recomputes a block of logits and stores its gradient, for one
chunk of the vocabulary at a time: a row of the gradient of the hidden states, D float32 numbers, does not fit
registers, so that the two products with D outputs are plain ones.

Letters are those of the package; I counts rows of a block, J vocabulary entries of a block, K blocks of the
vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, exp2, launch, load, load_transposed, store
from pallas_kernels.blocks import MASKED_SCORE, KernelSettings, block_mask, check_counts, valid_mask

LOG2_E = math.log2(math.e)
"""Factor from natural to binary exponents: GPUs have an instruction for powers of 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(KernelSettings):
    """Settings of the kernels.

    Attributes:
      rows: rows of a block of logits.
      entries: vocabulary entries of a block of logits.
      width: channels per iteration of the main loop.
      run: number of vocabulary blocks for each program of the forward pass.
      chunk: vocabulary entries whose gradients are stored at a time.
    """

    rows: int = 128
    entries: int = 128
    width: int = 32
    run: int = 8
    chunk: int = 8192
    num_warps: int = 4
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
    held = (blocks.rows + blocks.entries) * blocks.width * max(blocks.num_stages - 1, 1)
    blocks.check("cross_entropy", "rows", "entries", "width", lds_bytes=held * itemsize)
    check_counts("cross_entropy", {"run": blocks.run, "chunk": blocks.chunk})


def forward(
    hidden_PD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None, targets_P: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array]:
    """Returns the logsumexp and the target's logit of each row, [P], float32; 0 for an invalid target."""
    num_runs = pl.cdiv(table_VD.shape[0], blocks.entries * blocks.run)
    # The last run may extend beyond the vocabulary, even by whole blocks.
    is_whole = table_VD.shape[0] % (blocks.entries * blocks.run) == 0
    shape = _Shape(hidden_PD, table_VD, blocks, is_whole=is_whole)

    def kernel(hidden, table, *references):
        *biases, tops, totals = references
        row, run = pl.program_id(0) * blocks.rows, pl.program_id(1)

        def step(i, carry):
            top_I, total_I = carry
            entry = (run * blocks.run + i) * blocks.entries
            logits_IJ = shape.logits(hidden, table, biases, row, entry)
            new_top_I = jnp.maximum(top_I, jnp.max(logits_IJ, axis=1))
            # The sum so far is relative to the previous maximum ([Softmax] section 3, algorithm 3).
            total_I = total_I * exp2((top_I - new_top_I) * LOG2_E)
            return new_top_I, total_I + jnp.sum(exp2((logits_IJ - new_top_I[:, None]) * LOG2_E), axis=1)

        zeros_I = jnp.zeros((blocks.rows,), jnp.float32)
        # The first block of each run has an entry that exists, whose logit replaces this maximum; relative to
        # that logit the exponentials of masked entries are 0.
        top_and_total = lax.fori_loop(0, blocks.run, step, (zeros_I + MASKED_SCORE, zeros_I))
        for reference, values_I in zip((tops, totals), top_and_total, strict=True):
            store(reference.at[run, pl.ds(row, blocks.rows)], values_I, shape.is_row(row))

    grid = shape.num_row_blocks, num_runs
    results = [jax.ShapeDtypeStruct((num_runs, shape.num_rows), jnp.float32)] * 2
    operands = (hidden_PD, table_VD, *_given(bias_V))
    top_RP, total_RP = launch(kernel, operands, results, blocks, grid=grid, name="cross_entropy")
    # Each program read a part of the vocabulary: their maxima and sums, a few numbers per row, are combined
    # here.
    return logsumexp_of_blocks(top_RP, total_RP), target_logits(hidden_PD, table_VD, bias_V, targets_P)


def block_probabilities(
    hidden_PD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns exponentials of all logits relative to the maximum of their block, and how to scale them.

    A block is `blocks.entries` neighboring vocabulary entries of one row. Relative to its maximum no
    exponential overflows, and none is rounded to zero that matters within the block. `grad_from_blocks` turns
    them into the gradient without reading float32 logits, which would be twice the bytes, and without a
    second product.

    Args:
      hidden_PD: final hidden states.
      table_VD: tied embedding.
      bias_V: bias of the logits; None for none.
      blocks: block sizes of the kernel.

    Returns:
      The exponentials, [P, V], in the dtype of the hidden states, the maximum of each block, [blocks, P], and
      the sum of its exponentials, [blocks, P], both float32.
    """
    num_entries = table_VD.shape[0]
    num_blocks = pl.cdiv(num_entries, blocks.entries)
    shape = _Shape(hidden_PD, table_VD, blocks, is_whole=num_entries % blocks.entries == 0)

    def kernel(hidden, table, *references):
        *biases, exponentials, tops, totals = references
        row, block = pl.program_id(0) * blocks.rows, pl.program_id(1)
        entry, is_row_I = block * blocks.entries, shape.is_row(row)
        logits_IJ = shape.logits(hidden, table, biases, row, entry)
        top_I = jnp.max(logits_IJ, axis=1)
        exponentials_IJ = exp2((logits_IJ - top_I[:, None]) * LOG2_E)
        # The sum is of the exponentials before they are rounded, so that the loss is as exact as from logits.
        for reference, values_I in ((tops, top_I), (totals, jnp.sum(exponentials_IJ, axis=1))):
            store(reference.at[block, pl.ds(row, blocks.rows)], values_I, is_row_I)
        is_entry_J = entry + jnp.arange(blocks.entries) < num_entries
        at = exponentials.at[pl.ds(row, blocks.rows), pl.ds(entry, blocks.entries)]
        store(at, exponentials_IJ, is_row_I[:, None] & is_entry_J[None, :])

    grid = shape.num_row_blocks, num_blocks
    results = [jax.ShapeDtypeStruct((shape.num_rows, num_entries), hidden_PD.dtype)]
    results += [jax.ShapeDtypeStruct((num_blocks, shape.num_rows), jnp.float32)] * 2
    operands = (hidden_PD, table_VD, *_given(bias_V))
    name = "cross_entropy_probabilities"
    exponentials_PV, top_KP, total_KP = launch(kernel, operands, results, blocks, grid=grid, name=name)
    return exponentials_PV, top_KP, total_KP


def logsumexp_of_blocks(top_KP: jax.Array, total_KP: jax.Array) -> jax.Array:
    """Combines maxima and sums of exponentials of parts of the vocabulary, [parts, P], to the logsumexp."""
    top_P = top_KP.max(axis=0)
    return top_P + jnp.log(jnp.sum(total_KP * jnp.exp(top_KP - top_P), axis=0))


def target_logits(hidden_PD, table_VD, bias_V, targets_P) -> jax.Array:
    """Computes the logit of each target as one dot product: cheaper than to look for it in all blocks."""
    # An invalid target reads some other row, whose logit is replaced with 0 at the end.
    entries_PD = table_VD.at[targets_P].get(mode="clip")
    logits_P = jnp.sum(hidden_PD.astype(jnp.float32) * entries_PD.astype(jnp.float32), axis=1)
    for bias in _given(bias_V):
        logits_P = logits_P + bias.at[targets_P].get(mode="clip")
    return jnp.where((targets_P >= 0) & (targets_P < table_VD.shape[0]), logits_P, 0)


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
    """Returns `towards_all * softmax - towards_target * is_target` for a chunk of entries, [P, size].

    Args:
      hidden_PD: final hidden states.
      table_VD: tied embedding.
      bias_V: bias of the logits; None for none.
      targets_P: target token of each row.
      logsumexp_P: logsumexp of each row, from `forward`.
      towards_all_P: factor of each row's softmax.
      towards_target_P: value subtracted at each row's target.
      start: first vocabulary entry of the chunk.
      size: number of entries of the chunk; all must exist.
      blocks: block sizes of the kernels.
    """
    shape = _Shape(hidden_PD, table_VD, blocks, is_whole=size % blocks.entries == 0)

    def kernel(hidden, table, targets, logsumexp, towards_all, towards_target, start, *references):
        *biases, out = references
        row, column = pl.program_id(0) * blocks.rows, pl.program_id(1) * blocks.entries
        # The start is an operand, so that all chunks run one kernel. Its index is computed, for the reason in
        # `from_start`.
        entry = start[column * 0] + column
        column_J = column + jnp.arange(blocks.entries)
        is_row = shape.is_row(row)
        target_I, logsumexp_I, all_I, one_I = (
            load(x.at[pl.ds(row, blocks.rows)], is_row)
            for x in (targets, logsumexp, towards_all, towards_target)
        )
        logits_IJ = shape.logits(hidden, table, biases, row, entry)
        # exp(logit - logsumexp) is the softmax: neither a maximum nor a sum is needed.
        grad_IJ = exp2((logits_IJ - logsumexp_I[:, None]) * LOG2_E) * all_I[:, None]
        is_target_IJ = (entry + jnp.arange(blocks.entries))[None, :] == target_I[:, None]
        grad_IJ = grad_IJ - jnp.where(is_target_IJ, one_I[:, None], 0)
        at = out.at[pl.ds(row, blocks.rows), pl.ds(column, blocks.entries)]
        # The last block may reach beyond the chunk, where entries of the next chunk exist but no columns of
        # the result.
        store(at, grad_IJ, is_row[:, None] & (column_J < size)[None, :])

    grid = shape.num_row_blocks, pl.cdiv(size, blocks.entries)
    # The remainder has another shape and is another kernel: without a name of its own, profiles would add up
    # both.
    name = "cross_entropy_grad_logits" + ("" if size == blocks.chunk else "_rest")
    operands = (
        hidden_PD, table_VD, targets_P, logsumexp_P, towards_all_P, towards_target_P, start.reshape(1),
        *_given(bias_V),
    )  # fmt: skip
    # Rounded to the dtype of the operands, which it is multiplied by next: float32 would slow down both
    # products.
    result = jax.ShapeDtypeStruct((shape.num_rows, size), hidden_PD.dtype)
    (grad_PJ,) = launch(kernel, operands, [result], blocks, grid=grid, name=name)
    return grad_PJ


def _given(bias_V: jax.Array | None) -> tuple[jax.Array, ...]:
    return () if bias_V is None else (bias_V,)


class _Shape:
    """Sizes of a call, and the logits that both kernels start with.

    `is_whole` is whether no program reads a block beyond the end of the vocabulary, so that no mask is
    needed.
    """

    def __init__(self, hidden_PD: jax.Array, table_VD: jax.Array, blocks: Blocks, *, is_whole: bool):
        self.num_rows, self.width = hidden_PD.shape
        self.num_entries, self.blocks, self.is_whole = table_VD.shape[0], blocks, is_whole
        self.num_row_blocks = pl.cdiv(self.num_rows, blocks.rows)

    def is_row(self, row) -> jax.Array:
        """Mask of the rows of a block that exist."""
        return row + jnp.arange(self.blocks.rows) < self.num_rows

    def logits(self, hidden, table, biases, row, entry) -> jax.Array:
        """Computes a block of logits, float32: `MASKED_SCORE` for entries that do not exist.

        Bias and mask are the initial value of the accumulator, to which matrix instructions add.
        """
        blocks = self.blocks

        def step(i, sum_IJ):
            channel = i * blocks.width
            rows_IX = self._load(hidden, row, blocks.rows, is_row_I, channel)
            channel_X = channel + jnp.arange(blocks.width)
            is_channel_X = valid_mask(channel, blocks.width, self.width)
            entries_XJ = load_transposed(
                table,
                entry + jnp.arange(blocks.entries),
                channel_X,
                is_row=is_entry_J,
                is_column=is_channel_X,
            )
            return sum_IJ + dot(rows_IX, entries_XJ)

        is_row_I = valid_mask(row, blocks.rows, self.num_rows)
        is_entry_J = None if self.is_whole else entry + jnp.arange(blocks.entries) < self.num_entries
        start_J = jnp.zeros((blocks.entries,), jnp.float32)
        for bias in biases:
            start_J = load(bias.at[pl.ds(entry, blocks.entries)], is_entry_J).astype(jnp.float32)
        # Entries beyond the vocabulary start at the masked score and stay there: their table rows read as 0.
        if is_entry_J is not None:
            start_J = jnp.where(is_entry_J, start_J, MASKED_SCORE)
        start_IJ = jnp.broadcast_to(start_J[None, :], (blocks.rows, blocks.entries))
        return lax.fori_loop(0, pl.cdiv(self.width, blocks.width), step, start_IJ)

    def _load(self, array, first, block: int, is_there, channel) -> jax.Array:
        at = array.at[pl.ds(first, block), pl.ds(channel, self.blocks.width)]
        columns = valid_mask(channel, self.blocks.width, self.width)
        return load(at, block_mask(is_there, columns, (block, self.blocks.width)))


def in_chunks(num_entries: int, chunk: int, visit: Callable, carry):
    """Runs `visit(carry, start, size)`, which returns the carry and arrays [size, ...], over the vocabulary.

    Whole chunks are a scan, so that the program does not grow with the vocabulary; the remainder is a smaller
    chunk. Returns the carry and the arrays, concatenated to [V, ...].
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
