"""Cache for decoding: keys, values and the state of the attention variant of earlier tokens.

Keys and values of all layers are in one pool of slots. A full-attention layer has `max_length` slots, a
sliding layer a ring buffer with as many slots as its window; offsets are computed from the layer's number.
With left padding, prompts of different lengths are padded so that all sequences of a batch write to the same
slot. With right padding, each row has its own length, and its chunks may be partly or entirely padding, so
that sequences can be added and removed. Devices may share the slots of full-attention layers
(`zaya_jax.model.attention.sharded_cache`); ring buffers are short and replicated.

Letters: L layers, B batch, T time of the chunk, Z slots of all layers, S slots of one layer,
N query heads, K key/value heads, H head width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.fusion import as_bits, from_bits
from zaya_jax.config import HYBRID_SLIDING, ExecutionConfig, ModelConfig
from zaya_jax.errors import UserError
from zaya_jax.model.attention.block import attend_within, variant_of
from zaya_jax.model.attention.sharded_cache import (
    attend_around_ring,
    attend_to_shared_slots,
    attend_to_shared_slots_and_chunk,
    is_own,
)
from zaya_jax.pytree import pytree, static

Pool = tuple[Shaped[Array, "B Z K H"], Shaped[Array, "B Z K H"]]
"""Rotated keys, and values, in the form of `as_bits`: each layer of each token writes to a few slots."""
Padding = Literal["left", "right"]
"""Side of the padding of chunks: on the left it occupies slots; on the right it is not stored."""
Exchange = Literal["tree", "ring"]
"""What devices that share a cache exchange per token: partial attention results, or keys and values."""


@pytree
class Cache:
    """Decode state of a batch of sequences."""

    pool: Pool
    """Keys and values of all layers."""
    state: Any
    """State of the attention variant of all layers, with a leading axis L."""
    length: Int[Array, "*B"]
    """Number of tokens so far, left padding included; shape [B] with right padding, otherwise a scalar."""
    first_B: Int[Array, " B"]
    """Index of each sequence's first token after its padding."""
    max_length: int = static()
    """Capacity in tokens, padding included."""
    empty: bool = static()
    """Whether nothing was written yet; the first chunk then attends only to itself."""
    ranks: int = static(default=1)
    """Number of devices that share it. Each has an equal part of the slots; everything else is replicated."""
    exchange: Exchange = static(default="tree")
    padding: Padding = static(default="left")
    takes_dtype: bool = static(default=False)
    """Whether keys and values get the type of the model that writes them first."""

    @property
    def dtype(self) -> np.dtype:
        """Type of keys and values."""
        return _numbers_in(self.pool[0].dtype)


def _numbers_in(dtype: np.dtype) -> np.dtype:
    """Type of the numbers in a pool of a dtype."""
    return jnp.dtype(jnp.bfloat16) if dtype == jnp.uint16 else dtype


def num_new_tokens(cache: Cache | None, segments_BT: Int[Array, "B T"] | None) -> Int[Array, " B"] | None:
    """Number of tokens of a chunk in each row, with right padding; None with left padding."""
    if cache is None or cache.padding == "left":
        return None
    assert segments_BT is not None, "right padding requires segments"
    return jnp.sum(segments_BT != 0, axis=1, dtype=jnp.int32)


class Holding(NamedTuple):
    """Slots of a layer on a device."""

    size: int
    """Number of slots."""
    is_shared: bool
    """Whether other devices have the remaining slots of the layer."""


def holdings(config: ModelConfig, max_length: int, ranks: int = 1) -> tuple[Holding, ...]:
    """Slots of each layer on a device: its part of all tokens, or a ring buffer for the window."""
    # A window larger than max_length would reserve slots that are never written.
    ring = Holding(min(config.sliding_window or max_length, max_length), is_shared=False)
    part = Holding(-(-max_length // ranks), is_shared=ranks > 1)
    return tuple(ring if kind == HYBRID_SLIDING else part for kind in config.layer_types)


def init_cache(
    config: ModelConfig,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike | None = None,
    *,
    ranks: int = 1,
    exchange: Exchange = "tree",
) -> Cache:
    """Makes an empty cache.

    Args:
      config: architecture.
      batch_size: B, number of sequences.
      max_length: capacity in tokens, for padding, prompt and answer.
      dtype: type of keys and values. None is the `execution.dtype` of the model that fills the cache: its
        first call changes the type of the empty pool, which is bfloat16 until then. The state of the
        attention variant is always float32.
      ranks: number of devices that share it. The pool [B, C*Z, K, H] covers all of them; functions that read
        it run on each device with its part (`zaya_jax.parallel.mesh.SLOTS`).
      exchange: what these devices exchange per token.

    Raises:
      UserError: if max_length is below 1.
    """
    if max_length < 1:
        raise UserError(f"max_length is {max_length}; the cache must hold at least 1 token")
    num_slots = ranks * sum(held.size for held in holdings(config, max_length, ranks))
    pool = (batch_size, num_slots, config.num_key_value_heads, config.head_dim)
    # Zeros, not uninitialized memory: masked values are multiplied by 0, and NaN times 0 is NaN.
    return Cache(
        pool=(as_bits(jnp.zeros(pool, dtype or "bfloat16")), as_bits(jnp.zeros(pool, dtype or "bfloat16"))),
        state=variant_of(config).empty_state(config, batch_size),
        length=jnp.zeros((), jnp.int32),
        first_B=jnp.zeros((batch_size,), jnp.int32),
        max_length=max_length,
        empty=True,
        ranks=ranks,
        exchange=exchange,
        takes_dtype=dtype is None,
    )


def with_dtype(cache: Cache, dtype: DTypeLike) -> Cache:
    """Casts keys and values to a model's type, if the cache was made without a type."""
    if not cache.takes_dtype:
        return cache
    # The pool is still empty. A bfloat16 pool would round the keys of a float32 model.
    keys, values = (as_bits(from_bits(part, cache.dtype).astype(dtype)) for part in cache.pool)
    return dataclasses.replace(cache, pool=(keys, values), takes_dtype=False)


@pytree
class LayerSlots:
    """Slots of a layer in the pool, as arrays, so that a scan can iterate over layers."""

    first: Int[Array, "*L"]
    size: Int[Array, "*L"]
    window: Int[Array, "*L"]
    """Number of tokens that a query attends to, itself included."""
    holding: Int[Array, "*L"]
    """Index of the layer's holding in `_kinds`."""


def layer_slots(config: ModelConfig, max_length: int, ranks: int = 1) -> LayerSlots:
    """Slots of each layer in a device's pool, [L]."""
    held, kinds = holdings(config, max_length, ranks), _kinds(config, max_length, ranks)
    sizes_L = np.array([each.size for each in held], np.int32)
    sliding_L = np.array([kind == HYBRID_SLIDING for kind in config.layer_types])
    window_L = np.where(sliding_L, config.sliding_window or 0, max_length).astype(np.int32)
    holding_L = np.array([kinds.index(each) for each in held], np.int32)
    # Layers are consecutive in the pool.
    fields = np.cumsum(sizes_L) - sizes_L, sizes_L, window_L, holding_L
    return LayerSlots(*map(jnp.asarray, fields))


def _kinds(config: ModelConfig, max_length: int, ranks: int) -> tuple[Holding, ...]:
    return tuple(sorted(set(holdings(config, max_length, ranks))))


def state_of_layer(state_L: Any, number: jax.Array) -> Any:
    """Returns the state of the attention variant of one layer."""
    return jax.tree.map(lambda x_L: lax.dynamic_index_in_dim(x_L, number, keepdims=False), state_L)


def with_state_of_layer(state_L: Any, state: Any, number: jax.Array) -> Any:
    """Returns the states of all layers with a new one for one layer.

    A loop over layers updates them in place. If it returned each layer's state as a result, every token would
    begin with zeros for all of them and end with a copy.
    """

    def replaced(x_L: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(x_L, x, number, axis=0)

    return jax.tree.map(replaced, state_L, state)


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
    """Attends to the cache and the chunk, and writes the chunk's keys and values into the layer's slots.

    Args:
      config: architecture.
      execution: how attention is computed.
      q_BTNH: rotated queries of the chunk.
      k_BTKH: rotated keys of the chunk.
      v_BTKH: values of the chunk.
      pool: keys and values of all layers.
      layer: slots of the layer.
      cache: cache before the chunk.
      segments_BT: 0 marks padding; left padding is only valid in an empty cache.
    """
    kinds = _kinds(config, cache.max_length, cache.ranks)
    implementation = execution.implementation_of("decode")
    num_new_B = num_new_tokens(cache, segments_BT)
    if q_BTNH.shape[1] == 1:
        # Written first, so that the token attends to itself; it only overwrites a key outside of its window.
        pool = _write(pool, k_BTKH, v_BTKH, layer, cache, kinds, num_new_B)
        read = functools.partial(_attend_to_slots, implementation, q_BTNH, pool, layer, cache)
        return _for_kind(read, layer, kinds), pool
    if cache.empty:  # static: a first prompt is processed as in training, without reading empty slots
        out = attend_within(config, execution, q_BTNH, k_BTKH, v_BTKH, layer.window, segments_BT)
        return out, _write(pool, k_BTKH, v_BTKH, layer, cache, kinds, num_new_B)
    # Read first, because writes of the chunk may overwrite keys that its first queries need.
    chunk = q_BTNH, k_BTKH, v_BTKH
    read = functools.partial(_attend_to_slots_and_chunk, implementation, chunk, pool, layer, cache)
    return _for_kind(read, layer, kinds), _write(pool, k_BTKH, v_BTKH, layer, cache, kinds, num_new_B)


def _for_kind(
    read: Callable[[Holding], jax.Array], layer: LayerSlots, kinds: tuple[Holding, ...]
) -> jax.Array:
    """Calls `read(holding)` for the holding of the layer."""
    if len(kinds) == 1:
        return read(kinds[0])
    # Slice sizes are static and layers of a scan share a program, so each size has a branch. All devices are
    # in the same layer and take the same branch, so collectives within a branch cannot deadlock.
    return lax.switch(layer.holding, [functools.partial(read, held) for held in kinds])


def _attend_to_slots(
    implementation: str | None, q_B1NH: jax.Array, pool: Pool, layer: LayerSlots, cache: Cache, held: Holding
) -> jax.Array:
    """Attention of the newest token to the slots, which include it."""
    if held.is_shared:
        slots = _slots_of(pool, layer, held.size)
        attend = attend_around_ring if cache.exchange == "ring" else attend_to_shared_slots
        where = slots, cache.length + 1, cache.first_B
        return attend(implementation, cache.ranks, q_B1NH[:, 0], *where)[:, None]
    keys, values = (from_bits(part, _numbers_in(part.dtype)) for part in pool)
    first_slot: jax.Array | int = layer.first
    dtype = jnp.promote_types(q_B1NH.dtype, keys.dtype)  # a cache may have another type
    if keys.dtype != dtype:  # casts the slots of this layer only
        (keys, values), first_slot = _slots_of(pool, layer, held.size), 0
    out_BNH, _ = decode_attention(
        q_B1NH[:, 0].astype(dtype),
        keys.astype(dtype),
        values.astype(dtype),
        jnp.broadcast_to(cache.length + 1, cache.first_B.shape),
        first_B=cache.first_B,
        window=layer.window,
        first_slot=first_slot,
        num_slots=held.size,
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
    """Attention of a chunk to the earlier tokens, oldest first, and to itself."""
    slots, size = _slots_of(pool, layer, held.size), held.size
    if held.is_shared:
        where = slots, cache.length, cache.first_B
        return attend_to_shared_slots_and_chunk(implementation, cache.ranks, chunk, *where)
    q_BTNH, *new = chunk
    time = q_BTNH.shape[1]
    # A ring buffer starts anywhere. In token order, the usual causal mask and window apply.
    keys, values = (
        jnp.concatenate([_in_order(part, cache.length).astype(x.dtype), x], 1)
        for part, x in zip(slots, new, strict=True)
    )
    token_S = cache.length[..., None] - size + jnp.arange(size + time)  # or [B, S]
    is_token_BS = (token_S >= cache.first_B[:, None]).astype(jnp.int32)  # excludes padding and empty slots
    out_BTNH, _ = flash_attention(
        q_BTNH,
        keys,
        values,
        # Empty slots precede all tokens; the window excludes them, so that their blocks are skipped.
        window=jnp.minimum(layer.window, jnp.max(cache.length) + time),
        query_start=size,
        query_segments_BT=jnp.ones(q_BTNH.shape[:2], jnp.int32),
        key_segments_BS=is_token_BS,
        implementation=implementation,
    )
    return out_BTNH


def _in_order(part_BSKH: jax.Array, length: jax.Array) -> jax.Array:
    """Slots of a ring buffer, from the oldest token to the newest."""
    size = part_BSKH.shape[1]
    slot_S = (length[..., None] + jnp.arange(size)) % size
    if slot_S.ndim == 1:
        return part_BSKH[:, slot_S]
    return jnp.take_along_axis(part_BSKH, slot_S[:, :, None, None], axis=1)


def _slots_of(pool: Pool, layer: LayerSlots, size: int) -> tuple[jax.Array, jax.Array]:
    slots = (lax.dynamic_slice_in_dim(part, layer.first, size, axis=1) for part in pool)
    keys, values = (from_bits(part, _numbers_in(part.dtype)) for part in slots)
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
    """Writes the last tokens of a chunk, as many as the layer has slots, or this device's part of them."""
    if num_new_B is not None:
        return _write_by_row(pool, (k_BTKH, v_BTKH), layer, cache, num_new_B)
    keys, values = ((part, _stored(new, part)) for part, new in zip(pool, (k_BTKH, v_BTKH), strict=True))
    time = k_BTKH.shape[1]
    place_T, is_kept_T = _places(cache.length + jnp.arange(time), layer, cache, kinds)
    if time == 1:  # with left padding all sequences write the same slot: a slice instead of a scatter
        at = (0, place_T[0], 0, 0)
        if cache.ranks > 1:  # other devices write back their current value
            keys, values = (
                (part, jnp.where(is_kept_T, new, lax.dynamic_slice(part, at, new.shape)))
                for part, new in (keys, values)
            )
        return lax.dynamic_update_slice(*keys, at), lax.dynamic_update_slice(*values, at)
    # A chunk longer than the ring buffer would write slots twice, in undefined order. Tokens that would be
    # overwritten get an index outside of the pool, where writes are dropped.
    slot_T = jnp.where(is_kept_T, place_T, pool[0].shape[1])
    return tuple(part.at[:, slot_T].set(new, mode="drop") for part, new in (keys, values))  # pyright: ignore


def _stored(new: jax.Array, part: jax.Array) -> jax.Array:
    """New keys or values in the form of their part of the pool."""
    return as_bits(new.astype(_numbers_in(part.dtype)))


def _write_by_row(
    pool: Pool, new: tuple[jax.Array, jax.Array], layer: LayerSlots, cache: Cache, num_new_B: jax.Array
) -> Pool:
    """`_write` with right padding, where each row has its own length."""
    assert cache.ranks == 1, "right padding is not supported for a shared cache"
    time, size = new[0].shape[1], pool[0].shape[1]
    slot_BT = kept_slots(cache.length[:, None], num_new_B[:, None], layer, time, beyond=size)
    row_B1 = jnp.arange(len(num_new_B))[:, None]
    return tuple(  # pyright: ignore
        part.at[row_B1, slot_BT].set(_stored(x, part), mode="drop") for part, x in zip(pool, new, strict=True)
    )


def kept_slots(
    length: jax.Array, num_new: jax.Array, layer: LayerSlots, time: int, *, beyond: int
) -> Int[Array, "*B T"]:
    """Slot of each token of a chunk in the pool; `beyond` for padding and for tokens that are not kept.

    Args:
      length: number of tokens before the chunk, [*B, 1] or a scalar.
      num_new: number of tokens of the chunk before its padding, [*B, 1] or a scalar.
      layer: slots of the layer; for several layers with axes like those of the result.
      time: T, length of the chunk.
      beyond: an index outside of the pool, so that writes are dropped.
    """
    index_T = jnp.arange(time)
    # Padding, and tokens of a long chunk that later ones would overwrite, must not overwrite tokens in use.
    is_kept_T = (index_T < num_new) & (num_new - index_T <= layer.size)
    return jnp.where(is_kept_T, layer.first + (length + index_T) % layer.size, beyond)


def _places(
    token_T: jax.Array, layer: LayerSlots, cache: Cache, kinds: tuple[Holding, ...]
) -> tuple[jax.Array, jax.Array]:
    """Slots of a chunk's tokens in the pool, and whether this device writes each of them."""
    is_newest_T = token_T[-1] - token_T < layer.size
    in_ring_T = token_T % layer.size
    if cache.ranks == 1:
        return layer.first + in_ring_T, is_newest_T
    # Ring buffers are replicated; in shared layers each device has every C-th token, and all tokens fit.
    is_shared = jnp.array([held.is_shared for held in kinds])[layer.holding]
    place_T = jnp.where(is_shared, token_T // cache.ranks, in_ring_T)
    is_kept_T = jnp.where(is_shared, is_own(token_T, cache.ranks), is_newest_T)
    return layer.first + place_T, is_kept_T
