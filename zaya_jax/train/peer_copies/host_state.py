"""A process's part of a train state as bytes on the host: each distinct shard of its devices once."""

import dataclasses
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zaya_jax.config import Config
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.pytree import abstract
from zaya_jax.train.extensions import Extensions
from zaya_jax.train.step.state import TrainState, abstract_state, make_setup, shardings

_Index = tuple[tuple[int, int], ...]
"""Start and stop of a shard along each axis of its array."""


@dataclasses.dataclass(frozen=True)
class CopyLayout:
    """The arrays of a run's copies, without their values.

    Attributes:
      state: shapes, types and shardings.
      mesh: devices of the run.
      num_bytes: bytes of this process's part.
      fingerprint: hash that is equal if shards of all processes have the same names, types and places.
    """

    state: TrainState
    mesh: Mesh
    num_bytes: int
    fingerprint: str


def copy_layout(config: Config, mesh: Mesh, extensions: Extensions) -> CopyLayout:
    """Returns the layout of a run's copies on a mesh."""
    optimizer, schedule = extensions.optimizer, learning_rate_schedule(config)
    # Any phase's setup: the structure of the state is the same in all of them.
    setup = make_setup(config.phase_at(1).config, mesh.size, schedule, optimizer=optimizer)
    state = abstract_state(config, setup, mesh)
    # Keys as plain numbers, and no checksums: `sealed` computes those of a restored state.
    plain = jax.eval_shape(_plain, state)
    plain = abstract(plain, shardings(plain, mesh))
    leaves = jax.tree.leaves_with_path(plain)
    lines = [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype} {x.sharding.spec}" for path, x in leaves]
    lines.append(str([device.process_index for device in mesh.devices.flat]))
    num_bytes = sum(_shard_bytes(x, index) for _, x in leaves for index in _own_indices(x))
    fingerprint = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    return CopyLayout(state, mesh, num_bytes, fingerprint)


def _plain(state: TrainState) -> TrainState:
    return dataclasses.replace(state, key=jax.random.key_data(state.key), integrity=None)


def own_parts(state: TrainState) -> list[np.ndarray]:
    """Copies this process's shards to the host, and returns them as arrays of bytes, in a fixed order.

    Returns when the copies are complete, so that the next step may donate the state.
    """
    shards = []
    for leaf in jax.tree.leaves(_plain(state)):
        by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
        shards += [by_device[devices[0]] for devices in _own_indices(leaf).values()]
    for shard in shards:
        shard.copy_to_host_async()  # all transfers at once
    # A copy, because on a CPU the array on the host would be the memory that the next step reuses.
    return [np.array(shard).reshape(-1).view(np.uint8) for shard in shards]


def place_parts(layout: CopyLayout, content: memoryview) -> TrainState:
    """Places the bytes of `own_parts` on the devices of this process; all processes must call it.

    Args:
      layout: layout of the run's copies.
      content: content of this process's copy.
    """
    plain = jax.eval_shape(_plain, layout.state)
    offset, arrays = 0, []
    leaves, structure = jax.tree.flatten(abstract(plain, shardings(plain, layout.mesh)))
    # In the order of `own_parts`: both walk the same tree, and each array's shards by device.
    for leaf in leaves:
        placed = []
        for index, devices in _own_indices(leaf).items():
            size = _shard_bytes(leaf, index)
            part = np.frombuffer(content[offset : offset + size], leaf.dtype)
            part = part.reshape([stop - start for start, stop in index])
            # Not the mapped file itself, which a CPU device would use as its memory.
            placed += [jax.device_put(part, device, may_alias=False) for device in devices]
            offset += size
        arrays.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed))
    state = jax.block_until_ready(jax.tree.unflatten(structure, arrays))
    key = jax.random.wrap_key_data(state.key)
    return dataclasses.replace(state, key=key, integrity=_no_checksums(layout.state))


def _no_checksums(like: TrainState) -> Any:
    """Returns arrays of the shapes of a state's checksums, which `sealed` computes."""
    if like.integrity is None:
        return None
    # A program, because `device_put` would first compare the zeros of all processes.
    placed = jax.tree.map(lambda x: x.sharding, like.integrity)

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.integrity)

    return jax.jit(zeros, out_shardings=placed)()


def _own_indices(array: Any) -> dict[_Index, list[Any]]:
    """Returns the distinct shards of an array on this process's devices, and the devices of each."""
    own: dict[_Index, list[Any]] = {}
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    for device in sorted(indices, key=lambda each: each.id):
        slices = zip(indices[device], array.shape, strict=True)
        index = tuple(each.indices(size)[:2] for each, size in slices)
        own.setdefault(index, []).append(device)
    return own


def _shard_bytes(array: Any, index: _Index) -> int:
    return math.prod(stop - start for start, stop in index) * array.dtype.itemsize
