"""Attention to a cache that several devices share; each has every C-th token of a layer.

Token t is on device t % C, in slot t // C. At any length all devices have the same number of tokens to within
one, and short rows and padding are balanced as well. Queries are replicated. Partial results of the devices
are merged by their logsumexp ([Tree-Attention]).

Letters: C devices, B batch, T time of the chunk, S slots of a device, N query heads, K key/value heads,
H head width.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention import combine, decode_attention
from pallas_kernels.flash_attention import flash_attention
from zaya_jax.parallel.context import all_max, all_sum, rank, ring_shift

Slots = tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]
"""Keys and values of this device."""


def is_own(token_T: Int[Array, "*T"], ranks: int) -> Bool[Array, "*T"]:
    """Whether tokens are stored on this device."""
    return token_T % ranks == rank()


def num_own(num_tokens: jax.Array, ranks: int, of_rank: jax.Array) -> jax.Array:
    """Number of the first `num_tokens` tokens that a device stores; also the slot of its next token."""
    # Rounded up: with 8 devices and 9 tokens, the first device has two.
    return (num_tokens - of_rank + ranks - 1) // ranks


def attend_to_shared_slots(
    implementation: str | None,
    ranks: int,
    q_BNH: Float[Array, "B N H"],
    slots: Slots,
    length: Int[Array, ""],
    first_B: Int[Array, " B"],
) -> Float[Array, "B N H"]:
    """Attention of the newest token to all tokens, by one maximum and one sum over devices (tree attention).

    Args:
      implementation: implementation of `decode_attention`.
      ranks: C, number of devices.
      q_BNH: rotated queries of the newest token.
      slots: keys and values of this device; the newest token is already written.
      length: number of tokens, the newest one and padding included.
      first_B: index of each row's first token after its padding.
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
    """The same with keys and values circulating as in [Ring], as the baseline of tree attention.

    The arguments are those of `attend_to_shared_slots`.
    """

    def visit(slots: Slots, distance: jax.Array) -> tuple[jax.Array, jax.Array]:
        source = (rank() - distance) % ranks
        return _attend_to_tokens_of(source, implementation, ranks, q_BNH, slots, length, first_B)

    def step(slots: Slots, distance: jax.Array) -> tuple[Slots, tuple[jax.Array, jax.Array]]:
        slots = ring_shift(slots)
        return slots, visit(slots, distance)

    # The device's own slots first, which need no transfer.
    own = visit(slots, jnp.zeros((), jnp.int32))
    _, others = lax.scan(step, slots, jnp.arange(1, ranks))
    # Each device visits the others in a different order, but must sum in the same one: results that differ in
    # the last bits could select different tokens, and the devices would then deadlock in a collective.
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
    """Attention of a replicated chunk to the shared tokens before it and to itself.

    Args:
      implementation: implementation of `flash_attention`.
      ranks: C, number of devices.
      chunk: rotated queries, rotated keys, and values.
      slots: keys and values of this device, before the chunk is written.
      length: number of tokens before the chunk, padding included.
      first_B: index of each row's first token after its padding, which may end within the chunk.
    """
    q_BTNH, k_BTKH, v_BTKH = chunk
    size, ones_BT = slots[0].shape[1], jnp.ones(q_BTNH.shape[:2], jnp.int32)

    def attend(keys: Slots, token_S: jax.Array, is_written_S: jax.Array, start: int) -> tuple:
        is_visible_BS = is_written_S & (token_S >= first_B[:, None])
        out_BTNH, logsumexp_BNT = flash_attention(
            q_BTNH,
            *(x.astype(q_BTNH.dtype) for x in keys),  # pyright: ignore[reportCallIssue]
            query_start=start,
            query_segments_BT=ones_BT,
            key_segments_BS=is_visible_BS.astype(jnp.int32),
            implementation=implementation,
        )
        return out_BTNH, logsumexp_BNT.transpose(0, 2, 1)

    token_S = rank() + ranks * jnp.arange(size)
    # Queries follow all slots, so that only segments mask slots, not causality.
    before = combine_devices(*attend(slots, token_S, token_S < length, size))
    token_T = length + jnp.arange(q_BTNH.shape[1])
    # The chunk is merged after the sum over devices, which would count it C times because it is replicated.
    within = attend((k_BTKH, v_BTKH), token_T, token_T >= length, 0)
    parts = (jnp.stack([x.astype(jnp.float32), y]) for x, y in zip(within, before, strict=True))
    out_BTNH, _ = combine(*parts, axis=0)
    return out_BTNH.astype(q_BTNH.dtype)


def combine_devices(out: Float[Array, "*P H"], logsumexp: Float[Array, "*P"]) -> tuple:
    """Merges attention over devices: `combine` with the maximum and sums over devices.

    Args:
      out: attention output for this device's keys.
      logsumexp: logsumexp for this device's keys; -inf if all are masked.

    Returns:
      Output and logsumexp for all keys, float32, the same on all devices.
    """
    top = all_max(logsumexp)
    # If all keys are masked, -inf minus -inf would be NaN.
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight = jnp.exp(logsumexp - top)[..., None]
    # One collective for both sums: at this size the latency dominates.
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
    """Attention to the tokens that a device stores: output [B, N, H] and logsumexp [B, N]."""
    keys, values = slots
    dtype = jnp.promote_types(q_BNH.dtype, keys.dtype)  # a cache may have another type
    # The tokens of a device form a plain cache with a shorter length and shorter padding.
    return decode_attention(
        q_BNH.astype(dtype),
        keys.astype(dtype),
        values.astype(dtype),
        jnp.broadcast_to(num_own(length, ranks, of_rank), first_B.shape),
        first_B=num_own(first_B, ranks, of_rank),
        implementation=implementation,
    )
