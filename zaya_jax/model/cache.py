"""What decoding keeps of the tokens so far: keys and values, and the attention variant's own state.

Keys and values of all layers lie in one pool of slots. A layer that attends to everything owns
`max_length` slots, a sliding layer a ring of as many as its window; which slots are whose is
arithmetic on the layer's number. Prompts of different lengths are padded on the left, so that all
sequences of a batch write the same slot.

Letters: L layers, B batch, T time of the chunk, Z slots of all layers, S slots of one layer,
N query heads, K key/value heads, H head width.
"""

import functools
from collections.abc import Callable
from typing import Any

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
from zaya_jax.pytree import pytree, static

Pool = tuple[Float[Array, "B Z K H"], Float[Array, "B Z K H"]]
"""Rotated keys, and values."""


@pytree
class Cache:
    """Decode state of a batch of sequences."""

    pool: Pool
    """Of all layers."""
    state: Any
    """Of the attention variant, of every layer: with a leading axis L."""
    length: Int[Array, ""]
    """Tokens so far, padding included."""
    first_B: Int[Array, " B"]
    """Index of each sequence's first token behind its padding."""
    max_length: int = static()
    """Tokens that fit, padding included."""
    empty: bool = static()
    """Whether nothing was written yet; a first chunk then attends to itself alone."""


def sizes_of_layers(config: ModelConfig, max_length: int) -> tuple[int, ...]:
    """Slots of each layer: all tokens, or a ring of the window's."""
    # A window wider than the text would reserve slots that nobody can write.
    ring = min(config.sliding_window or max_length, max_length)
    return tuple(ring if kind == HYBRID_SLIDING else max_length for kind in config.layer_types)


def init_cache(config: ModelConfig, batch_size: int, max_length: int, dtype: DTypeLike = "bfloat16") -> Cache:
    """An empty cache.

    Args:
      config: the network's.
      batch_size: B.
      max_length: tokens that must fit, prompt, padding and answer together.
      dtype: of keys and values. The attention variant's own state is float32 always.

    Raises:
      ValueError: if no token fits.
    """
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; the cache must hold at least 1 token")
    num_slots = sum(sizes_of_layers(config, max_length))
    pool = (batch_size, num_slots, config.num_key_value_heads, config.head_dim)
    # Zeros, not what memory holds: a masked score is never read, but NaN times 0 in a product is NaN.
    return Cache(
        pool=(jnp.zeros(pool, dtype), jnp.zeros(pool, dtype)),
        state=variant_of(config).empty_state(config, batch_size),
        length=jnp.zeros((), jnp.int32),
        first_B=jnp.zeros((batch_size,), jnp.int32),
        max_length=max_length,
        empty=True,
    )


@pytree
class LayerSlots:
    """Which slots of the pool are a layer's. Arrays, so that they can be data of a scan."""

    first: Int[Array, "*L"]
    size: Int[Array, "*L"]
    window: Int[Array, "*L"]
    """Tokens that a query of the layer sees, itself included."""


def layer_slots(config: ModelConfig, max_length: int) -> LayerSlots:
    """Where each layer's slots lie in the pool, [L]."""
    sizes_L = np.array(sizes_of_layers(config, max_length), np.int32)
    sliding_L = np.array([kind == HYBRID_SLIDING for kind in config.layer_types])
    window_L = np.where(sliding_L, config.sliding_window or 0, max_length).astype(np.int32)
    # Layers lie one after the other: each begins where those before it end.
    return LayerSlots(*(jnp.asarray(a) for a in (np.cumsum(sizes_L) - sizes_L, sizes_L, window_L)))


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
      segments_BT: 0 marks padding; only on an empty cache.
    """
    sizes = tuple(sorted(set(sizes_of_layers(config, cache.max_length))))
    implementation = execution.implementation_of("decode")
    if q_BTNH.shape[1] == 1:
        # Written first, so that the token finds itself: it only overtakes a key that has left its window.
        pool = _write(pool, k_BTKH, v_BTKH, layer, cache)
        read = functools.partial(_attend_to_slots, implementation, q_BTNH, pool, layer, cache)
        return _for_size(read, layer, sizes), pool
    if cache.empty:  # static: a prompt is read as in training, and no slot of an empty ring is looked at
        out = attend_within(config, execution, q_BTNH, k_BTKH, v_BTKH, layer.window, segments_BT)
        return out, _write(pool, k_BTKH, v_BTKH, layer, cache)
    # The chunk's own writes may overtake keys that its first queries still need: read first.
    chunk = q_BTNH, k_BTKH, v_BTKH
    read = functools.partial(_attend_to_slots_and_chunk, implementation, chunk, pool, layer, cache)
    return _for_size(read, layer, sizes), _write(pool, k_BTKH, v_BTKH, layer, cache)


def _for_size(read: Callable[[int], jax.Array], layer: LayerSlots, sizes: tuple[int, ...]) -> jax.Array:
    """Runs `read(size)` for the layer's size, of the few that layers have."""
    if len(sizes) == 1:
        return read(sizes[0])
    # A slice's size is part of the program, and layers of a scan share one: a branch for each size. The
    # default search would loop, at more cost than the comparison with two numbers.
    which = jnp.searchsorted(jnp.array(sizes), layer.size, method="compare_all")
    return lax.switch(which, [functools.partial(read, size) for size in sizes])


def _attend_to_slots(
    implementation: str | None, q_B1NH: jax.Array, pool: Pool, layer: LayerSlots, cache: Cache, size: int
) -> jax.Array:
    """Attention of the newest token, itself among the slots."""
    keys, values = _slots_of(pool, layer, size)
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
    size: int,
) -> jax.Array:
    """Attention of a chunk to the tokens before it, oldest first, and to itself."""
    q_BTNH, *new = chunk
    time = q_BTNH.shape[1]
    # A ring begins anywhere. In the order of its tokens, causality and windows are those of any sequence.
    in_order_S = (cache.length + jnp.arange(size)) % size
    keys, values = (
        jnp.concatenate([part[:, in_order_S].astype(x.dtype), x], 1)
        for part, x in zip(_slots_of(pool, layer, size), new, strict=True)
    )
    token_S = cache.length - size + jnp.arange(size + time)
    is_token_BS = (token_S >= cache.first_B[:, None]).astype(jnp.int32)  # neither padding nor an empty slot
    out_BTNH, _ = flash_attention(
        q_BTNH,
        keys,
        values,
        window=layer.window,
        query_start=size,
        query_segments_BT=jnp.ones(q_BTNH.shape[:2], jnp.int32),
        key_segments_BS=is_token_BS,
        implementation=implementation,
    )
    return out_BTNH


def _slots_of(pool: Pool, layer: LayerSlots, size: int) -> tuple[jax.Array, jax.Array]:
    keys, values = (lax.dynamic_slice_in_dim(part, layer.first, size, axis=1) for part in pool)
    return keys, values


def _write(pool: Pool, k_BTKH: jax.Array, v_BTKH: jax.Array, layer: LayerSlots, cache: Cache) -> Pool:
    """Writes the chunk's last tokens, as many as the layer keeps."""
    keys, values = ((part, new.astype(part.dtype)) for part, new in zip(pool, (k_BTKH, v_BTKH), strict=True))
    time = k_BTKH.shape[1]
    if time == 1:  # one place for all sequences, which are padded on the left: a slice, and no scatter
        at = (0, layer.first + cache.length % layer.size, 0, 0)
        return lax.dynamic_update_slice(*keys, at), lax.dynamic_update_slice(*values, at)
    age_T = time - jnp.arange(time)
    slot_T = layer.first + (cache.length + jnp.arange(time)) % layer.size
    # A chunk longer than the ring would write slots twice, and of such writes any may come last: those that
    # are overtaken go beyond the pool, where they are dropped.
    slot_T = jnp.where(age_T > layer.size, pool[0].shape[1], slot_T)
    return tuple(part.at[:, slot_T].set(new, mode="drop") for part, new in (keys, values))  # pyright: ignore
