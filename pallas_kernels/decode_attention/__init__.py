"""Attention of one new token a sequence to a long cache.

Letters: B batch, S slots of the cache, N query heads, K key and value heads, H head width, Y parts.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_arguments import check_heads
from pallas_kernels.choice import WIDEST, choose
from pallas_kernels.decode_attention import triton
from pallas_kernels.decode_attention.triton import Blocks
from pallas_kernels.decode_attention.xla import decode_attention_xla

BLOCKS = Blocks()
"""Chosen from what the compiler says for MI300X (registers, local memory); no time was measured."""


def decode_attention(
    q_BNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    lengths_B: jax.Array,
    *,
    first_B: jax.Array | None = None,
    window: jax.Array | int | None = None,
    implementation: str | None = None,
    blocks: Blocks = BLOCKS,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention with scale 1/sqrt(H) of each sequence's newest token to those in the cache.

    The cache is a ring: token t lies in slot t % S, the newest in place of the oldest. While no more
    tokens came than there are slots it is a plain cache. Slots that hold nothing to see are not read.
    There is no gradient.

    Args:
      q_BNH: the newest token's queries.
      k_BSKH: keys, the newest token's among them.
      v_BSKH: values.
      lengths_B: int32, tokens of each sequence so far, the newest included.
      first_B: int32, number of each sequence's first token behind its padding; None for 0.
      window: tokens that the newest sees, itself included; None for all.
      implementation: "pallas", "xla", or None for what `choice.TABLE` says of the platform.
      blocks: settings of the kernel.

    Returns:
      The output [B, N, H] in the dtype of the queries, and the natural logarithm of the sum of
      exponentials [B, N] in float32, with which parts of a cache that lie on several devices are put
      together by `combine`. A sequence that sees nothing gets zeros and minus infinity.

    Raises:
      ValueError: if shapes, dtypes or settings do not go together.
    """
    first_B = jnp.zeros_like(lengths_B) if first_B is None else first_B
    _check(q_BNH, k_BSKH, v_BSKH, lengths_B, first_B)
    window = jnp.asarray(np.iinfo(np.int32).max if window is None else window, jnp.int32)
    operands = q_BNH, k_BSKH, v_BSKH, lengths_B, first_B, window
    chosen = choose("decode_attention", implementation, width=q_BNH.shape[2])
    if q_BNH.size == 0 or k_BSKH.size == 0:
        return jnp.zeros_like(q_BNH), jnp.full(q_BNH.shape[:2], -jnp.inf, jnp.float32)
    if chosen == "xla":
        return decode_attention_xla(*operands)
    widest = WIDEST["decode_attention"]
    if q_BNH.shape[2] > widest:
        raise ValueError(
            f'heads are {q_BNH.shape[2]} wide; the kernel takes up to {widest}, implementation="xla" any'
        )
    triton.check(q_BNH.shape[2], q_BNH.dtype.itemsize, blocks)
    out_BNH, logsumexp_BN = combine(*triton.forward(*operands, blocks), axis=1)
    return out_BNH.astype(q_BNH.dtype), logsumexp_BN


def combine(out_BYNH: jax.Array, logsumexp_BYN: jax.Array, *, axis: int) -> tuple[jax.Array, jax.Array]:
    """Attention to all keys, from attention to parts of them.

    The same serves keys that are dealt out among programs, and among devices ([Tree-Attention]):
    there the maximum and both sums go over the devices.

    Args:
      out_BYNH: output of each part.
      logsumexp_BYN: of each part; minus infinity for a part in which there was nothing to see.
      axis: over which the parts lie, in both.

    Returns:
      Output and logsumexp without that axis, in float32.
    """
    top = jnp.max(logsumexp_BYN, axis=axis, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(logsumexp_BYN - top)
    sum_ = jnp.sum(weights, axis=axis, keepdims=True)
    weights = weights / jnp.where(sum_ > 0, sum_, 1)
    out = jnp.sum(out_BYNH.astype(jnp.float32) * weights[..., None], axis=axis)
    return out, jnp.squeeze(top + jnp.log(sum_), axis=axis)


def _check(
    q_BNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, lengths_B: jax.Array, first_B: jax.Array
) -> None:
    check_heads(q_BNH, k_BSKH, v_BSKH, queries="[B, N, H]")
    for name, array in (("lengths", lengths_B), ("first tokens", first_B)):
        if array.shape != q_BNH.shape[:1] or array.dtype != jnp.int32:
            raise ValueError(
                f"{name} are {array.dtype} {array.shape}; they must be int32 [B], {q_BNH.shape[:1]}"
            )
