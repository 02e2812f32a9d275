"""How the buckets of an optimiser lie on the devices, and how they are gathered and summed.

What must pass between nodes goes between devices of one number in their nodes, each with a part of what its
node has: so all NICs of a node carry something, and none carries what another one of its node does.
"""

import enum
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax.parallel.mesh import (
    ALL,
    IN_NODE,
    NODES,
    SHARDED,
    SHARDED_BY_NODE,
    all_gather,
    reduce_scatter,
    size_of,
)
from zaya_jax.parallel.node import num_sharers, sum_shards


class BucketLayout(enum.Enum):
    """Who has what of a bucket [U, ...]."""

    ALL_DEVICES = enum.auto()
    """Each device has an equal share of U."""
    OWN_EXPERTS = enum.auto()
    """Each device of a node has another bucket, and shares its U with those of its number."""
    ROWS_IN_NODE = enum.auto()
    """Each node has an equal share of U, and each of its devices as many rows of each matrix [U, R, C]."""

    @property
    def spec(self) -> PartitionSpec:
        """Of the bucket over all devices."""
        return _SPECS[self]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh that U is shared along."""
        return ALL if self is BucketLayout.ALL_DEVICES else NODES


_SPECS = {
    BucketLayout.ALL_DEVICES: SHARDED,
    BucketLayout.OWN_EXPERTS: SHARDED_BY_NODE,
    BucketLayout.ROWS_IN_NODE: PartitionSpec(NODES, IN_NODE),
}


def gather_buckets(own: Mapping[str, jax.Array], layouts: Mapping[str, BucketLayout]) -> dict[str, jax.Array]:
    """Buckets by name of which this device has its shares, whole; of the experts its own.

    Args:
      own: its shares.
      layouts: of the buckets, by name.
    """
    if num_sharers() == 1:
        return all_gather(dict(own))
    experts = {name: x for name, x in own.items() if layouts[name] is BucketLayout.OWN_EXPERTS}
    rest = {name: x for name, x in own.items() if name not in experts}
    return {name: all_gather(x, NODES) for name, x in experts.items()} | {
        name: _gather_in_node(x, layouts[name]) for name, x in _gather_together(rest).items()
    }


def _gather_together(own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """What each node has of some arrays, [nodes, ...]: a message for each type.

    What goes around many nodes takes long, however little it is.
    """
    found = {}
    for names in _by_dtype(own):
        sent = lax.all_gather(jnp.concatenate([own[name].reshape(-1) for name in names]), NODES)
        ends = list(itertools.accumulate(own[name].size for name in names))
        for name, part in zip(names, jnp.split(sent, ends[:-1], axis=1), strict=True):
            found[name] = part.reshape(-1, *own[name].shape)
    return found


def _gather_in_node(of_nodes: jax.Array, layout: BucketLayout) -> jax.Array:
    """A whole bucket, of what the devices of this number have of it, [nodes, ...]."""
    if layout is BucketLayout.ROWS_IN_NODE:
        return gather_rows(of_nodes.reshape(-1, *of_nodes.shape[2:]))
    whole = lax.all_gather(of_nodes, IN_NODE, axis=1)
    return whole.reshape(-1, *of_nodes.shape[2:])


def sum_buckets(
    buckets: Mapping[str, jax.Array], layouts: Mapping[str, BucketLayout]
) -> dict[str, jax.Array]:
    """The sums of all devices' gradients in some buckets, of which each keeps its shares, float32.

    Args:
      buckets: by name, whole; of the experts this device's own, summed in the node.
      layouts: of them, by name.
    """
    if num_sharers() == 1:
        return {name: reduce_scatter(x) for name, x in buckets.items()}
    experts = {name: x for name, x in buckets.items() if layouts[name] is BucketLayout.OWN_EXPERTS}
    rest = {name: x for name, x in buckets.items() if name not in experts}
    found = {name: sum_shards(x, NODES) for name, x in experts.items()}
    for names in _by_dtype(rest):
        parts = {name: _by_device(rest[name], layouts[name]) for name in names}
        flat = [part.reshape(*part.shape[:2], -1) for part in parts.values()]
        summed = _sum_in_node_first(jnp.concatenate(flat, axis=2))
        ends = list(itertools.accumulate(part.shape[2] for part in flat))
        for (name, part), own in zip(parts.items(), jnp.split(summed, ends[:-1]), strict=True):
            found[name] = own.reshape(part.shape[2:])
    return found


def _by_dtype(arrays: Mapping[str, jax.Array]) -> list[list[str]]:
    """Names of arrays of one type each, in order."""
    found: dict[Any, list[str]] = {}
    for name, x in arrays.items():
        found.setdefault(x.dtype, []).append(name)
    return list(found.values())


def _by_device(x: jax.Array, layout: BucketLayout) -> jax.Array:
    """A bucket as [devices of a node, nodes, ...]: what each device has of it."""
    nodes, sharers = lax.axis_size(NODES), num_sharers()
    if layout is BucketLayout.ROWS_IN_NODE:
        slots, rows, columns = x.shape
        of_devices = x.reshape(nodes, slots // nodes, sharers, rows // sharers, columns)
        return of_devices.transpose(2, 0, 1, 3, 4)
    return x.reshape(nodes, sharers, -1, *x.shape[1:]).swapaxes(0, 1)


def _sum_in_node_first(parts: jax.Array) -> jax.Array:
    """This device's sum [X], float32, of [devices of a node, nodes, X] on each."""
    # Else each NIC would carry what its node could have added up: so many times as much.
    (in_node,) = sum_shards(parts, IN_NODE)
    (total,) = sum_shards(in_node.astype(parts.dtype), NODES)
    return total


def gather_rows(own_URC: jax.Array) -> jax.Array:
    """Whole matrices, of which each device of a node has as many rows."""
    return lax.all_gather(own_URC, IN_NODE, axis=1, tiled=True) if num_sharers() > 1 else own_URC


def own_rows(matrices_URC: jax.Array) -> jax.Array:
    """This device's rows of matrices: `gather_rows` undone."""
    count = matrices_URC.shape[1] // num_sharers()
    return lax.dynamic_slice_in_dim(matrices_URC, lax.axis_index(IN_NODE) * count, count, axis=1)


def by_columns(bucket: jax.Array, layout: BucketLayout, mesh: Mesh) -> jax.Array:
    """A bucket over all devices: where devices have rows, each node gets columns of all matrices.

    Any other bucket, and one whose columns do not divide by the nodes, stays as it lies.
    """
    if layout is not BucketLayout.ROWS_IN_NODE or bucket.shape[-1] % size_of(mesh, NODES):
        return bucket
    columns = NamedSharding(mesh, PartitionSpec(None, IN_NODE, NODES))
    return lax.with_sharding_constraint(bucket, columns)
