"""Attention to a cache that several devices share, of which each has every C-th token of a layer.

Token t lies on device t % C, in slot t // C: at any length all devices have as many tokens to read, to within
one, and of a short row beside long ones, or of padding, each has its part. Queries are on all devices. What
each finds among its tokens is put together by its logsumexp, [Tree-Attention].

Letters: C devices, B batch, T time of the chunk, S slots of a device, N query heads, K key/value heads,
H head width.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention import combine, decode_attention
from pallas_kernels.flash_attention import flash_attention
from zaya_jax.parallel.context import all_max, all_sum, rank, to_next

Slots = tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]
"""Keys and values."""


def is_own(token_T: Int[Array, "*T"], ranks: int) -> Bool[Array, "*T"]:
    """Whether tokens are kept on this device."""
    return token_T % ranks == rank()


def num_own(num_tokens: jax.Array, ranks: int, of_rank: jax.Array) -> jax.Array:
    """How many of so many first tokens a device has; also the slot of its first one behind them."""
    # Rounded up: of 8 devices and 9 tokens the first has two.
    return (num_tokens - of_rank + ranks - 1) // ranks


def attend_to_shared_slots(
    implementation: str | None,
    ranks: int,
    q_BNH: Float[Array, "B N H"],
    slots: Slots,
    length: Int[Array, ""],
    first_B: Int[Array, " B"],
) -> Float[Array, "B N H"]:
    """Attention of the newest token to all, by a maximum and a sum over devices at any length: a tree.

    Args:
      implementation: of `decode_attention`.
      ranks: C.
      q_BNH: its rotated queries.
      slots: of this device, the newest token's among them on the one that keeps it.
      length: tokens so far, the newest and padding included.
      first_B: each row's first token behind its padding.
    """
    part = _attend_to_tokens_of(rank(), implementation, ranks, q_BNH, slots, length, first_B)
    out_BNH, _ = combine_devices(*part)
    return out_BNH.astype(q_BNH.dtype)


def attend_around_ring(
    implementation: str | None,
    ranks: int,
    q_BNH: Float[Array, "B N H"],
    slots: Slots,
    length: Int[Array, ""],
    first_B: Int[Array, " B"],
) -> Float[Array, "B N H"]:
    """The same with keys and values going round all devices, as in [Ring]; what a tree is compared with.

    The arguments are those of `attend_to_shared_slots`.
    """

    def visit(slots: Slots, distance: jax.Array) -> tuple[jax.Array, jax.Array]:
        source = (rank() - distance) % ranks
        return _attend_to_tokens_of(source, implementation, ranks, q_BNH, slots, length, first_B)

    def step(slots: Slots, distance: jax.Array) -> tuple[Slots, tuple[jax.Array, jax.Array]]:
        slots = to_next(slots)
        return slots, visit(slots, distance)

    # A device's own first: what it has is not sent to it.
    own = visit(slots, jnp.zeros((), jnp.int32))
    _, others = lax.scan(step, slots, jnp.arange(1, ranks))
    # Each device met them in another order. Sums in different orders differ in their last bits, and devices
    # that choose different tokens would never meet in a collective again.
    distance_C = (rank() - jnp.arange(ranks)) % ranks
    parts = (jnp.concatenate([x[None], y])[distance_C] for x, y in zip(own, others, strict=True))
    out_BNH, _ = combine(*parts, axis=0)
    return out_BNH.astype(q_BNH.dtype)


def attend_to_shared_slots_and_chunk(
    implementation: str | None,
    ranks: int,
    chunk: tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    slots: Slots,
    length: Int[Array, ""],
    first_B: Int[Array, " B"],
) -> Float[Array, "B T N H"]:
    """Attention of a chunk that all devices have to the tokens before it, which they share, and to itself.

    Args:
      implementation: of `flash_attention`.
      ranks: C.
      chunk: rotated queries, rotated keys, and values.
      slots: of this device, before the chunk is written.
      length: tokens before the chunk, padding included.
      first_B: each row's first token behind its padding, which may end within the chunk.
    """
    q_BTNH, k_BTKH, v_BTKH = chunk
    size, ones_BT = slots[0].shape[1], jnp.ones(q_BTNH.shape[:2], jnp.int32)

    def attend(keys: Slots, token_S: jax.Array, is_there_S: jax.Array, start: int) -> tuple:
        is_seen_BS = is_there_S & (token_S >= first_B[:, None])
        out_BTNH, logsumexp_BNT = flash_attention(
            q_BTNH,
            *(x.astype(q_BTNH.dtype) for x in keys),  # pyright: ignore[reportCallIssue]
            query_start=start,
            query_segments_BT=ones_BT,
            key_segments_BS=is_seen_BS.astype(jnp.int32),
            implementation=implementation,
        )
        return out_BTNH, logsumexp_BNT.transpose(0, 2, 1)

    token_S = rank() + ranks * jnp.arange(size)
    # Queries stand behind all slots: which of them are seen is said by segments, not by causality.
    before = combine_devices(*attend(slots, token_S, token_S < length, size))
    token_T = length + jnp.arange(q_BTNH.shape[1])
    # Causality is that of the chunk alone: whatever was written before it is before all of its queries.
    # The chunk itself counts once: all devices have it, and a sum over them would count it C times.
    within = attend((k_BTKH, v_BTKH), token_T, token_T >= length, 0)
    parts = (jnp.stack([x.astype(jnp.float32), y]) for x, y in zip(within, before, strict=True))
    out_BTNH, _ = combine(*parts, axis=0)
    return out_BTNH.astype(q_BTNH.dtype)


def combine_devices(out: Float[Array, "*P H"], logsumexp: Float[Array, "*P"]) -> tuple:
    """Attention to all devices' keys, from each one's: `combine` with its maximum and sums over devices.

    Args:
      out: output of this device's keys.
      logsumexp: theirs; minus infinity where there was nothing to see.

    Returns:
      Output and logsumexp of all keys, float32, the same on all devices.
    """
    top = all_max(logsumexp)
    # Where no device sees anything, minus infinity less itself would be no number.
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight = jnp.exp(logsumexp - top)[..., None]
    # Both sums at once: what a message costs at this size is that there is one.
    sums = all_sum(jnp.concatenate([out.astype(jnp.float32) * weight, weight], axis=-1))
    total = sums[..., -1]
    return sums[..., :-1] / jnp.where(total > 0, total, 1)[..., None], top + jnp.log(total)


def _attend_to_tokens_of(
    of_rank: jax.Array,
    implementation: str | None,
    ranks: int,
    q_BNH: jax.Array,
    slots: Slots,
    length: jax.Array,
    first_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attention to the tokens that a device keeps: output [B, N, H] and logsumexp [B, N]."""
    keys, values = slots
    dtype = jnp.promote_types(q_BNH.dtype, keys.dtype)  # a cache may be kept in another type
    # Its tokens, counted among themselves, are a plain cache, and those of padding a shorter padding.
    return decode_attention(
        q_BNH.astype(dtype),
        keys.astype(dtype),
        values.astype(dtype),
        jnp.broadcast_to(num_own(length, ranks, of_rank), first_B.shape),
        first_B=num_own(first_B, ranks, of_rank),
        implementation=implementation,
    )
