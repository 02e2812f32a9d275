"""`decode_attention` in XLA.

Letters are those of the package; G = N/K, C = K*H, R rows of partial sums, I partial sums of a score.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_attention.reference import visible_slots
from pallas_kernels.fusion import as_bits, from_bits, not_inlined
from pallas_kernels.precision import einsum, matmul

LANES = 16
"""Number of partial sums of a score: the float32 numbers of a 512-bit vector. With 8 or 32 a decoding step of
`zaya bench torch` was not faster than with a copy of the keys."""
READERS = 8
"""Number of values of different slots that an iteration of the loop over values adds. Fewer leave more
partial sums; with 16 the loop was slower."""
MAX_GROUP_IN_PLACE = 8
"""Largest number of query heads per value head whose values are read in place: each head reads them again."""


def decode_attention_xla(
    q_BNH: jax.Array,
    k_BZKH: jax.Array,
    v_BZKH: jax.Array,
    lengths_B: jax.Array,
    first_B: jax.Array,
    window: jax.Array,
    first_slot: jax.Array,
    num_slots: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, N, H] in the values' dtype and the logsumexp [B, N]."""
    scores_BNS = _scores(q_BNH, k_BZKH, first_slot, num_slots) * q_BNH.shape[2] ** -0.5
    is_visible_BS = visible_slots(lengths_B, first_B, window, num_slots)
    # Not minus infinity: without visible tokens, the difference of two would be NaN.
    scores_BNS = jnp.where(is_visible_BS[:, None], scores_BNS, jnp.finfo(jnp.float32).min)
    top_BN = scores_BNS.max(axis=-1)
    exp_BNS = jnp.exp(scores_BNS - top_BN[..., None])
    sum_BN = exp_BNS.sum(axis=-1)
    # Divided after the product: that is one division for each channel instead of one for each slot.
    out_BNH = _weighted_values(exp_BNS, v_BZKH, first_slot) / sum_BN[..., None]
    # Without visible slots all scores are equal, and the softmax above is a mean over unused slots.
    is_empty_B1 = ~is_visible_BS.any(axis=1, keepdims=True)
    out_BNH = jnp.where(is_empty_B1[..., None], 0, out_BNH).astype(v_BZKH.dtype)
    return out_BNH, jnp.where(is_empty_B1, -jnp.inf, top_BN + jnp.log(sum_BN))


def slots_of(x_BZKH: jax.Array, first_slot: jax.Array, num_slots: int) -> jax.Array:
    """Returns the keys or values of a cache that is part of an array, [B, S, K, H]."""
    # As bits: XLA of jax 0.10 would convert the whole array to float32 on CPUs.
    return from_bits(lax.dynamic_slice_in_dim(as_bits(x_BZKH), first_slot, num_slots, axis=1), x_BZKH.dtype)


def _scores(q_BNH: jax.Array, k_BZKH: jax.Array, first_slot: jax.Array, num_slots: int) -> jax.Array:
    """Products of queries and keys, [B, N, S] in float32."""
    group, width = q_BNH.shape[1] // k_BZKH.shape[2], q_BNH.shape[2]
    # The partial sums of a key's scores are at most half as many as its channels; with as many it was slower.
    is_narrow = 2 * group * LANES <= width and width % LANES == 0
    cpu = _scores_in_place if is_narrow else _scores_of_copy
    return lax.platform_dependent(
        q_BNH,
        k_BZKH,
        first_slot,
        cpu=functools.partial(cpu, num_slots=num_slots),
        default=functools.partial(_scores_of_copy, num_slots=num_slots),
    )


def _scores_of_copy(
    q_BNH: jax.Array, k_BZKH: jax.Array, first_slot: jax.Array, *, num_slots: int
) -> jax.Array:
    """By one product for all heads.

    For a product per key head, XLA would transpose keys first. Instead a query is as wide as all key heads
    together, with zeros for other key heads: K times the work, which is little for one token.
    """
    (batch, num_queries, _), num_keys = q_BNH.shape, k_BZKH.shape[2]
    k_BSC = slots_of(k_BZKH, first_slot, num_slots).reshape(batch, num_slots, -1)
    q_BNC = jnp.where(_own_heads(num_queries, num_keys), q_BNH[:, :, None], 0).reshape(batch, num_queries, -1)
    return einsum("bnc,bsc->bns", q_BNC, k_BSC, dtype=jnp.float32)


def _scores_in_place(
    q_BNH: jax.Array, k_BZKH: jax.Array, first_slot: jax.Array, *, num_slots: int
) -> jax.Array:
    """By a loop that reads keys where they are and adds every 16th channel, and a product that adds the rest.

    XLA copies keys for a product, and computes a batch of such narrow ones on one core. With this loop a
    decoding step of `zaya bench torch` took 0.90 to 0.94 of the time for 8 rows in bfloat16, 0.91 in float32,
    0.88 for 4 and 0.97 for 1 (2 cores of an AMD EPYC).
    """
    (batch, num_queries, width), num_keys = q_BNH.shape, k_BZKH.shape[2]

    def in_place(q_BNH: jax.Array, bits_BZKH: jax.Array, first_slot: jax.Array) -> jax.Array:
        q_B1KGH = q_BNH.reshape(batch, 1, num_keys, -1, width).astype(jnp.float32)

        def keys(channel: int) -> jax.Array:
            starts = 0, first_slot, 0, channel
            bits_BSKI = lax.dynamic_slice(bits_BZKH, starts, (batch, num_slots, num_keys, LANES))
            return from_bits(bits_BSKI, k_BZKH.dtype).astype(jnp.float32)[:, :, :, None]

        channels = range(0, width, LANES)
        sums_BSKGI: Any = sum(q_B1KGH[..., first : first + LANES] * keys(first) for first in channels)
        return sums_BSKGI

    sums_BSKGI = not_inlined(in_place)(q_BNH, as_bits(k_BZKH), first_slot)
    # XLA has no fast loop that adds neighboring numbers, but a fast product.
    added_XN = jnp.repeat(jnp.eye(num_queries), LANES, axis=0)
    scores_PN = matmul(sums_BSKGI.reshape(batch * num_slots, -1), added_XN)
    return scores_PN.reshape(batch, num_slots, num_queries).mT


def _weighted_values(exp_BNS: jax.Array, v_BZKH: jax.Array, first_slot: jax.Array) -> jax.Array:
    """Values of the slots, weighted by `exp_BNS` and added, [B, N, H] in float32."""
    group, num_slots = exp_BNS.shape[1] // v_BZKH.shape[2], exp_BNS.shape[2]
    can_be_split = num_slots % READERS == 0 and group <= MAX_GROUP_IN_PLACE
    cpu = _weighted_values_in_place if can_be_split else _weighted_values_of_copy
    return lax.platform_dependent(exp_BNS, v_BZKH, first_slot, cpu=cpu, default=_weighted_values_of_copy)


def _weighted_values_of_copy(exp_BNS: jax.Array, v_BZKH: jax.Array, first_slot: jax.Array) -> jax.Array:
    """By one product for all heads, out of which each head's own channels are then cut."""
    (batch, num_queries, num_slots), (num_values, width) = exp_BNS.shape, v_BZKH.shape[2:]
    v_BSC = slots_of(v_BZKH, first_slot, num_slots).reshape(batch, num_slots, -1)
    out_BNC = einsum("bns,bsc->bnc", exp_BNS.astype(v_BSC.dtype), v_BSC).astype(jnp.float32)
    out_BNKH = out_BNC.reshape(batch, num_queries, num_values, width)
    return jnp.sum(jnp.where(_own_heads(num_queries, num_values), out_BNKH, 0), axis=2)


def _weighted_values_in_place(exp_BNS: jax.Array, v_BZKH: jax.Array, first_slot: jax.Array) -> jax.Array:
    """By loops over channels that read values where they are; a product would copy and then pack them.

    For 8 sequences of 256 slots with 2 heads of 64 channels and 4 query heads that takes 70 us instead of
    170 in bfloat16 and 60 instead of 190 in float32, and for 1,024 slots 170 instead of 470 and 260 instead
    of 710 (2 cores of an Intel Xeon, 8 layers in turn).
    """
    (batch, num_queries, num_slots), (num_values, width) = exp_BNS.shape, v_BZKH.shape[2:]
    size = num_slots // READERS

    def in_place(exp_BNS: jax.Array, bits_BZKH: jax.Array, first_slot: jax.Array) -> jax.Array:
        def values(start: int) -> jax.Array:
            # Each cut is made of the whole array: cuts of a slice that is shared took 5 times as long.
            starts = 0, first_slot + start, 0, 0
            bits_BRKH = lax.dynamic_slice(bits_BZKH, starts, (batch, size, num_values, width))
            return from_bits(bits_BRKH, v_BZKH.dtype).astype(jnp.float32)[:, :, :, None]

        exp_BSKG1 = exp_BNS.mT.reshape(batch, num_slots, num_values, -1, 1)
        starts = range(0, num_slots, size)
        sums_BRKGH: Any = sum(exp_BSKG1[:, start : start + size] * values(start) for start in starts)
        return _sum_rows(sums_BRKGH).reshape(batch, num_queries, width)

    return not_inlined(in_place)(exp_BNS, as_bits(v_BZKH), first_slot)


def _sum_rows(sums_BR: jax.Array) -> jax.Array:
    """Adds partial sums [B, R, ...] by loops of several additions; XLA's reductions are slow for few rows."""
    while (num_rows := sums_BR.shape[1]) > 1:
        divisors = [count for count in range(16, 1, -1) if num_rows % count == 0]
        if not divisors:
            return sums_BR.sum(axis=1)
        sums_BR = functools.reduce(jnp.add, jnp.split(sums_BR, divisors[0], axis=1))
    return sums_BR[:, 0]


def _own_heads(num_queries: int, num_keys: int) -> jax.Array:
    """Mask of the key head that each query head reads, [N, K, 1]."""
    key_head_N1 = jnp.arange(num_queries)[:, None] // (num_queries // num_keys)
    return (key_head_N1 == jnp.arange(num_keys))[..., None]
