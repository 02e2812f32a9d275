"""Layouts of the optimizer's buckets on the devices, and the collectives that gather and sum them.

Between nodes, data moves only between devices with the same index in their nodes, and each of them sends a
different part of what its node has. So all NICs of a node are used, and no two send the same data.
"""

import enum
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax.parallel.even_sharding import COPY
from zaya_jax.parallel.mesh import (
    ALL,
    IN_NODE,
    NODES,
    SHARDED,
    SHARDED_BY_NODE,
    all_gather,
    gather,
    reduce_scatter,
    size_of,
)
from zaya_jax.parallel.node import num_node_devices, sum_shards


class BucketLayout(enum.Enum):
    """How a bucket of U slots, [U, ...], is divided among the devices."""

    ALL_DEVICES = enum.auto()
    """U is divided among all devices."""
    OWN_EXPERTS = enum.auto()
    """Each device of a node has a different bucket, whose U is divided among devices with the same index."""
    ROWS_IN_NODE = enum.auto()
    """U is divided among the nodes, and the rows of each matrix [U, R, C] among the devices of a node."""

    @property
    def spec(self) -> PartitionSpec:
        """Partition spec of the bucket over all devices."""
        return _SPECS[self]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh over which U is divided."""
        return ALL if self is BucketLayout.ALL_DEVICES else NODES


MESSAGE_BYTES = 64 * 2**20
"""Size from which a message of one GPU to other nodes is large enough: among 128 nodes each message has a
latency of more than a millisecond, in which a NIC sends about as many bytes (`zaya_jax.plan.links`)."""
_SPECS = {
    BucketLayout.ALL_DEVICES: SHARDED,
    BucketLayout.OWN_EXPERTS: SHARDED_BY_NODE,
    BucketLayout.ROWS_IN_NODE: PartitionSpec(NODES, IN_NODE),
}


def gather_buckets(own: Mapping[str, jax.Array], layouts: Mapping[str, BucketLayout]) -> dict[str, jax.Array]:
    """Gathers whole buckets; of buckets of experts only those of this device.

    Args:
      own: this device's shards, by bucket name.
      layouts: layouts of the buckets, by name.
    """
    # Without shared experts every bucket has the layout ALL_DEVICES.
    if num_node_devices() == 1:
        return all_gather(dict(own))
    experts = {name: x for name, x in own.items() if layouts[name] is BucketLayout.OWN_EXPERTS}
    rest = {name: x for name, x in own.items() if name not in experts}
    return {name: all_gather(x, NODES) for name, x in experts.items()} | {
        name: _gather_in_node(x, layouts[name]) for name, x in _gather_across_nodes(rest).items()
    }


def _gather_across_nodes(own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Gathers arrays from devices with the same index in their nodes: [nodes, ...] for each."""
    gathered = {}
    for names in _messages({name: x.nbytes * lax.axis_size(NODES) for name, x in own.items()}, own):
        sent = gather(jnp.concatenate([own[name].reshape(-1) for name in names]), NODES)
        ends = list(itertools.accumulate(own[name].size for name in names))
        for name, part in zip(names, jnp.split(sent, ends[:-1], axis=1), strict=True):
            gathered[name] = part.reshape(-1, *own[name].shape)
    return gathered


def _gather_in_node(shards: jax.Array, layout: BucketLayout) -> jax.Array:
    """Gathers a whole bucket within a node.

    Args:
      shards: shards of the devices with this device's index, [nodes, ...].
      layout: layout of the bucket.
    """
    if layout is BucketLayout.ROWS_IN_NODE:
        return gather_rows(shards.reshape(-1, *shards.shape[2:]))
    whole = gather(shards, IN_NODE, axis=1)
    return whole.reshape(-1, *shards.shape[2:])


def sum_buckets(
    buckets: Mapping[str, jax.Array], layouts: Mapping[str, BucketLayout]
) -> dict[str, jax.Array]:
    """Sums gradients over all devices; each device keeps its shards of the sums, float32.

    Args:
      buckets: whole buckets of gradients, by name; buckets of experts are those of this device, already
        summed over its node.
      layouts: layouts of the buckets, by name.
    """
    if num_node_devices() == 1:
        return {name: reduce_scatter(x) for name, x in buckets.items()}
    experts = {name: x for name, x in buckets.items() if layouts[name] is BucketLayout.OWN_EXPERTS}
    rest = {name: x for name, x in buckets.items() if name not in experts}
    sums = {name: sum_shards(x, NODES) for name, x in experts.items()}
    for names in _messages({name: x.nbytes // num_node_devices() for name, x in rest.items()}, rest):
        parts = {name: _by_device(rest[name], layouts[name]) for name in names}
        flat = [part.reshape(*part.shape[:2], -1) for part in parts.values()]
        summed = _sum_in_node_first(jnp.concatenate(flat, axis=2))
        ends = list(itertools.accumulate(part.shape[2] for part in flat))
        for (name, part), own in zip(parts.items(), jnp.split(summed, ends[:-1]), strict=True):
            sums[name] = own.reshape(part.shape[2:])
    return sums


def _messages(sizes: Mapping[str, int], arrays: Mapping[str, jax.Array]) -> list[list[str]]:
    """Names of the arrays that share a message between nodes.

    Args:
      sizes: bytes of each array that a device sends or receives between nodes.
      arrays: the arrays.
    """
    groups: dict[Any, list[str]] = {}
    for name, x in arrays.items():
        # One message per dtype: a collective over many nodes has a high latency, however small its message.
        # A large array has its own, so that others need not wait for the embedding, or for its gradient.
        groups.setdefault(name if sizes[name] >= MESSAGE_BYTES else x.dtype, []).append(name)
    return list(groups.values())


def _by_device(x: jax.Array, layout: BucketLayout) -> jax.Array:
    """Splits a bucket into the shards of all devices, [devices of a node, nodes, ...]."""
    nodes, node_devices = lax.axis_size(NODES), num_node_devices()
    if layout is BucketLayout.ROWS_IN_NODE:
        slots, rows, columns = x.shape
        shards = x.reshape(nodes, slots // nodes, node_devices, rows // node_devices, columns)
        return shards.transpose(2, 0, 1, 3, 4)
    return x.reshape(nodes, node_devices, -1, *x.shape[1:]).swapaxes(0, 1)


def _sum_in_node_first(parts: jax.Array) -> jax.Array:
    """Sums the parts of all devices, [devices of a node, nodes, X] on each, to this device's [X], float32."""
    # Summing within the node first divides the traffic of each NIC by the number of devices of a node.
    (in_node,) = sum_shards(parts, IN_NODE)
    # Back to the dtype of the gradients, so that bfloat16 is sent between nodes and added up in float32.
    (total,) = sum_shards(in_node.astype(parts.dtype), NODES)
    return total


def gather_rows(own_URC: jax.Array) -> jax.Array:
    """Gathers whole matrices from the devices of a node, each of which has an equal part of the rows."""
    return gather(own_URC, IN_NODE, axis=1, tiled=True) if num_node_devices() > 1 else own_URC


def own_rows(matrices_URC: jax.Array) -> jax.Array:
    """Returns this device's rows of matrices: the inverse of `gather_rows`."""
    count = matrices_URC.shape[1] // num_node_devices()
    return lax.dynamic_slice_in_dim(matrices_URC, lax.axis_index(IN_NODE) * count, count, axis=1)


def sum_rows_in_node(own: jax.Array, layout: BucketLayout) -> jax.Array:
    """Adds the sums over rows of a node's devices, if they have different rows of each matrix."""
    is_split = layout is BucketLayout.ROWS_IN_NODE and num_node_devices() > 1
    return lax.psum(own, IN_NODE) if is_split else own


def reshard_to_columns(bucket: jax.Array, layout: BucketLayout, mesh: Mesh) -> jax.Array:
    """Reshards a bucket with `ROWS_IN_NODE`, so that each node has some columns of all matrices.

    On a mesh with copies, nodes with copies first get what any of them has. Buckets with other layouts, and
    those whose columns the nodes do not divide, are otherwise returned unchanged.
    """
    if COPY in mesh.axis_names:
        bucket = _copied(bucket, layout, mesh)
    if layout is not BucketLayout.ROWS_IN_NODE or bucket.shape[-1] % size_of(mesh, NODES):
        return bucket
    columns = NamedSharding(mesh, PartitionSpec(None, IN_NODE, NODES))
    return lax.with_sharding_constraint(bucket, columns)


def _copied(bucket: jax.Array, layout: BucketLayout, mesh: Mesh) -> jax.Array:
    if layout is BucketLayout.ALL_DEVICES:
        # Adjacent devices have adjacent parts: this is one all-gather, and then each keeps its own.
        bucket = lax.with_sharding_constraint(bucket, NamedSharding(mesh, PartitionSpec(NODES)))
    return lax.with_sharding_constraint(bucket, NamedSharding(mesh, layout.spec))
