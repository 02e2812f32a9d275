"""`flash_attention` in Pallas for Triton: one kernel forward, two backward, no atomics.

[FlashAttention-2] algorithms 1 and 2. A program owns one block of queries (forward, gradient of queries) or
of keys (gradients of keys and values) of one query head, and loops over the blocks that `spans.py` selects:
first the blocks without a masked entry, then the others with a mask. With a causal mask, the last queries and
the first keys have most blocks to visit. Their programs start first, in all sequences; otherwise all other
programs would wait for them at the end.

Terms that are added to the scores, such as the mask, are the initial value of the accumulator of the matrix
product: a matrix instruction adds to its accumulator, so that they cost no instruction of their own.

The paper's backward pass is one kernel, whose programs add to the gradient of the queries with atomics, in an
order that differs between runs (section 3.2). Here two kernels compute the scores twice, and each sum in a
fixed order.

Letters are those of the package; in kernels, I is a block of queries and J a block of keys.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, exp2, from_start, launch, load, narrow, store
from pallas_kernels.blocks import EMPTY_MAX, MASKED_SCORE, KernelSettings, block_mask, padded, valid_mask
from pallas_kernels.flash_attention.spans import block_spans

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(KernelSettings):
    """Settings of one kernel.

    Attributes:
      queries: queries of a block.
      keys: keys of a block.
    """

    queries: int
    keys: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Settings of the three kernels.

    Attributes:
      forward: settings of the forward kernel.
      grad_queries: settings of the kernel for gradients of queries.
      grad_keys: settings of the kernel for gradients of keys and values.
    """

    forward: Tile
    grad_queries: Tile
    grad_keys: Tile


@dataclasses.dataclass(frozen=True)
class Masking:
    """The keys that a query attends to; without segments there is one document."""

    limits: jax.Array
    """int32 [2]: index of the first query among the keys, and window in keys."""
    query_segments_BT: jax.Array | None
    key_segments_BS: jax.Array | None

    def operands(self) -> list[jax.Array]:
        """Returns the arrays that are not None, in the order of the fields."""
        segments = (self.query_segments_BT, self.key_segments_BS)
        return [self.limits, *(x for x in segments if x is not None)]


def check(width: int, itemsize: int, blocks: Blocks) -> None:
    """Checks that settings can be compiled and fit local memory.

    Args:
      width: channels of a head.
      itemsize: bytes of an entry of the operands.
      blocks: settings of the kernels.

    Raises:
      ArgumentError: with the wrong setting and the values that are accepted.
    """
    for name, tile in (
        ("forward", blocks.forward),
        ("queries", blocks.grad_queries),
        ("keys", blocks.grad_keys),
    ):
        # Triton converts the layout of blocks through local memory, one block at a time. Its pipeline keeps
        # the blocks that the loop reads ahead there as well.
        moving = tile.queries if name == "keys" else tile.keys
        rows = max(tile.queries, tile.keys, 2 * moving * (tile.num_stages - 1))
        lds_bytes = rows * padded(width) * itemsize
        tile.check("flash_attention", "queries", "keys", part=name, lds_bytes=lds_bytes)


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, masking: Masking, tile: Tile
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, N, H] and the logsumexp [B, N, T] (natural logarithm)."""
    shape = _Shape(q_BTNH, k_BSKH, tile)
    spans, _ = _block_spans(shape, masking)

    def kernel(q, k, v, spans, *references):
        *masks, out, logsumexp = references
        # From the last block of queries to the first: with a causal mask the last one has most keys to visit.
        head, row, block = pl.program_id(0), pl.program_id(1), shape.num_query_blocks - 1 - pl.program_id(2)
        q_IH = shape.load_queries(q, row, block, head)
        hide, zeros_IJ = shape.hide(masks, row), jnp.zeros((tile.queries, tile.keys), jnp.float32)

        def step(number, carry, *, masked):
            sum_IH, top_I, total_I = carry
            k_JH, v_JH = (shape.load_keys(x, row, number, head // shape.group) for x in (k, v))
            start_IJ = zeros_IJ
            if masked:
                start_IJ = hide(start_IJ, block, number)
            scores_IJ = start_IJ + dot(q_IH, k_JH.T)
            # Online softmax: arXiv 2205.14135, section 3.1. `shrink` rescales sums that used an earlier
            # maximum; the division by the total is done once at the end (arXiv 2307.08691, section 3.1.1).
            new_top_I = jnp.maximum(top_I, jnp.max(scores_IJ, axis=1))
            # Base 2, for which GPUs have an instruction.
            exp_IJ = exp2(scores_IJ * shape.scale_log2_e - (new_top_I * shape.scale_log2_e)[:, None])
            shrink_I = exp2((top_I - new_top_I) * shape.scale_log2_e)
            sum_IH = sum_IH * shrink_I[:, None] + dot(narrow(exp_IJ, v_JH.dtype), v_JH)
            return sum_IH, new_top_I, total_I * shrink_I + jnp.sum(exp_IJ, axis=1)

        zeros_IH = jnp.zeros((tile.queries, shape.padded), jnp.float32)
        zeros_I = jnp.zeros((tile.queries,), jnp.float32)
        sum_IH, top_I, total_I = _walk(
            shape.span(spans, row, block), step, (zeros_IH, zeros_I + EMPTY_MAX, zeros_I)
        )
        # A query without keys has a total of zero: its sum is zero and stays zero.
        out_IH = sum_IH / jnp.where(total_I > 0, total_I, 1)[:, None]
        shape.store_queries(out, row, block, head, out_IH)
        logsumexp_I = jnp.where(
            total_I > 0, (top_I * shape.scale_log2_e + jnp.log2(total_I)) / LOG2_E, -jnp.inf
        )
        shape.store_per_query(logsumexp, row, head, block, logsumexp_I)

    # The block is the slowest axis, so that the longest programs of all heads and sequences start first.
    grid = shape.num_heads, shape.batch, shape.num_query_blocks
    logsumexp = jax.ShapeDtypeStruct((shape.batch, shape.num_heads, shape.num_queries), jnp.float32)
    results = [jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype), logsumexp]
    operands = q_BTNH, k_BSKH, v_BSKH, spans, *masking.operands()
    out_BTNH, logsumexp_BNT = launch(kernel, operands, results, tile, grid=grid, name="flash_attention")
    return out_BTNH, logsumexp_BNT


def grad_queries(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    grad_BTNH: jax.Array,
    logsumexp_BNT: jax.Array,
    shared_BNT: jax.Array,
    masking: Masking,
    tile: Tile,
) -> jax.Array:
    """Returns the gradient of the queries, [B, T, N, H].

    Args:
      q_BTNH: queries.
      k_BSKH: keys.
      v_BSKH: values.
      grad_BTNH: gradient of the output.
      logsumexp_BNT: logsumexp of the forward pass, finite.
      shared_BNT: term of the softmax's normalization: the sum over H of output times its gradient (D in arXiv
        2307.08691, algorithm 2), less the gradient of the logsumexp, which the paper does not return.
      masking: keys that each query attends to.
      tile: settings of the kernel.
    """
    shape = _Shape(q_BTNH, k_BSKH, tile)
    spans, _ = _block_spans(shape, masking)

    def kernel(q, k, v, grad, logsumexp, shared, spans, *references):
        *masks, grad_q = references
        head, row, block = pl.program_id(0), pl.program_id(1), shape.num_query_blocks - 1 - pl.program_id(2)
        q_IH, grad_IH = (shape.load_queries(x, row, block, head) for x in (q, grad))
        logsumexp_I, shared_I = (shape.load_per_query(x, row, head, block) for x in (logsumexp, shared))
        hide = shape.hide(masks, row)

        def step(number, sum_IH, *, masked):
            k_JH, v_JH = (shape.load_keys(x, row, number, head // shape.group) for x in (k, v))
            # Divided by the scale, because the sum of this start and the product is multiplied by it below.
            start_IJ = shape.per_pair(logsumexp_I * -shape.unscale)
            if masked:
                start_IJ = hide(start_IJ, block, number)
            # exp(score - logsumexp) is the softmax: neither maximum nor total is needed.
            scores_IJ = start_IJ + dot(q_IH, k_JH.T)
            probs_IJ = exp2(scores_IJ * shape.scale_log2_e)
            # `shared` is not an initial value too: it would need one more block of registers, which leaves
            # one wavefront per SIMD instead of two.
            grad_scores_IJ = probs_IJ * (dot(grad_IH, v_JH.T) - shared_I[:, None])
            return sum_IH + dot(narrow(grad_scores_IJ, k_JH.dtype), k_JH)

        zeros_IH = jnp.zeros((tile.queries, shape.padded), jnp.float32)
        sum_IH = _walk(shape.span(spans, row, block), step, zeros_IH)
        # The scale of the scores is a factor of their gradients: once for the sum instead of once for each
        # block.
        shape.store_queries(grad_q, row, block, head, sum_IH * shape.scale)

    grid = shape.num_heads, shape.batch, shape.num_query_blocks
    operands = (q_BTNH, k_BSKH, v_BSKH, grad_BTNH, logsumexp_BNT, shared_BNT, spans, *masking.operands())
    result = jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype)
    (grad_q_BTNH,) = launch(kernel, operands, [result], tile, grid=grid, name="flash_attention_grad_queries")
    return grad_q_BTNH


def grad_keys(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    grad_BTNH: jax.Array,
    logsumexp_BNT: jax.Array,
    shared_BNT: jax.Array,
    masking: Masking,
    tile: Tile,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of keys and values, each summed over the query heads of its key head.

    A program computes the part of one query head. With all query heads of a key head in one program there
    would be too few programs for an MI300X, which would wait for the longest one: twice as long as the work
    takes, at 4 x 4,096 tokens. The arguments are those of `grad_queries`.
    """
    shape = _Shape(q_BTNH, k_BSKH, tile)
    _, spans = _block_spans(shape, masking)

    def kernel(q, k, v, grad, logsumexp, shared, spans, *references):
        *masks, grad_k, grad_v = references
        head, row, block = (pl.program_id(axis) for axis in range(3))
        k_JH, v_JH = (shape.load_keys(x, row, block, head // shape.group) for x in (k, v))
        hide = shape.hide(masks, row)

        def step(number, carry, *, masked):
            grad_k_HJ, grad_v_HJ = carry
            q_IH, grad_IH = (shape.load_queries(x, row, number, head) for x in (q, grad))
            logsumexp_I, shared_I = (shape.load_per_query(x, row, head, number) for x in (logsumexp, shared))
            start_IJ = shape.per_pair(logsumexp_I * -shape.unscale)
            if masked:
                start_IJ = hide(start_IJ, number, block)
            scores_IJ = start_IJ + dot(q_IH, k_JH.T)
            probs_IJ = exp2(scores_IJ * shape.scale_log2_e)
            # Sums are transposed so that the scores are right factors: Triton distributes a left factor over
            # wavefronts by rows alone (`warpsPerTile` of its AMD backend), and a block of 16 has too few
            # rows. Queries beyond the last one have probabilities too, but they and their gradients read as
            # zeros.
            grad_v_HJ = grad_v_HJ + dot(grad_IH.T, narrow(probs_IJ, grad_IH.dtype))
            grad_scores_IJ = probs_IJ * (dot(grad_IH, v_JH.T) + (-shared_I)[:, None])
            return grad_k_HJ + dot(q_IH.T, narrow(grad_scores_IJ, q_IH.dtype)), grad_v_HJ

        zeros_HJ = jnp.zeros((shape.padded, tile.keys), jnp.float32)
        grad_k_HJ, grad_v_HJ = _walk(shape.span(spans, row, block), step, (zeros_HJ, zeros_HJ))
        shape.store_keys(grad_k, row, block, head, grad_k_HJ.T * shape.scale)
        shape.store_keys(grad_v, row, block, head, grad_v_HJ.T)

    grid = shape.num_heads, shape.batch, shape.num_key_blocks
    operands = (q_BTNH, k_BSKH, v_BSKH, grad_BTNH, logsumexp_BNT, shared_BNT, spans, *masking.operands())
    # Stored in the type of the result: one more rounding for each part, and half the traffic.
    share = jax.ShapeDtypeStruct((shape.batch, shape.num_keys, shape.num_heads, shape.width), k_BSKH.dtype)
    shares = launch(kernel, operands, [share, share], tile, grid=grid, name="flash_attention_grad_keys")
    grad_k_BSKH, grad_v_BSKH = (
        # XLA adds these few terms in order, in float32.
        share_BSNH.reshape(*k_BSKH.shape[:3], shape.group, shape.width)
        .sum(axis=3, dtype=jnp.float32)
        .astype(k_BSKH.dtype)
        for share_BSNH in shares
    )
    return grad_k_BSKH, grad_v_BSKH


def _walk(span: tuple[jax.Array, ...], step: Callable, carry: Any) -> Any:
    """Runs `step(number, carry, masked=)` over a span: first the whole blocks, then those at its edges."""
    first, whole, edge, end = span
    before = whole - first

    def at_edge(i, carry):
        return step(jnp.where(i < before, first + i, edge + i - before), carry, masked=True)

    # Two loops, so that the main one has no mask in it: a condition inside would cost registers and time.
    carry = lax.fori_loop(whole, edge, functools.partial(step, masked=False), carry)
    return lax.fori_loop(0, before + end - edge, at_edge, carry)


def _block_spans(shape: "_Shape", masking: Masking) -> tuple[jax.Array, jax.Array]:
    return block_spans(
        shape.num_queries,
        shape.num_keys,
        shape.tile.queries,
        shape.tile.keys,
        masking.limits,
        masking.query_segments_BT,
        masking.key_segments_BS,
    )


class _Shape:
    """Sizes of a call and the addresses of its blocks. Entries beyond the arrays read as zeros."""

    def __init__(self, q_BTNH: jax.Array, k_BSKH: jax.Array, tile: Tile):
        self.batch, self.num_queries, self.num_heads, self.width = q_BTNH.shape
        self.num_keys, self.group = k_BSKH.shape[1], self.num_heads // k_BSKH.shape[2]
        self.tile, self.padded, self.scale = tile, padded(self.width), self.width**-0.5
        self.unscale, self.scale_log2_e = self.width**0.5, self.scale * LOG2_E
        self.num_query_blocks = pl.cdiv(self.num_queries, tile.queries)
        self.num_key_blocks = pl.cdiv(self.num_keys, tile.keys)

    def _matrix(self, x, row, number, head, block: int, size: int):
        """Returns a block of rows and the mask of its valid entries; None if all are valid by size."""
        at = x.at[row, pl.ds(number * block, block), head, from_start(self.padded, number)]
        valid = valid_mask(number * block, block, size), valid_mask(0, self.padded, self.width)
        return at, block_mask(*valid, (block, self.padded))

    def load_queries(self, x, row, number, head):
        return load(*self._matrix(x, row, number, head, self.tile.queries, self.num_queries))

    def load_keys(self, x, row, number, head):
        return load(*self._matrix(x, row, number, head, self.tile.keys, self.num_keys))

    def store_queries(self, x, row, number, head, block_IH):
        at, mask = self._matrix(x, row, number, head, self.tile.queries, self.num_queries)
        store(at, block_IH, mask)

    def store_keys(self, x, row, number, head, block_JH):
        at, mask = self._matrix(x, row, number, head, self.tile.keys, self.num_keys)
        store(at, block_JH, mask)

    def _per_query(self, x, row, head, number):
        first, size = number * self.tile.queries, self.tile.queries
        return x.at[row, head, pl.ds(first, size)], valid_mask(first, size, self.num_queries)

    def load_per_query(self, x, row, head, number):
        return load(*self._per_query(x, row, head, number))

    def store_per_query(self, x, row, head, number, values_I):
        at, mask = self._per_query(x, row, head, number)
        store(at, values_I, mask)

    def per_pair(self, values_I) -> jax.Array:
        """Broadcasts one number per query over the keys of a block, [I, J]."""
        return jnp.broadcast_to(values_I[:, None], (self.tile.queries, self.tile.keys))

    def span(self, spans, row, number):
        """Returns first, whole, edge and end of a block; without segments all rows share them."""
        row = row if spans.shape[0] > 1 else row * 0
        return tuple(spans[row, number, row * 0 + i] for i in range(4))

    def hide(self, masks, row) -> Callable:
        """Returns a function that sets the masked pairs of two blocks to `MASKED_SCORE`."""
        limits, *segments = masks
        start, window = limits[0], limits[1].astype(jnp.uint32)
        num_queries, num_keys = self.tile.queries, self.tile.keys

        def hide(scores_IJ, query_block, key_block):
            first_query, first_key = query_block * num_queries, key_block * num_keys
            query_I1 = (first_query + jnp.arange(num_queries))[:, None]
            key_1J = (first_key + jnp.arange(num_keys))[None, :]
            # A later key has a negative distance, which is large as an unsigned number: one comparison is
            # enough.
            is_near_IJ = (start + query_I1 - key_1J).astype(jnp.uint32) < window
            scores_IJ = jnp.where(is_near_IJ, scores_IJ, MASKED_SCORE)
            # Keys beyond the last one read as zeros, which would count as scores of zero.
            if self.num_keys % num_keys:
                scores_IJ = jnp.where(key_1J < self.num_keys, scores_IJ, MASKED_SCORE)
            if not segments:
                return scores_IJ
            query_I = self._segments(segments[0], row, first_query, num_queries, self.num_queries)
            key_J = self._segments(segments[1], row, first_key, num_keys, self.num_keys)
            return jnp.where(query_I[:, None] == key_J[None, :], scores_IJ, MASKED_SCORE)

        return hide

    def _segments(self, segments, row, first, block, size):
        return load(segments.at[row, pl.ds(first, block)], valid_mask(first, block, size))
