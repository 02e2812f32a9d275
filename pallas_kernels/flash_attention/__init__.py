"""Causal attention without a matrix of scores in memory.

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
        forward=Tile(queries=128, keys=64),
        grad_queries=Tile(queries=128, keys=32),
        grad_keys=Tile(queries=16, keys=64, num_stages=2),
    ),
    256: Blocks(
        forward=Tile(queries=64, keys=16),
        grad_queries=Tile(queries=64, keys=16),
        grad_keys=Tile(queries=16, keys=64),
    ),
}
"""By head width, up to it. Chosen from what the compiler says for MI300X: the largest blocks of
bfloat16 that spill nothing and leave room for a second wavefront a SIMD, which gradients of keys 256 wide
do not. A stage more is taken where that room stays. No time was measured."""
EVERYTHING = np.iinfo(np.int32).max
"""The window of a query that sees all earlier keys."""


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
    """Softmax attention with scale 1/sqrt(H), each query to itself and earlier keys.

    Query head n belongs to key head n // (N/K). Products take the dtype of the arguments and add up
    in float32, as does the softmax. Blocks of keys that no query of a block may see are not visited.
    Both results can be differentiated, and are named `KEPT`. The operands are not: the caller alone knows
    whether they are dear to make again. Gradients are added up in a fixed order.

    Args:
      q_BTNH: queries.
      k_BSKH: keys.
      v_BSKH: values.
      window: keys that a query sees, its own included; None for all. It may be traced.
      query_start: place of the first query among the keys: query t stands at key `query_start + t`.
        It may be traced.
      query_segments_BT: int32, documents of the queries; both or neither.
      key_segments_BS: int32, documents of the keys: a query sees keys of its own document.
      implementation: "pallas"; "full", which makes all scores at once; "blockwise", which makes those of
        a pair of blocks at a time; "xla", which is "blockwise" for as many scores as 1,024 tokens have
        with themselves or more, of a block of queries at least, and else "full"; None for what
        `choice.TABLE` says of the platform.
      blocks: settings of the kernels; None for those of `BLOCKS`.

    Returns:
      The output [B, T, N, H] in the dtype of the queries, and the natural logarithm of each query's
      sum of exponentials [B, N, T] in float32: what two halves of the keys need to be put together.
      A query that sees nothing gets zeros and minus infinity.

    Raises:
      ValueError: if shapes, dtypes or settings do not go together.
    """
    _check(q_BTNH, k_BSKH, v_BSKH, query_segments_BT, key_segments_BS)
    chosen = choose("flash_attention", implementation, width=q_BTNH.shape[3])
    if q_BTNH.size == 0 or k_BSKH.size == 0:
        batch, time, heads, _ = q_BTNH.shape
        return jnp.zeros_like(q_BTNH), jnp.full((batch, heads, time), -jnp.inf, jnp.float32)
    if chosen == "xla":
        chosen = form_of(q_BTNH.shape[1], k_BSKH.shape[1])
    segments = query_segments_BT, key_segments_BS
    if chosen == "blockwise":
        to_itself = isinstance(query_start, int) and query_start == 0 and q_BTNH.shape[1] == k_BSKH.shape[1]
        start = None if to_itself else query_start
        return blockwise_attention(q_BTNH, k_BSKH, v_BSKH, window, *segments, query_start=start)
    window = EVERYTHING if window is None else window
    limits = jnp.stack([jnp.asarray(x, jnp.int32) for x in (query_start, window)])
    results: Any
    if chosen == "full":
        results = full_attention(q_BTNH, k_BSKH, v_BSKH, limits, *segments)
        return results
    blocks = _blocks_for(q_BTNH.shape[3]) if blocks is None else blocks
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
    """How much each query takes of each key in `flash_attention`, whose arguments these are.

    Returns:
      Probabilities [B, N, T, S], float32 or wider: to be looked at, for they are what the operation avoids.

    Raises:
      ValueError: if shapes or dtypes do not go together.
    """
    _check(q_BTNH, k_BSKH, k_BSKH, query_segments_BT, key_segments_BS)
    limits = query_start, EVERYTHING if window is None else window
    return probabilities(q_BTNH, k_BSKH, limits, query_segments_BT, key_segments_BS)[0]


def _blocks_for(width: int) -> Blocks:
    fitting = [blocks for widest, blocks in BLOCKS.items() if width <= widest]
    if not fitting:
        raise ValueError(
            f'heads are {width} wide; the kernels take up to {max(BLOCKS)}, implementation="xla" any'
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
    results = checkpoint_name(out_BTNH, KEPT), checkpoint_name(logsumexp_BNT, KEPT)
    return results, (arguments, results)


def _backward(blocks, saved, gradients):
    (q_BTNH, k_BSKH, v_BSKH, *mask), (out_BTNH, logsumexp_BNT) = saved
    grad_BTNH, grad_logsumexp_BNT = gradients
    products_BTNH = grad_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)
    shared_BNT = products_BTNH.sum(axis=3).transpose(0, 2, 1) - grad_logsumexp_BNT
    # Of a query that saw nothing: any finite number serves, and minus infinity would make NaN.
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
    _check_segments(q_BTNH.shape[:2], k_BSKH.shape[:2], query_segments_BT, key_segments_BS)


def _check_segments(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
) -> None:
    if query_segments_BT is None and key_segments_BS is None:
        return
    if query_segments_BT is None or key_segments_BS is None:
        raise ValueError("only one of query_segments_BT and key_segments_BS was given; both are needed")
    if query_segments_BT.shape != queries or key_segments_BS.shape != keys:
        raise ValueError(
            f"segments are {query_segments_BT.shape} and {key_segments_BS.shape}; with these queries and "
            f"keys they must be {queries} and {keys}"
        )
