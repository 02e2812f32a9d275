"""What decoding keeps of the tokens so far: keys and values, and CCA's few tokens of lookback.

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
from jaxtyping import Array, Float, Int

from zaya_jax.config import HYBRID_SLIDING, ExecutionConfig, ModelConfig
from zaya_jax.model.attention import attend, attend_single, attention_mask
from zaya_jax.model.cca import CcaState
from zaya_jax.model.kernels import attend_to_cache
from zaya_jax.pytree import pytree, static

Pool = tuple[Float[Array, "B Z K H"], Float[Array, "B Z K H"]]
"""Rotated keys, and values."""


@pytree
class Cache:
    """Decode state of a batch of sequences."""

    pool: Pool
    """Of all layers."""
    cca: CcaState
    """Of every layer, with a leading axis L."""
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
    ring = min(config.sliding_window or max_length, max_length)
    return tuple(ring if kind == HYBRID_SLIDING else max_length for kind in config.layer_types)


def init_cache(
    config: ModelConfig, batch_size: int, max_length: int, dtype: Any = ExecutionConfig.dtype
) -> Cache:
    """An empty cache.

    Args:
      config: the network's.
      batch_size: B.
      max_length: tokens that must fit, prompt, padding and answer together.
      dtype: of keys and values; `ExecutionConfig.dtype` of the network loses nothing, and its default is
        the default here. The convolution's tail and the delayed value are float32 always (facts 1.3).

    Raises:
      ValueError: if no token fits.
    """
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; the cache must hold at least 1 token")
    num_slots = sum(sizes_of_layers(config, max_length))
    pool = (batch_size, num_slots, config.num_key_value_heads, config.head_dim)
    return Cache(
        pool=(jnp.zeros(pool, dtype), jnp.zeros(pool, dtype)),
        cca=empty_cca_state(config, batch_size),
        length=jnp.zeros((), jnp.int32),
        first_B=jnp.zeros((batch_size,), jnp.int32),
        max_length=max_length,
        empty=True,
    )


def empty_cca_state(config: ModelConfig, batch_size: int) -> CcaState:
    """The state before the first token, of every layer: zeros with a leading axis L."""
    heads, width, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    latent = (config.num_attention_heads + heads) * width
    return CcaState(
        tail_BWC=jnp.zeros((layers, batch_size, config.conv_tail, latent), jnp.float32),
        delayed_BU=jnp.zeros((layers, batch_size, heads * width // 2), jnp.float32),
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
    return LayerSlots(*(jnp.asarray(a) for a in (np.cumsum(sizes_L) - sizes_L, sizes_L, window_L)))


def attend_through_cache(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    pool: Pool,
    layer: LayerSlots,
    cache: Cache,
    *,
    sizes: tuple[int, ...],
    segments_BT: Int[Array, "B T"] | None,
    implementation: str = "xla",
) -> tuple[Float[Array, "B T N H"], Pool]:
    """Attends to all that a chunk may see, and writes its keys and values into the layer's slots.

    Args:
      q_BTNH: rotated queries of the chunk.
      k_BTKH: rotated keys of the chunk.
      v_BTKH: values of the chunk.
      pool: keys and values of all layers.
      layer: the layer's part of it.
      cache: before the chunk; what it says of tokens holds for all layers.
      sizes: the different sizes that layers have.
      segments_BT: 0 marks padding; only on an empty cache.
      implementation: of a single token's attention: "xla", or "pallas" for a kernel.
    """
    time = q_BTNH.shape[1]
    chunk_T = cache.length + jnp.arange(time)
    if cache.empty and time > 1:
        mask = attention_mask(
            chunk_T, chunk_T, window=layer.window, query_segments_BT=segments_BT, key_segments_BS=segments_BT
        )
        return attend(q_BTNH, k_BTKH, v_BTKH, mask), _write(pool, k_BTKH, v_BTKH, layer, cache)
    if time == 1:
        pool = _write(pool, k_BTKH, v_BTKH, layer, cache)
        attend_to_slots = _attend_to_slots_by_kernel if implementation == "pallas" else _attend_to_slots
        read = functools.partial(attend_to_slots, q_BTNH, pool, layer, cache)
        return _for_size(read, layer, sizes), pool
    # The chunk's own writes may overtake keys that its first queries still need: read first.
    read = functools.partial(_attend_to_slots_and_chunk, q_BTNH, k_BTKH, v_BTKH, pool, layer, cache)
    return _for_size(read, layer, sizes), _write(pool, k_BTKH, v_BTKH, layer, cache)


def _for_size(read: Callable[[int], jax.Array], layer: LayerSlots, sizes: tuple[int, ...]) -> jax.Array:
    """Runs `read(size)` for the layer's size, of the few that layers have."""
    if len(sizes) == 1:
        return read(sizes[0])
    which = jnp.searchsorted(jnp.array(sizes), layer.size, method="compare_all")
    return lax.switch(which, [functools.partial(read, size) for size in sizes])


def _attend_to_slots(q_B1NH, pool: Pool, layer: LayerSlots, cache: Cache, size: int) -> jax.Array:
    index_S = _slot_contents(cache.length + 1, size)
    mask_B1S = _cache_mask(cache, cache.length[None], index_S, layer)
    return attend_single(q_B1NH, *_slots_of(pool, layer, size), mask_B1S)


def _attend_to_slots_by_kernel(q_B1NH, pool: Pool, layer: LayerSlots, cache: Cache, size: int) -> jax.Array:
    tokens = {"length": cache.length + 1, "first_B": cache.first_B, "window": layer.window}
    return attend_to_cache(q_B1NH, *_slots_of(pool, layer, size), **tokens)


def _slots_of(pool: Pool, layer: LayerSlots, size: int) -> tuple[jax.Array, jax.Array]:
    keys, values = (lax.dynamic_slice_in_dim(part, layer.first, size, axis=1) for part in pool)
    return keys, values


def _attend_to_slots_and_chunk(
    q_BTNH, k_BTKH, v_BTKH, pool: Pool, layer: LayerSlots, cache: Cache, size: int
) -> jax.Array:
    chunk_T = cache.length + jnp.arange(q_BTNH.shape[1])
    mask = _cache_mask(cache, chunk_T, jnp.concatenate([_slot_contents(cache.length, size), chunk_T]), layer)
    keys, values = (
        jnp.concatenate([part, new.astype(part.dtype)], 1)
        for part, new in zip(_slots_of(pool, layer, size), (k_BTKH, v_BTKH), strict=True)
    )
    return attend(q_BTNH, keys, values, mask)


def _slot_contents(length: jax.Array, size: int) -> jax.Array:
    """Index of the token that lies in each slot of a ring after `length` tokens; negative for none."""
    return length - 1 - (length - 1 - jnp.arange(size)) % size


def _cache_mask(cache: Cache, query_T: jax.Array, key_S: jax.Array, layer: LayerSlots) -> jax.Array:
    is_token_BS = (key_S[None, :] >= cache.first_B[:, None]).astype(jnp.int32)
    queries_BT = jnp.ones((cache.first_B.shape[0], query_T.shape[0]), jnp.int32)
    return attention_mask(
        query_T, key_S, window=layer.window, query_segments_BT=queries_BT, key_segments_BS=is_token_BS
    )


def _write(pool: Pool, k_BTKH: jax.Array, v_BTKH: jax.Array, layer: LayerSlots, cache: Cache) -> Pool:
    """Writes the chunk's last tokens, as many as the layer keeps."""
    keys, values = ((part, new.astype(part.dtype)) for part, new in zip(pool, (k_BTKH, v_BTKH), strict=True))
    time = k_BTKH.shape[1]
    if time == 1:
        at = (0, layer.first + cache.length % layer.size, 0, 0)
        return lax.dynamic_update_slice(*keys, at), lax.dynamic_update_slice(*values, at)
    age_T = time - jnp.arange(time)
    slot_T = layer.first + (cache.length + jnp.arange(time)) % layer.size
    slot_T = jnp.where(age_T > layer.size, pool[0].shape[1], slot_T)  # beyond the pool: dropped
    return tuple(part.at[:, slot_T].set(new, mode="drop") for part, new in (keys, values))  # pyright: ignore
