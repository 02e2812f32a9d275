"""Causal softmax attention that never stores the matrix of scores.

Letters: B batch, T queries, S keys, N query heads, K key and value heads, H head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention_arguments import check_heads
from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.choice import choose
from pallas_kernels.errors import ArgumentError
from pallas_kernels.flash_attention import triton
from pallas_kernels.flash_attention.blockwise import blockwise_attention
from pallas_kernels.flash_attention.reference import probabilities
from pallas_kernels.flash_attention.triton import Blocks, Masking, Tile
from pallas_kernels.flash_attention.xla import form_of, full_attention

BLOCKS = {
    64: Blocks(
        forward=Tile(queries=128, keys=32),
        grad_queries=Tile(queries=128, keys=32),
        grad_keys=Tile(queries=16, keys=64, num_stages=2),
    ),
    128: Blocks(
        # With 64 keys Triton of jax 0.12 needs 276 registers, too many for a second wavefront per SIMD.
        forward=Tile(queries=128, keys=32, num_stages=2),
        grad_queries=Tile(queries=128, keys=32),
        grad_keys=Tile(queries=16, keys=64, num_stages=2),
    ),
    256: Blocks(
        forward=Tile(queries=64, keys=16),
        grad_queries=Tile(queries=64, keys=16),
        grad_keys=Tile(queries=16, keys=64),
    ),
}
"""Settings for bfloat16 by the largest head width that they serve.

Chosen from register counts that the compiler reports for MI300X: the largest blocks that spill nothing and
leave room for a second wavefront per SIMD (gradients of keys of width 256 do not). A pipeline stage is added
where that room remains. No time was measured."""
FLOAT32_BLOCKS = {
    64: BLOCKS[64],
    128: Blocks(
        forward=Tile(queries=64, keys=32),
        grad_queries=Tile(queries=64, keys=16),
        grad_keys=Tile(queries=16, keys=64),
    ),
    256: Blocks(
        forward=Tile(queries=32, keys=16),
        grad_queries=Tile(queries=32, keys=16),
        grad_keys=Tile(queries=16, keys=16),
    ),
}
"""Settings for float32, whose blocks need twice the registers: wide heads spill with those of bfloat16."""
NO_WINDOW = np.iinfo(np.int32).max
"""Window that includes all earlier keys."""


def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    window: jax.Array | int | None = None,
    query_start: jax.Array | int = 0,
    query_segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    implementation: str | None = None,
    blocks: Blocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal softmax attention with scale 1/sqrt(H): each query attends to itself and to earlier keys.

    Query head n reads key head n // (N/K). Products have operands of the arguments' dtype and accumulate in
    float32; so does the softmax. Blocks of keys that are masked for all queries of a block are skipped. Both
    results are differentiable and carry the checkpoint name `KEPT`; the operands do not, because only the
    caller knows whether they are expensive to recompute. Gradients are summed in a fixed order. Source:
    [FlashAttention-2].

    Args:
      q_BTNH: queries, float32 or bfloat16.
      k_BSKH: keys, of the queries' dtype.
      v_BSKH: values, of the queries' dtype.
      window: number of keys that a query attends to, its own included; None for all. May be traced.
      query_start: index of the first query among the keys: query t is at key `query_start + t`. May be
        traced.
      query_segments_BT: document number of each query, int32; None for one document.
      key_segments_BS: document number of each key, int32: a query attends to keys of its own document. Given
        if and only if `query_segments_BT` is.
      implementation: "pallas", the kernels; "full", XLA with all scores at once; "blockwise", XLA with the
        scores of one pair of blocks at a time; "xla", which is "blockwise" from 1,024 x 1,024 scores on if
        there is at least one block of queries, else "full"; None for the default of `choice.TABLE`.
      blocks: block sizes of the kernels; None for those of `BLOCKS`.

    Returns:
      The output [B, T, N, H] in the dtype of the queries, and the logsumexp of each query's scores [B, N, T]
      in float32 (natural logarithm), with which results for two sets of keys can be combined. A query without
      any visible key gets zeros and minus infinity.

    Raises:
      ArgumentError: if shapes, dtypes or settings do not match.
    """
    _check(q_BTNH, k_BSKH, v_BSKH, query_segments_BT, key_segments_BS)
    chosen = choose("flash_attention", implementation, width=q_BTNH.shape[3])
    # No grid may be empty, and a maximum over no keys is undefined.
    if q_BTNH.size == 0 or k_BSKH.size == 0:
        batch, time, heads, _ = q_BTNH.shape
        return jnp.zeros_like(q_BTNH), jnp.full((batch, heads, time), -jnp.inf, jnp.float32)
    if chosen == "xla":
        chosen = form_of(q_BTNH.shape[1], k_BSKH.shape[1])
    segments = query_segments_BT, key_segments_BS
    if chosen == "blockwise":
        # Known before tracing: blocks above the diagonal can then be excluded from the scan.
        to_itself = isinstance(query_start, int) and query_start == 0 and q_BTNH.shape[1] == k_BSKH.shape[1]
        start = None if to_itself else query_start
        return blockwise_attention(q_BTNH, k_BSKH, v_BSKH, window, *segments, query_start=start)
    window = NO_WINDOW if window is None else window
    # Numbers that may be traced go to the kernel as one array: a new value does not recompile it.
    limits = jnp.stack([jnp.asarray(x, jnp.int32) for x in (query_start, window)])
    results: Any
    if chosen == "full":
        results = full_attention(q_BTNH, k_BSKH, v_BSKH, limits, *segments)
        return results
    blocks = _blocks_for(q_BTNH) if blocks is None else blocks
    triton.check(q_BTNH.shape[3], q_BTNH.dtype.itemsize, blocks)
    results = _pallas(q_BTNH, k_BSKH, v_BSKH, limits, *segments, blocks)
    return results


def attention_probabilities(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    *,
    window: jax.Array | int | None = None,
    query_start: jax.Array | int = 0,
    query_segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention probabilities of `flash_attention`, for plots and tests; same arguments.

    Returns:
      Probabilities [B, N, T, S], float32 or wider: the matrix that the operation avoids.

    Raises:
      ArgumentError: if shapes or dtypes do not match.
    """
    _check(q_BTNH, k_BSKH, k_BSKH, query_segments_BT, key_segments_BS)
    limits = query_start, NO_WINDOW if window is None else window
    return probabilities(q_BTNH, k_BSKH, limits, query_segments_BT, key_segments_BS)[0]


def _blocks_for(q_BTNH: jax.Array) -> Blocks:
    width, by_width = q_BTNH.shape[3], FLOAT32_BLOCKS if q_BTNH.dtype == jnp.float32 else BLOCKS
    fitting = [blocks for widest, blocks in by_width.items() if width <= widest]
    if not fitting:
        raise ArgumentError(
            f'heads are {width} wide; the kernels support up to {max(BLOCKS)}, implementation="xla" any width'
        )
    return fitting[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _pallas(q_BTNH, k_BSKH, v_BSKH, limits, query_segments_BT, key_segments_BS, blocks):
    masking = Masking(limits, query_segments_BT, key_segments_BS)
    return triton.forward(q_BTNH, k_BSKH, v_BSKH, masking, blocks.forward)


def _forward(q_BTNH, k_BSKH, v_BSKH, limits, query_segments_BT, key_segments_BS, blocks):
    arguments = q_BTNH, k_BSKH, v_BSKH, limits, query_segments_BT, key_segments_BS
    results: Any = _pallas(*arguments, blocks)
    out_BTNH, logsumexp_BNT = results
    # A remat policy that keeps both results need not run the forward kernel again for the gradients.
    results = checkpoint_name(out_BTNH, KEPT), checkpoint_name(logsumexp_BNT, KEPT)
    return results, (arguments, results)


def _backward(blocks, saved, gradients):
    (q_BTNH, k_BSKH, v_BSKH, *mask), (out_BTNH, logsumexp_BNT) = saved
    grad_BTNH, grad_logsumexp_BNT = gradients
    products_BTNH = grad_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)
    shared_BNT = products_BTNH.sum(axis=3).transpose(0, 2, 1) - grad_logsumexp_BNT
    # D of [FlashAttention-2] algorithm 2, less the gradient of the logsumexp, which the paper does not
    # return. A query without keys has minus infinity, which would make NaN; any finite number is right for
    # it.
    logsumexp_BNT = jnp.where(jnp.isneginf(logsumexp_BNT), 0, logsumexp_BNT)
    operands = q_BTNH, k_BSKH, v_BSKH, grad_BTNH, logsumexp_BNT, shared_BNT, Masking(*mask)
    grad_q_BTNH = triton.grad_queries(*operands, blocks.grad_queries)
    return grad_q_BTNH, *triton.grad_keys(*operands, blocks.grad_keys), None, None, None


_pallas.defvjp(_forward, _backward)


def _check(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> None:
    check_heads(q_BTNH, k_BSKH, v_BSKH, queries="[B, T, N, H]")
    if query_segments_BT is None and key_segments_BS is None:
        return
    if query_segments_BT is None or key_segments_BS is None:
        raise ArgumentError("only one of query_segments_BT and key_segments_BS was given; both are needed")
    queries, keys = q_BTNH.shape[:2], k_BSKH.shape[:2]
    if query_segments_BT.shape != queries or key_segments_BS.shape != keys:
        raise ArgumentError(
            f"segments are {query_segments_BT.shape} and {key_segments_BS.shape}; with these queries and "
            f"keys they must be {queries} and {keys}"
        )
