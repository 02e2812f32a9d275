"""Processes of a large run that write its checkpoints, and how they get what others have.

Each process that writes costs process 0 an index to merge and files to list, and the file system thousands of
small files. In runs with more processes than `train.checkpoint_writers`, groups of adjacent processes
therefore gather their shards first, and one process of each group writes them.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax.parallel.mesh import CONTEXT, DATA, node_size, with_context

GROUP, MEMBER, NODE, IN_NODE = _AXES = ("group", "member", "node", "in_node")
"""Axes of the devices: groups that gather their shards; in a group, members of which the first one writes; in
a member, which has whole processes and nodes, its nodes; in a node, its devices."""
_AXES_OF = {DATA[0]: (GROUP, MEMBER, NODE), DATA[1]: (IN_NODE,), CONTEXT[0]: (), CONTEXT[1]: ()}
"""The same devices by the axes of a mesh whose sequences are not split."""


def num_groups(num_members: int, limit: int, *, processes: int = 1) -> int:
    """Returns the number of groups, each of which has as many members.

    It is the divisor of the number of members with which the number of writers is closest to the limit, by
    their ratio. Of a prime number of members all write.

    Args:
      num_members: number of members.
      limit: desired maximum of writers, at least 2; with fewer processes each of them is a group.
      processes: number of processes of a member, all of which write.
    """
    if num_members * processes <= limit:
        return num_members
    divisors = [count for count in range(num_members, 0, -1) if num_members % count == 0]
    # Orbax refuses arrays that one of several processes has whole.
    usable = [count for count in divisors if count * processes > 1]
    return min(usable, key=lambda count: abs(math.log(count * processes / limit)))


def group_mesh(mesh: Mesh, limit: int) -> Mesh | None:
    """Returns the devices of a mesh by their groups, [groups, members, nodes, devices of a node].

    Args:
      mesh: all devices of a run.
      limit: desired maximum of processes that write.

    Returns:
      The mesh; None if every process writes.
    """
    devices = with_context(mesh, 1).devices.reshape(-1, node_size(mesh))
    counts = set(Counter(device.process_index for device in devices.flat).values())
    if len(counts) > 1:
        # No group could have whole processes.
        return None
    (of_process,) = counts
    of_member = math.lcm(of_process, node_size(mesh))
    num_members = mesh.size // of_member
    groups = num_groups(num_members, limit, processes=of_member // of_process)
    return None if groups == num_members else _by_groups(devices, groups, of_member)


def _by_groups(devices: np.ndarray, groups: int, of_member: int) -> Mesh:
    _, in_node = devices.shape
    return Mesh(devices.reshape(groups, -1, of_member // in_node, in_node), _AXES)


def move_to_writers(tree: Any, limit: int | None) -> Any:
    """Moves arrays to the devices whose processes write them; all processes must call it together.

    Args:
      tree: arrays of a run on all devices.
      limit: desired maximum of processes that write; None for all.

    Returns:
      The tree; in processes that do not write, without parts of any array.
    """
    if limit is None or jax.process_count() <= limit:
        return tree
    mesh = next(leaf.sharding.mesh for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    by_groups = group_mesh(mesh, limit)
    return tree if by_groups is None else gather_in_groups(tree, by_groups)


def has_parts(tree: Any) -> bool:
    """Whether this process has a part of any array, which it writes."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return not arrays or any(array.addressable_shards for array in arrays)


def writing_mesh(by_groups: Mesh) -> Mesh:
    """Returns the devices whose processes write: those of the first member of each group."""
    return Mesh(by_groups.devices[:, :1], _AXES)


def gather_in_groups(tree: Any, by_groups: Mesh) -> Any:
    """Moves arrays to the devices of `writing_mesh`; all processes must call it together.

    A device receives about what all members of its group have, divided by the devices of a member.

    Args:
      tree: arrays on all devices of the mesh, sharded over nodes, over the devices of a node, over all, or
        not at all; others are returned unchanged.
      by_groups: the same devices, as from `group_mesh`.

    Returns:
      The tree. Arrays in it have no parts in processes that do not write.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [_relabeled(leaf, by_groups) for leaf in leaves if isinstance(leaf, jax.Array)]
    specs = [_spec_of(array) for array in arrays]
    final = [_final_spec(spec, array.shape, by_groups) for spec, array in zip(specs, arrays, strict=True)]
    program = _gathering(by_groups, tuple(map(_gathered_spec, specs)), tuple(final))
    gathered = iter(map(_of_writers, program(arrays)))
    return structure.unflatten([next(gathered) if isinstance(x, jax.Array) else x for x in leaves])


def _relabeled(array: jax.Array, by_groups: Mesh) -> jax.Array:
    """Returns an array with the same parts on the same devices, whose sharding has the axes of groups."""
    entries = [_names(entry) for entry in _spec_of(array)]
    spec = PartitionSpec(*(tuple(new for name in entry for new in _AXES_OF[name]) for entry in entries))
    sharding = NamedSharding(by_groups, spec)
    if not array.sharding.is_equivalent_to(sharding, array.ndim):
        raise ValueError(f"an array is sharded by {_spec_of(array)}, which has no equal by groups")
    return _from_parts(array, sharding)


def _spec_of(array: jax.Array) -> PartitionSpec:
    return cast(NamedSharding, array.sharding).spec


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _gathered_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns the partition spec when all devices of a group have what any of them had."""
    # Also without the axes within a member that follow: what adjacent devices have is adjacent, so that this
    # is one all-gather.
    entries = map(_names, spec)
    return PartitionSpec(*(entry[: entry.index(MEMBER)] if MEMBER in entry else entry for entry in entries))


def _final_spec(spec: PartitionSpec, shape: tuple[int, ...], by_groups: Mesh) -> PartitionSpec:
    """Returns the partition spec of what is written: shared by the devices of a member."""
    if any(map(_names, spec)):
        return PartitionSpec(*(tuple(axis for axis in _names(entry) if axis != MEMBER) for entry in spec))
    # All devices have all of it: each writes a part, if they divide a dimension.
    count = writing_mesh(by_groups).size
    axis = next((axis for axis, size in enumerate(shape) if size and size % count == 0), None)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, (GROUP, NODE, IN_NODE))


@functools.lru_cache(maxsize=4)  # one structure per run, and a second one in a notebook
def _gathering(by_groups: Mesh, gathered: Iterable[PartitionSpec], final: Iterable[PartitionSpec]) -> Any:
    """Compiles the program that gathers arrays in groups. The arguments are hashable: they are its key."""

    def gather(arrays: list[jax.Array]) -> list[jax.Array]:
        shardings = [NamedSharding(by_groups, spec) for spec in gathered]
        return [
            lax.with_sharding_constraint(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)
        ]

    # Not donated: training continues with the state that is saved.
    return jax.jit(gather, out_shardings=[NamedSharding(by_groups, spec) for spec in final])


def _of_writers(array: jax.Array) -> jax.Array:
    """Returns an array without its copies on devices that do not write."""
    sharding = cast(NamedSharding, array.sharding)
    return _from_parts(array, NamedSharding(writing_mesh(sharding.mesh), sharding.spec))


def _from_parts(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    devices = sharding.device_set
    parts = [shard.data for shard in array.addressable_shards if shard.device in devices]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts, dtype=array.dtype)
