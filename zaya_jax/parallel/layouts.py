"""How the buckets of an optimiser lie on the devices, and how they are gathered and summed.

What must pass between nodes goes between devices of one number in their nodes, each with a part of what its
node has: so all NICs of a node carry something, and none carries what another one of its node does.
"""

import enum

import jax
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


def gather_bucket(own: jax.Array, layout: BucketLayout) -> jax.Array:
    """A bucket of which this device has its share, whole; of the experts its own."""
    if layout is BucketLayout.ALL_DEVICES and num_sharers() == 1:
        return all_gather(own)
    of_nodes = all_gather(own, NODES)
    if layout is BucketLayout.OWN_EXPERTS:
        return of_nodes
    if layout is BucketLayout.ROWS_IN_NODE:
        return gather_rows(of_nodes)
    by_node = of_nodes.reshape(lax.axis_size(NODES), -1, *own.shape[1:])
    return lax.all_gather(by_node, IN_NODE, axis=1, tiled=True).reshape(-1, *own.shape[1:])


def sum_bucket(x: jax.Array, layout: BucketLayout, *, is_large: bool) -> jax.Array:
    """The sum of all devices' gradients in a bucket, of which each keeps its share, float32.

    Args:
      x: the bucket, whole; of the experts this device's own, summed in the node.
      layout: of it.
      is_large: whether its bytes count; small ones are one message to all instead.
    """
    if layout is BucketLayout.OWN_EXPERTS:
        return sum_shards(x, NODES)
    if layout is BucketLayout.ALL_DEVICES and (num_sharers() == 1 or not is_large):
        return reduce_scatter(x)
    # First in the node, or each NIC would carry what its node could have added up: so many times as much.
    has_rows = layout is BucketLayout.ROWS_IN_NODE
    shape = (x.shape[0], num_sharers(), -1, x.shape[-1]) if has_rows else _by_device(x.shape)
    parts = x.reshape(shape).swapaxes(0, 1)  # those of a device of each node lie together
    in_node = sum_shards(parts.reshape(-1, *parts.shape[2:]), IN_NODE)
    total = sum_shards(in_node.astype(x.dtype), NODES)
    return total if has_rows else total[0]


def _by_device(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a bucket whose U all devices share: [nodes, devices of a node, U of a device, ...]."""
    return lax.axis_size(NODES), num_sharers(), -1, *shape[1:]


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
