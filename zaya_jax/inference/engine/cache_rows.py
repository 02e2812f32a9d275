"""Rows of a cache: allocation, slices, and the blocks of tokens that requests share.

Letters: B rows, T tokens of a block, L layers, K key/value heads, H head width.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zaya_jax.config import ModelConfig
from zaya_jax.model.cache import Cache, Padding, init_cache, kept_slots, layer_slots
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import REPLICATED, SLOTS, context_mesh, named_shardings, replicated_like
from zaya_jax.pytree import pytree


@pytree
class CachedBlock:
    """Keys, values and state of a block of tokens, copied from a row."""

    keys_LTKH: Float[Array, "L T K H"]
    values_LTKH: Float[Array, "L T K H"]
    state: Any
    """State of the attention variant after the block, of every layer, without the axis of rows."""


def make_cache(
    model: Zaya,
    variables: Mapping,
    num_rows: int,
    max_length: int,
    *,
    padding: Padding,
    context_devices: int = 1,
) -> Cache:
    """Allocates an empty cache where the weights are.

    Args:
      model: the model.
      variables: its weights. Without `context_devices` the cache is on their devices, whole on each.
      num_rows: B.
      max_length: maximum number of tokens of a row, padding on the left included.
      padding: "left" for rows of one length, "right" for rows that each have a length.
      context_devices: number of devices that share the cache.
    """
    config, dtype = model.config, model.execution.dtype
    if context_devices > 1:
        assert padding == "left", "devices share a cache of rows of one length"
        return _make_shared_cache(config, num_rows, max_length, dtype, context_devices)
    leaf = jax.tree.leaves(variables)[0]
    # NumPy weights go to the default device, as the cache does.
    sharding = replicated_like(leaf) if isinstance(leaf, jax.Array) else None
    return _allocator(config, num_rows, max_length, dtype, padding, sharding)()


@functools.cache
def _allocator(
    config: ModelConfig, num_rows: int, max_length: int, dtype: str, padding: Padding, sharding: Any
) -> Callable[[], Cache]:
    """Returns a compiled function that allocates a cache on the devices of a sharding."""
    allocate = functools.partial(_empty_cache, config, num_rows, max_length, dtype, padding)
    # With a sharding the cache is committed to its devices, as the results of compiled functions are. JAX
    # compiles a function again for an argument that becomes committed, and the first request would wait for
    # that. Inside of jit, so that devices of other processes allocate their copies too.
    return jax.jit(allocate) if sharding is None else jax.jit(allocate, out_shardings=sharding)


def _empty_cache(config: ModelConfig, num_rows: int, max_length: int, dtype: str, padding: Padding) -> Cache:
    cache = init_cache(config, num_rows, max_length, dtype)
    if padding == "left":
        return cache
    length_B = jnp.zeros((num_rows,), jnp.int32)
    return dataclasses.replace(cache, length=length_B, empty=False, padding="right")


@functools.partial(jax.jit, static_argnames=("config", "num_rows", "max_length", "dtype", "context_devices"))
def _make_shared_cache(
    config: ModelConfig, num_rows: int, max_length: int, dtype: str, context_devices: int
) -> Cache:
    # Compiled, so that no device ever has the whole cache: it may be larger than one device's memory.
    cache = init_cache(config, num_rows, max_length, dtype, ranks=context_devices)
    # Prompts are read in chunks, and every chunk, the first included, is to be the same program.
    cache = dataclasses.replace(cache, empty=False)
    specs = dataclasses.replace(jax.tree.map(lambda _: REPLICATED, cache), pool=(SLOTS, SLOTS))
    return lax.with_sharding_constraint(cache, named_shardings(specs, context_mesh(context_devices)))


def rows_at(cache: Cache, row_B: Int[Array, " B"]) -> Cache:
    """Returns a cache of the given rows, in their order; a row out of range is empty."""
    # Rows of one length are read together. One row alone is a slice, which is cheaper than a gather.
    if cache.padding == "left" or len(row_B) == 1:
        return rows_of(cache, row_B[0], len(row_B))
    # Zeros out of range, rather than another row: one that has failed may hold NaN.
    pool = tuple(part.at[row_B].get(mode="fill", fill_value=0) for part in cache.pool)
    state = jax.tree.map(lambda x: x.at[:, row_B].get(mode="fill", fill_value=0), cache.state)
    length = cache.length.at[row_B].get(mode="fill", fill_value=0)
    return dataclasses.replace(cache, pool=pool, state=state, length=length, first_B=jnp.zeros_like(row_B))


def with_rows_at(cache: Cache, row_B: Int[Array, " B"], rows: Cache) -> Cache:
    """Returns the cache with the given rows replaced; rows out of range are dropped."""
    if cache.padding == "left" or len(row_B) == 1:
        return with_rows(cache, row_B[0], rows)
    pool = tuple(old.at[row_B].set(new, mode="drop") for old, new in zip(cache.pool, rows.pool, strict=True))
    state = jax.tree.map(lambda x, new: x.at[:, row_B].set(new, mode="drop"), cache.state, rows.state)
    length = cache.length.at[row_B].set(rows.length, mode="drop")
    return dataclasses.replace(cache, pool=pool, state=state, length=length)


def rows_of(cache: Cache, first: jax.Array | int, number: int) -> Cache:
    """Returns a cache of `number` consecutive rows."""
    # A slice of all rows would be a copy.
    if number == len(cache.first_B):
        return cache
    assert cache.padding == "right", "rows of one length are read and generated together"
    pool = tuple(lax.dynamic_slice_in_dim(part, first, number, axis=0) for part in cache.pool)
    state = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, number, axis=1), cache.state)
    length = lax.dynamic_slice_in_dim(cache.length, first, number)
    # Rows with padding on the right begin in the first slot.
    first_B = jnp.zeros((number,), jnp.int32)
    return dataclasses.replace(cache, pool=pool, state=state, length=length, first_B=first_B)


def with_rows(cache: Cache, first: jax.Array | int, rows: Cache) -> Cache:
    """Returns the cache with some consecutive rows replaced."""
    # All rows at once need no copy; XLA updates the donated cache in place.
    if len(rows.first_B) == len(cache.first_B):
        return rows

    def put(whole: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(whole, part, first, axis)

    pool = tuple(put(old, new, 0) for old, new in zip(cache.pool, rows.pool, strict=True))
    state = jax.tree.map(functools.partial(put, axis=1), cache.state, rows.state)
    return dataclasses.replace(cache, pool=pool, state=state, length=put(cache.length, rows.length, 0))


@functools.partial(jax.jit, static_argnames=("config", "time"))
def copy_block(
    config: ModelConfig, cache: Cache, row: Int[Array, ""], length: Int[Array, ""], *, time: int
) -> CachedBlock:
    """Copies the last `time` tokens of a row that has `length` tokens."""
    # The state of the convolutions belongs to the end of the block: copy it right after the block is
    # complete.
    slot_LT = _slots_of_block(config, cache, length - time, time)
    # A ring shorter than the block has lost the oldest tokens; no query can see what is copied for them.
    keys, values = (part.at[row, slot_LT].get(mode="clip") for part in cache.pool)
    return CachedBlock(keys, values, jax.tree.map(lambda x: x[:, row], cache.state))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def paste_block(
    config: ModelConfig, cache: Cache, row: Int[Array, ""], length: Int[Array, ""], block: CachedBlock
) -> Cache:
    """Appends a block to a row of `length` tokens, instead of computing it."""
    slot_LT = _slots_of_block(config, cache, length, block.keys_LTKH.shape[1])
    keys, values = (
        part.at[row, slot_LT].set(new, mode="drop")
        for part, new in zip(cache.pool, (block.keys_LTKH, block.values_LTKH), strict=True)
    )
    state = jax.tree.map(lambda x, new: x.at[:, row].set(new), cache.state, block.state)
    return dataclasses.replace(cache, pool=(keys, values), state=state)


@functools.partial(jax.jit, donate_argnames="cache")
def clear_row(cache: Cache, row: Int[Array, ""]) -> Cache:
    """Sets a row to zero. NaN left in it would reach the next owner: 0 times NaN is NaN."""
    # The row keeps its length: the next owner starts from 0 and overwrites it.
    pool = tuple(part.at[row].set(0) for part in cache.pool)
    state = jax.tree.map(lambda x: x.at[:, row].set(0), cache.state)
    return dataclasses.replace(cache, pool=pool, state=state)


def _slots_of_block(config: ModelConfig, cache: Cache, length: jax.Array, time: int) -> jax.Array:
    """Returns the slots of `time` tokens after `length`, [L, T]; out of range if a ring overwrites them."""
    # Layers have different slots: sliding layers have a ring of the window, the others one slot per token.
    layers = jax.tree.map(lambda x: x[:, None], layer_slots(config, cache.max_length))
    return kept_slots(length, jnp.asarray(time), layers, time, beyond=cache.pool[0].shape[1])
