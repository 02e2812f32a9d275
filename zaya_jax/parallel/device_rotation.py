"""Arrays on the same devices in other roles, so that another device repeats each part of a computation."""

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zaya_jax.parallel.mesh import ALL, named_shardings, on_each_device


def rotated_mesh(mesh: Mesh) -> Mesh | None:
    """Returns the mesh with its devices rotated by nearly half of the processes; None for a single device.

    In a single process devices are rotated by nearly half of their number. Processes keep adjacent devices.
    """
    devices = mesh.devices.reshape(-1)
    if len(devices) == 1:
        return None
    # Whole processes, so that each part of a sequence or a node stays together.
    num_processes = len({device.process_index for device in devices})
    parts = num_processes if num_processes > 1 else len(devices)
    # By less than a half of three or more: otherwise two devices would swap their roles, and a fault of one
    # could not be told from a fault of the other.
    shift = max((parts - 1) // 2, 1) * (len(devices) // parts)
    rotated = np.roll(devices, shift)
    return Mesh(rotated.reshape(mesh.devices.shape), mesh.axis_names)


def rotate(tree: Any, specs: Any, mesh: Mesh, rotated: Mesh) -> Any:
    """Moves arrays to the devices that have their place in the rotated mesh.

    Args:
      tree: arrays on the mesh.
      specs: their partition specs, or a prefix of that tree.
      mesh: devices of the arrays.
      rotated: mesh of the result, from `rotated_mesh`.
    """
    places = {device: place for place, device in enumerate(mesh.devices.reshape(-1))}
    moves = [(place, places[device]) for place, device in enumerate(rotated.devices.reshape(-1))]

    def move(tree: Any) -> Any:
        return jax.tree.map(lambda x: lax.ppermute(x, ALL, moves), tree)

    # Between devices: in a run of several processes no host has all arrays.
    program = jax.jit(
        on_each_device(move, mesh, in_specs=(specs,), out_specs=specs),
        out_shardings=named_shardings(specs, mesh),
    )
    return jax.tree.map(lambda x: _in_mesh(x, rotated), program(tree))


def _in_mesh(array: jax.Array, rotated: Mesh) -> jax.Array:
    """Returns an array whose parts are on the right devices already, as an array of the rotated mesh."""
    assert isinstance(array.sharding, NamedSharding)
    sharding = NamedSharding(rotated, array.sharding.spec)
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)
