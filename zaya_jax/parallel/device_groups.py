"""Groups of adjacent devices, of which the first ones get what all devices of the group have.

Groups have the same number of members, and a member has whole processes and whole nodes.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax.parallel.even_sharding import COPY
from zaya_jax.parallel.mesh import CONTEXT, DATA, node_size, with_context

GROUP, MEMBER, NODE, IN_NODE = _AXES = ("group", "member", "node", "in_node")
"""Axes of the devices: groups, the members of a group, the nodes of a member, the devices of a node."""
_AXES_OF = {DATA[0]: (GROUP, MEMBER, NODE), DATA[1]: (IN_NODE,), CONTEXT[0]: (), CONTEXT[1]: ()}
"""The same devices by the axes of a mesh whose sequences are not split."""
_AXES_WITH_COPIES = _AXES_OF | {DATA[0]: (GROUP, MEMBER)}
"""The axes over which devices have different parts of an array with copies."""


def num_groups(num_members: int, limit: int, *, processes: int = 1) -> int:
    """Returns the number of groups of equal size.

    It is the divisor of the number of members with which the first members have about as many processes as
    desired: the ratio is closest to 1. Of a prime number of members each is a group.

    Args:
      num_members: number of members.
      limit: desired maximum of processes that first members have, at least 2. Where all members have no more,
        each member is a group.
      processes: number of processes of a member.
    """
    if num_members * processes <= limit:
        return num_members
    divisors = [count for count in range(num_members, 0, -1) if num_members % count == 0]
    # Orbax refuses arrays that one of several processes has whole.
    usable = [count for count in divisors if count * processes > 1]
    return min(usable, key=lambda count: abs(math.log(count * processes / limit)))


def meshes_of(tree: Any) -> set[Mesh]:
    """Returns the meshes that the arrays of a tree are sharded over."""
    return {_mesh_of(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}


def group_mesh(meshes: Iterable[Mesh], limit: int) -> Mesh | None:
    """Returns the devices of a run by their groups, [groups, members, nodes, devices of a node].

    Args:
      meshes: meshes of all devices of a run. Nodes that have copies in one of them are of one member.
      limit: see `num_groups`.

    Returns:
      The mesh; None if each member is a group, or processes have different numbers of devices.
    """
    meshes = list(meshes)
    mesh, copies = meshes[0], math.lcm(*(each.shape.get(COPY, 1) for each in meshes))
    devices = with_context(mesh, 1).devices.reshape(-1, node_size(mesh))
    counts = set(Counter(device.process_index for device in devices.flat).values())
    if len(counts) > 1:
        return None
    (of_process,) = counts
    of_member = math.lcm(of_process, node_size(mesh) * copies)
    num_members = mesh.size // of_member
    groups = num_groups(num_members, limit, processes=of_member // of_process)
    return None if groups == num_members else _by_groups(devices, groups, of_member)


def _by_groups(devices: np.ndarray, groups: int, of_member: int) -> Mesh:
    _, in_node = devices.shape
    return Mesh(devices.reshape(groups, -1, of_member // in_node, in_node), _AXES)


def first_members(by_groups: Mesh) -> Mesh:
    """Returns the devices of the first member of each group, [groups, 1, nodes, devices of a node]."""
    return Mesh(by_groups.devices[:, :1], _AXES)


def gather_in_groups(tree: Any, by_groups: Mesh) -> Any:
    """Moves arrays to the devices of `first_members`; all processes must call it together.

    A device receives about what all members of its group have, divided by the devices of a member.

    Args:
      tree: arrays on all devices of the mesh, sharded over nodes, over the devices of a node, over all, or
        not at all; others are returned unchanged.
      by_groups: the same devices, as from `group_mesh`.

    Returns:
      The tree. In processes of other members, arrays in it have no parts.

    Raises:
      ValueError: if an array is sharded in another way.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    specs = [_spec_by_groups(array) for array in arrays]
    arrays = [_relabeled(array, by_groups, spec) for array, spec in zip(arrays, specs, strict=True)]
    final = [_final_spec(spec, array.shape, by_groups) for spec, array in zip(specs, arrays, strict=True)]
    program = _gathering(by_groups, tuple(map(_gathered_spec, specs)), tuple(final))
    there = first_members(by_groups)
    # On CPUs a train step that begins meanwhile would share the threads of this program's collectives.
    gathered = iter([_only_on(there, array) for array in jax.block_until_ready(program(arrays))])
    return structure.unflatten([next(gathered) if isinstance(x, jax.Array) else x for x in leaves])


def _spec_by_groups(array: jax.Array) -> PartitionSpec:
    """Returns the partition spec of an array by the axes of groups."""
    axes_of = _AXES_WITH_COPIES if COPY in _mesh_of(array).axis_names else _AXES_OF
    entries = map(_names, _spec_of(array))
    return PartitionSpec(*(tuple(axis for name in entry for axis in axes_of[name]) for entry in entries))


def _relabeled(array: jax.Array, by_groups: Mesh, spec: PartitionSpec) -> jax.Array:
    """Returns an array with the same parts on the same devices, whose sharding has the axes of groups."""
    if COPY in _mesh_of(array).axis_names:
        # A member may have several of its parts, each on several nodes, for which no spec has a name.
        return array
    sharding = NamedSharding(by_groups, spec)
    if not array.sharding.is_equivalent_to(sharding, array.ndim):
        raise ValueError(f"an array is sharded by {_spec_of(array)}, which has no equal by groups")
    return _from_parts(array, sharding)


def _mesh_of(array: jax.Array) -> Mesh:
    return cast(Mesh, cast(NamedSharding, array.sharding).mesh)


def _spec_of(array: jax.Array) -> PartitionSpec:
    return cast(NamedSharding, array.sharding).spec


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _gathered_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns the partition spec when all devices of a group have what any of them had."""
    # The axes within a member that follow are removed too: adjacent devices have adjacent parts, so that this
    # is one all-gather. Each device then keeps a part of the result.
    entries = map(_names, spec)
    return PartitionSpec(*(entry[: entry.index(MEMBER)] if MEMBER in entry else entry for entry in entries))


def _final_spec(spec: PartitionSpec, shape: tuple[int, ...], by_groups: Mesh) -> PartitionSpec:
    """Returns the partition spec at the end: each device of a member has a part of what its group has."""
    if any(map(_names, spec)):
        return PartitionSpec(*(tuple(axis for axis in _names(entry) if axis != MEMBER) for entry in spec))
    # All devices have all of it: each keeps a part, if they divide a dimension.
    count = first_members(by_groups).size
    axis = next((axis for axis, size in enumerate(shape) if size and size % count == 0), None)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, (GROUP, NODE, IN_NODE))


@functools.lru_cache(maxsize=4)  # one structure per run, and a second one in a notebook
def _gathering(
    by_groups: Mesh, gathered: tuple[PartitionSpec, ...], final: tuple[PartitionSpec, ...]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Compiles the program that gathers arrays in groups."""

    def gather(arrays: list[jax.Array]) -> list[jax.Array]:
        shardings = [NamedSharding(by_groups, spec) for spec in gathered]
        return [
            lax.with_sharding_constraint(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)
        ]

    # Not donated: training continues with the state that is saved.
    return jax.jit(gather, out_shardings=[NamedSharding(by_groups, spec) for spec in final])


def _only_on(there: Mesh, array: jax.Array) -> jax.Array:
    """Returns an array without its copies on other devices than those of first members."""
    return _from_parts(array, NamedSharding(there, _spec_of(array)))


def _from_parts(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    devices = sharding.device_set
    parts = [shard.data for shard in array.addressable_shards if shard.device in devices]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts, dtype=array.dtype)
