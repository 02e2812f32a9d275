"""Shardings of whole arrays, as those of a checkpoint, of which no device should have much.

Dimensions of weights are rarely divisible by a number of devices that is no power of two. Adjacent nodes then
have copies of the same parts, and the dimensions are divided among the fewer devices that remain.
"""

from collections.abc import Iterator

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax.parallel.mesh import (
    ALL,
    CONTEXT,
    DATA,
    IN_NODE,
    NODES,
    node_size,
    replicated,
    size_of,
    with_context,
)

COPY = "copy"
"""Axis of adjacent nodes that have copies of the same parts; no partition spec names it."""


def meshes_with_copies(mesh: Mesh) -> Iterator[Mesh]:
    """Yields the mesh, and then meshes in which every 2, 3, ... adjacent nodes have copies of the same parts.

    Args:
      mesh: all devices of a run.
    """
    yield mesh
    devices = with_context(mesh, 1).devices.reshape(-1, node_size(mesh))
    for copies in range(2, len(devices) + 1):
        if len(devices) % copies == 0:
            by_copies = devices.reshape(-1, copies, node_size(mesh), 1, 1)
            yield Mesh(by_copies, (DATA[0], COPY, DATA[1], *CONTEXT))


def evenly_sharded(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Returns a sharding of a weight over all devices.

    Args:
      mesh: devices; may have copies.
      shape: shape of the weight; its first dimension that the devices divide is sharded. If there is none,
        the weight is replicated.
    """
    devices = size_of(mesh, ALL)
    axis = next((i for i, size in enumerate(shape) if size and size % devices == 0), None)
    return replicated(mesh) if axis is None else NamedSharding(mesh, PartitionSpec(*[None] * axis, ALL))


def evenly_sharded_by_node(mesh: Mesh, shape: tuple[int, ...], axis: int) -> NamedSharding:
    """Returns a sharding as `evenly_sharded` for a weight whose experts the devices of a node share.

    The experts are split over the devices of a node, and the first other dimension that the nodes divide is
    split over the nodes. To reach their owners, values then move only between devices with the same index in
    their nodes.

    Args:
      mesh: devices; may have copies.
      shape: shape of the weight.
      axis: dimension of the experts.
    """
    in_node, nodes = size_of(mesh, IN_NODE), size_of(mesh, NODES)
    others = (i for i, size in enumerate(shape) if i != axis and size and size % nodes == 0)
    other = next(others, None)
    if shape[axis] % in_node or other is None:
        return evenly_sharded(mesh, shape)
    axes = {axis: IN_NODE, other: NODES}
    return NamedSharding(mesh, PartitionSpec(*(axes.get(i) for i in range(len(shape)))))
