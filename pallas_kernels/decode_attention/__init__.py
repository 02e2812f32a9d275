"""Attention of one new token of each sequence to a long cache.

Letters: B batch, S slots of the cache, N query heads, K key and value heads, H head width, Y parts of a
  cache, Z slots of the arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_arguments import check_heads
from pallas_kernels.choice import WIDEST, choose
from pallas_kernels.decode_attention import triton
from pallas_kernels.decode_attention.triton import Blocks
from pallas_kernels.decode_attention.xla import decode_attention_xla, slots_of
from pallas_kernels.errors import ArgumentError

BLOCKS = Blocks()
"""Block sizes, chosen by the registers and local memory that the compiler reports for MI300X; untimed."""


def decode_attention(
    q_BNH: jax.Array,
    k_BZKH: jax.Array,
    v_BZKH: jax.Array,
    lengths_B: jax.Array,
    *,
    first_B: jax.Array | None = None,
    window: jax.Array | int | None = None,
    first_slot: jax.Array | int = 0,
    num_slots: int | None = None,
    implementation: str | None = None,
    blocks: Blocks = BLOCKS,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention with scale 1/sqrt(H) of each sequence's newest token to the tokens in its cache.

    The cache is a ring buffer: token t is in slot t % S, where the newest token overwrites the oldest. Up to
    S tokens it is a plain cache. The arrays may hold other slots too, such as those of other layers, and are
    read in place where a copy would cost time. The kernel does not read slots without visible tokens. There
    is no gradient.

    Args:
      q_BNH: queries of the newest tokens.
      k_BZKH: cached keys, including those of the newest tokens.
      v_BZKH: cached values.
      lengths_B: number of tokens of each sequence, including the newest, int32.
      first_B: index of each sequence's first token after its padding, int32; None for 0.
      window: number of tokens that the newest attends to, itself included; None for all.
      first_slot: index of the cache's first slot in the arrays, int32; at most Z - S.
      num_slots: number of the cache's slots, S; None for all slots of the arrays.
      implementation: "pallas", "xla", or None for the default of `choice.TABLE`.
      blocks: block sizes of the kernel.

    Returns:
      The output [B, N, H] in the dtype of the queries, and the logsumexp [B, N] in float32, with which
      `combine` merges results for parts of a cache on several devices. A sequence without visible tokens gets
      zeros and minus infinity.

    Raises:
      ArgumentError: if shapes, dtypes or settings do not match.
    """
    first_B = jnp.zeros_like(lengths_B) if first_B is None else first_B
    _check(q_BNH, k_BZKH, v_BZKH, lengths_B, first_B, first_slot, num_slots)
    num_slots = k_BZKH.shape[1] if num_slots is None else num_slots
    first_slot = jnp.asarray(first_slot, jnp.int32)
    # The largest int32 excludes no token, and subtracted from a length it does not overflow.
    window = jnp.asarray(np.iinfo(np.int32).max if window is None else window, jnp.int32)
    where = lengths_B, first_B, window
    chosen = choose("decode_attention", implementation, width=q_BNH.shape[2])
    # Pallas accepts no empty grid, and a maximum over no slots is undefined.
    if q_BNH.size == 0 or k_BZKH.size == 0 or num_slots == 0:
        return jnp.zeros_like(q_BNH), jnp.full(q_BNH.shape[:2], -jnp.inf, jnp.float32)
    if chosen == "xla":
        return decode_attention_xla(q_BNH, k_BZKH, v_BZKH, *where, first_slot, num_slots)
    widest = WIDEST["decode_attention"]
    if q_BNH.shape[2] > widest:
        raise ArgumentError(
            f"heads are {q_BNH.shape[2]} wide; the kernel supports up to {widest}, "
            'implementation="xla" any width'
        )
    triton.check(q_BNH.shape[2], q_BNH.dtype.itemsize, blocks)
    k_BSKH, v_BSKH = (slots_of(x, first_slot, num_slots) for x in (k_BZKH, v_BZKH))
    out_BNH, logsumexp_BN = combine(*triton.forward(q_BNH, k_BSKH, v_BSKH, *where, blocks), axis=1)
    return out_BNH.astype(q_BNH.dtype), logsumexp_BN


def combine(out_BYNH: jax.Array, logsumexp_BYN: jax.Array, *, axis: int) -> tuple[jax.Array, jax.Array]:
    """Combines attention to parts of the keys into attention to all of them.

    The formula is the same for keys that are distributed over programs and over devices ([Tree-Attention]),
    where the maximum and both sums are collectives.

    Args:
      out_BYNH: output of each part.
      logsumexp_BYN: logsumexp of each part; minus infinity for a part without visible keys.
      axis: axis of the parts in both arrays.

    Returns:
      Output and logsumexp without that axis, float32.
    """
    top = jnp.max(logsumexp_BYN, axis=axis, keepdims=True)
    # If all parts are empty, the difference of two infinities would be NaN.
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(logsumexp_BYN - top)
    sum_ = jnp.sum(weights, axis=axis, keepdims=True)
    weights = weights / jnp.where(sum_ > 0, sum_, 1)
    out = jnp.sum(out_BYNH.astype(jnp.float32) * weights[..., None], axis=axis)
    return out, jnp.squeeze(top + jnp.log(sum_), axis=axis)


def _check(
    q_BNH: jax.Array,
    k_BZKH: jax.Array,
    v_BZKH: jax.Array,
    lengths_B: jax.Array,
    first_B: jax.Array,
    first_slot: jax.Array | int,
    num_slots: int | None,
) -> None:
    check_heads(q_BNH, k_BZKH, v_BZKH, queries="[B, N, H]")
    stored = k_BZKH.shape[1]
    num_slots = stored if num_slots is None else num_slots
    if not 0 <= num_slots <= stored:
        raise ArgumentError(
            f"num_slots is {num_slots}; it must be between 0 and {stored}, the slots of the keys"
        )
    if isinstance(first_slot, int) and not 0 <= first_slot <= stored - num_slots:
        raise ArgumentError(
            f"first_slot is {first_slot}; for {num_slots} of the keys' {stored} slots it must be "
            f"between 0 and {stored - num_slots}"
        )
    for name, array in (("lengths", lengths_B), ("first tokens", first_B)):
        if array.shape != q_BNH.shape[:1] or array.dtype != jnp.int32:
            raise ArgumentError(
                f"{name} are {array.dtype} {array.shape}; they must be int32 [B], {q_BNH.shape[:1]}"
            )
