"""What decoding keeps of the tokens so far: keys and values, and the attention variant's own state.

Keys and values of all layers lie in one pool of slots. A layer that attends to everything owns
`max_length` slots, a sliding layer a ring of as many as its window; which slots are whose is
arithmetic on the layer's number. Prompts of different lengths are padded on the left, so that all
sequences of a batch write the same slot; or each row has a length of its own, and its chunks are padded on
the right, or are padding alone, so that rows come and go. Devices may share the slots of layers that attend
to everything (`zaya_jax.model.shared_cache`); rings are short, and each device has all of them.

Letters: L layers, B batch, T time of the chunk, Z slots of all layers, S slots of one layer,
N query heads, K key/value heads, H head width.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.flash_attention import flash_attention
from zaya_jax.config import HYBRID_SLIDING, ExecutionConfig, ModelConfig
from zaya_jax.model.attention import attend_within, variant_of
from zaya_jax.model.shared_cache import (
    attend_around_ring,
    attend_to_shared_slots,
    attend_to_shared_slots_and_chunk,
    is_own,
)
from zaya_jax.pytree import pytree, static

Pool = tuple[Float[Array, "B Z K H"], Float[Array, "B Z K H"]]
"""Rotated keys, and values."""
Padding = Literal["left", "right"]
"""Of chunks: on the left before the first token, where it takes slots; on the right it leaves no trace."""
Exchange = Literal["tree", "ring"]
"""What devices that share a cache send for a token: sums of what each found, or all keys and values."""


@pytree
class Cache:
    """Decode state of a batch of sequences."""

    pool: Pool
    """Of all layers."""
    state: Any
    """Of the attention variant, of every layer: with a leading axis L."""
    length: Int[Array, "*B"]
    """Tokens so far, padding on the left included; [B] where it is on the right, and else of all rows."""
    first_B: Int[Array, " B"]
    """Index of each sequence's first token behind its padding."""
    max_length: int = static()
    """Tokens that fit, padding included."""
    empty: bool = static()
    """Whether nothing was written yet; a first chunk then attends to itself alone."""
    ranks: int = static(default=1)
    """Devices that share it. Each has an equal part of the pool's slots; all else is the same on all."""
    exchange: Exchange = static(default="tree")
    padding: Padding = static(default="left")


def num_new_tokens(cache: Cache | None, segments_BT: Int[Array, "B T"] | None) -> Int[Array, " B"] | None:
    """Tokens of a chunk in each row where padding may follow them; None where all of it counts."""
    if cache is None or cache.padding == "left":
        return None
    assert segments_BT is not None, "a chunk that is padded on the right says where"
    return jnp.sum(segments_BT != 0, axis=1, dtype=jnp.int32)


class Holding(NamedTuple):
    """What a device holds of a layer."""

    size: int
    """Slots."""
    is_shared: bool
    """Whether its tokens are some of the layer's, and the others are on other devices."""


def holdings(config: ModelConfig, max_length: int, ranks: int = 1) -> tuple[Holding, ...]:
    """Of each layer: a device's part of all tokens, or a ring of the window's."""
    # A window wider than the text would reserve slots that nobody can write.
    ring = Holding(min(config.sliding_window or max_length, max_length), is_shared=False)
    part = Holding(-(-max_length // ranks), is_shared=ranks > 1)
    return tuple(ring if kind == HYBRID_SLIDING else part for kind in config.layer_types)


def init_cache(
    config: ModelConfig,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike = "bfloat16",
    *,
    ranks: int = 1,
    exchange: Exchange = "tree",
) -> Cache:
    """An empty cache.

    Args:
      config: the network's.
      batch_size: B.
      max_length: tokens that must fit, prompt, padding and answer together.
      dtype: of keys and values. The attention variant's own state is float32 always.
      ranks: devices that share it. The pool [B, C*Z, K, H] is that of all; what reads it runs on each of
        them, with its part (`zaya_jax.parallel.mesh.SLOTS`).
      exchange: what these send each other for a token.

    Raises:
      ValueError: if no token fits.
    """
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; the cache must hold at least 1 token")
    num_slots = ranks * sum(held.size for held in holdings(config, max_length, ranks))
    pool = (batch_size, num_slots, config.num_key_value_heads, config.head_dim)
    # Zeros, not what memory holds: a masked score is never read, but NaN times 0 in a product is NaN.
    return Cache(
        pool=(jnp.zeros(pool, dtype), jnp.zeros(pool, dtype)),
        state=variant_of(config).empty_state(config, batch_size),
        length=jnp.zeros((), jnp.int32),
        first_B=jnp.zeros((batch_size,), jnp.int32),
        max_length=max_length,
        empty=True,
        ranks=ranks,
        exchange=exchange,
    )


@pytree
class LayerSlots:
    """Which slots of the pool are a layer's. Arrays, so that they can be data of a scan."""

    first: Int[Array, "*L"]
    size: Int[Array, "*L"]
    window: Int[Array, "*L"]
    """Tokens that a query of the layer sees, itself included."""
    holding: Int[Array, "*L"]
    """Which of the network's few holdings is the layer's, by their order in `_kinds`."""


def layer_slots(config: ModelConfig, max_length: int, ranks: int = 1) -> LayerSlots:
    """Where each layer's slots lie in a device's pool, [L]."""
    held, kinds = holdings(config, max_length, ranks), _kinds(config, max_length, ranks)
    sizes_L = np.array([each.size for each in held], np.int32)
    sliding_L = np.array([kind == HYBRID_SLIDING for kind in config.layer_types])
    window_L = np.where(sliding_L, config.sliding_window or 0, max_length).astype(np.int32)
    holding_L = np.array([kinds.index(each) for each in held], np.int32)
    # Layers lie one after the other: each begins where those before it end.
    fields = np.cumsum(sizes_L) - sizes_L, sizes_L, window_L, holding_L
    return LayerSlots(*map(jnp.asarray, fields))


def _kinds(config: ModelConfig, max_length: int, ranks: int) -> tuple[Holding, ...]:
    return tuple(sorted(set(holdings(config, max_length, ranks))))


def attend_through_cache(
    config: ModelConfig,
    execution: ExecutionConfig,
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    pool: Pool,
    layer: LayerSlots,
    cache: Cache,
    segments_BT: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T N H"], Pool]:
    """Attends to all that a chunk may see, and writes its keys and values into the layer's slots.

    Args:
      config: of the network, whose layers have few different numbers of slots.
      execution: which implementations to take.
      q_BTNH: rotated queries of the chunk.
      k_BTKH: rotated keys of the chunk.
      v_BTKH: values of the chunk.
      pool: keys and values of all layers.
      layer: the layer's part of it.
      cache: before the chunk; what it says of tokens holds for all layers.
      segments_BT: 0 marks padding; on the left only on an empty cache.
    """
    kinds = _kinds(config, cache.max_length, cache.ranks)
    implementation = execution.implementation_of("decode")
    num_new_B = num_new_tokens(cache, segments_BT)
    if q_BTNH.shape[1] == 1:
        # Written first, so that the token finds itself: it only overtakes a key that has left its window.
        pool = _write(pool, k_BTKH, v_BTKH, layer, cache, kinds, num_new_B)
        read = functools.partial(_attend_to_slots, implementation, q_BTNH, pool, layer, cache)
        return _for_kind(read, layer, kinds), pool
    if cache.empty:  # static: a prompt is read as in training, and no slot of an empty ring is looked at
        out = attend_within(config, execution, q_BTNH, k_BTKH, v_BTKH, layer.window, segments_BT)
        return out, _write(pool, k_BTKH, v_BTKH, layer, cache, kinds, num_new_B)
    # The chunk's own writes may overtake keys that its first queries still need: read first.
    chunk = q_BTNH, k_BTKH, v_BTKH
    read = functools.partial(_attend_to_slots_and_chunk, implementation, chunk, pool, layer, cache)
    return _for_kind(read, layer, kinds), _write(pool, k_BTKH, v_BTKH, layer, cache, kinds, num_new_B)


def _for_kind(
    read: Callable[[Holding], jax.Array], layer: LayerSlots, kinds: tuple[Holding, ...]
) -> jax.Array:
    """Runs `read(held)` for what is held of the layer, which is one of few kinds."""
    if len(kinds) == 1:
        return read(kinds[0])
    # A slice's size is part of the program, and layers of a scan share one: a branch for each kind. All
    # devices are in the same layer, and so in the same branch: none waits in a collective alone.
    return lax.switch(layer.holding, [functools.partial(read, held) for held in kinds])


def _attend_to_slots(
    implementation: str | None, q_B1NH: jax.Array, pool: Pool, layer: LayerSlots, cache: Cache, held: Holding
) -> jax.Array:
    """Attention of the newest token, itself among the slots."""
    keys, values = _slots_of(pool, layer, held.size)
    if held.is_shared:
        attend = attend_around_ring if cache.exchange == "ring" else attend_to_shared_slots
        where = (keys, values), cache.length + 1, cache.first_B
        return attend(implementation, cache.ranks, q_B1NH[:, 0], *where)[:, None]
    dtype = jnp.promote_types(q_B1NH.dtype, keys.dtype)  # a cache may be kept in another type
    out_BNH, _ = decode_attention(
        q_B1NH[:, 0].astype(dtype),
        keys.astype(dtype),
        values.astype(dtype),
        jnp.broadcast_to(cache.length + 1, cache.first_B.shape),
        first_B=cache.first_B,
        window=layer.window,
        implementation=implementation,
    )
    return out_BNH[:, None].astype(q_B1NH.dtype)


def _attend_to_slots_and_chunk(
    implementation: str | None,
    chunk: tuple[jax.Array, jax.Array, jax.Array],
    pool: Pool,
    layer: LayerSlots,
    cache: Cache,
    held: Holding,
) -> jax.Array:
    """Attention of a chunk to the tokens before it, oldest first, and to itself."""
    slots, size = _slots_of(pool, layer, held.size), held.size
    if held.is_shared:
        where = slots, cache.length, cache.first_B
        return attend_to_shared_slots_and_chunk(implementation, cache.ranks, chunk, *where)
    q_BTNH, *new = chunk
    time = q_BTNH.shape[1]
    # A ring begins anywhere. In the order of its tokens, causality and windows are those of any sequence.
    keys, values = (
        jnp.concatenate([_in_order(part, cache.length).astype(x.dtype), x], 1)
        for part, x in zip(slots, new, strict=True)
    )
    token_S = cache.length[..., None] - size + jnp.arange(size + time)  # or [B, S]
    is_token_BS = (token_S >= cache.first_B[:, None]).astype(jnp.int32)  # neither padding nor an empty slot
    out_BTNH, _ = flash_attention(
        q_BTNH,
        keys,
        values,
        # Slots that are empty yet lie before all tokens: out of reach, their blocks are not looked at.
        window=jnp.minimum(layer.window, jnp.max(cache.length) + time),
        query_start=size,
        query_segments_BT=jnp.ones(q_BTNH.shape[:2], jnp.int32),
        key_segments_BS=is_token_BS,
        implementation=implementation,
    )
    return out_BTNH


def _in_order(part_BSKH: jax.Array, length: jax.Array) -> jax.Array:
    """A ring's slots from the oldest token to the newest."""
    size = part_BSKH.shape[1]
    slot_S = (length[..., None] + jnp.arange(size)) % size
    if slot_S.ndim == 1:
        return part_BSKH[:, slot_S]
    return jnp.take_along_axis(part_BSKH, slot_S[:, :, None, None], axis=1)


def _slots_of(pool: Pool, layer: LayerSlots, size: int) -> tuple[jax.Array, jax.Array]:
    keys, values = (lax.dynamic_slice_in_dim(part, layer.first, size, axis=1) for part in pool)
    return keys, values


def _write(
    pool: Pool,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    layer: LayerSlots,
    cache: Cache,
    kinds: tuple[Holding, ...],
    num_new_B: jax.Array | None,
) -> Pool:
    """Writes the chunk's last tokens, as many as the layer keeps, or those of them that are this device's."""
    if num_new_B is not None:
        return _write_by_row(pool, (k_BTKH, v_BTKH), layer, cache, num_new_B)
    keys, values = ((part, new.astype(part.dtype)) for part, new in zip(pool, (k_BTKH, v_BTKH), strict=True))
    time = k_BTKH.shape[1]
    place_T, is_kept_T = _places(cache.length + jnp.arange(time), layer, cache, kinds)
    if time == 1:  # one place for all sequences, which are padded on the left: a slice, and no scatter
        at = (0, place_T[0], 0, 0)
        if cache.ranks > 1:  # whoever does not keep the token writes what it has there
            keys, values = (
                (part, jnp.where(is_kept_T, new, lax.dynamic_slice(part, at, new.shape)))
                for part, new in (keys, values)
            )
        return lax.dynamic_update_slice(*keys, at), lax.dynamic_update_slice(*values, at)
    # A chunk longer than the ring would write slots twice, and of such writes any may come last: those that
    # are overtaken go beyond the pool, where they are dropped.
    slot_T = jnp.where(is_kept_T, place_T, pool[0].shape[1])
    return tuple(part.at[:, slot_T].set(new, mode="drop") for part, new in (keys, values))  # pyright: ignore


def _write_by_row(
    pool: Pool, new: tuple[jax.Array, jax.Array], layer: LayerSlots, cache: Cache, num_new_B: jax.Array
) -> Pool:
    """`_write` where each row has its own length, and padding behind its tokens."""
    assert cache.ranks == 1, "devices share the slots of rows that are equally long"
    time, size = new[0].shape[1], pool[0].shape[1]
    slot_BT = kept_slots(cache.length[:, None], num_new_B[:, None], layer, time, beyond=size)
    row_B1 = jnp.arange(len(num_new_B))[:, None]
    return tuple(  # pyright: ignore
        part.at[row_B1, slot_BT].set(x.astype(part.dtype), mode="drop")
        for part, x in zip(pool, new, strict=True)
    )


def kept_slots(
    length: jax.Array, num_new: jax.Array, layer: LayerSlots, time: int, *, beyond: int
) -> Int[Array, "*B T"]:
    """Where a layer keeps each token of a chunk in the pool; `beyond` for what is padding or overtaken.

    Args:
      length: tokens before the chunk, [*B, 1] or one number.
      num_new: tokens of the chunk, behind which it is padding, likewise.
      layer: the layer's part of the pool; of several layers with axes as the result's.
      time: of the chunk, T.
      beyond: a slot that no pool has, so that a write to it is dropped.
    """
    index_T = jnp.arange(time)
    # What is padding, and of a chunk longer than the ring what its later tokens overtake: either would write
    # over a token that is still to be seen.
    is_kept_T = (index_T < num_new) & (num_new - index_T <= layer.size)
    return jnp.where(is_kept_T, layer.first + (length + index_T) % layer.size, beyond)


def _places(
    token_T: jax.Array, layer: LayerSlots, cache: Cache, kinds: tuple[Holding, ...]
) -> tuple[jax.Array, jax.Array]:
    """Slots of a chunk's tokens in the pool, and which of them are written there on this device."""
    is_newest_T = token_T[-1] - token_T < layer.size
    in_ring_T = token_T % layer.size
    if cache.ranks == 1:
        return layer.first + in_ring_T, is_newest_T
    # A ring on each device, or every so many-th token on one; there all have their place, none is overtaken.
    is_shared = jnp.array([held.is_shared for held in kinds])[layer.holding]
    place_T = jnp.where(is_shared, token_T // cache.ranks, in_ring_T)
    is_kept_T = jnp.where(is_shared, is_own(token_T, cache.ranks), is_newest_T)
    return layer.first + place_T, is_kept_T
