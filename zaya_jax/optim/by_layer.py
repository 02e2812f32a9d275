"""Exchange of shared experts between nodes, one layer at a time, overlapped with computation.

The owner of a matrix for Muon has all of it, and matrices of few layers. Sending matrices from their owners
layer by layer would use the links of a few devices only. Instead owners send rows of each matrix to all nodes
once per step (on 1,024 devices 1/1,024 of the weights each), and layers gather rows from all nodes equally.
Gradients return in the same way.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

from zaya_jax.model.weights import Weight
from zaya_jax.optim.buckets import from_own_buckets, to_own_buckets
from zaya_jax.optim.matrices import MatrixAxes, matrix_axes, matrix_sides
from zaya_jax.optim.partition import Bucket, MatrixPool, MatrixStack, Partition
from zaya_jax.parallel.bucket_layouts import MESSAGE_BYTES, BucketLayout
from zaya_jax.parallel.prefetch import RowsOfNodes, from_rows, to_rows

LAYERS = "layers/experts/"
"""Prefix of the paths of the experts' weights."""


def shared_experts(partition: Partition) -> dict[str, MatrixStack | MatrixPool]:
    """Buckets of experts by name, if several nodes share each device's experts and Muon updates them all.

    Otherwise empty: AdamW's buckets are sharded by elements, which do not align with layers.
    """
    if partition.node_devices in (1, partition.num_devices):
        return {}
    flat = (*partition.flat_parameters, *partition.frozen)
    return (
        {}
        if any(map(_is_own, flat))
        else {each.name: each for each in partition.matrix_buckets if _is_own(each)}
    )


def _is_own(bucket: Bucket) -> bool:
    return bucket.layout is BucketLayout.OWN_EXPERTS


def rows_of_layers(partition: Partition, dtype: str) -> RowsOfNodes:
    """How the rows of some layers' expert matrices are distributed over nodes."""
    weights = _own_experts(partition)
    axes = tuple((path.removeprefix(LAYERS), _cut_axis(weight)) for path, weight in weights.items())
    # All expert matrices of a model have the same short side.
    (num_rows,) = {weight.shape[_cut_axis(weight)] for weight in weights.values()}
    return RowsOfNodes(axes, num_rows, dtype)


def layers_per_message(partition: Partition, dtype: str) -> int:
    """Returns the number of layers whose experts nodes exchange in one message."""
    weights = _own_experts(partition).values()
    num_layers = max(weight.shape[0] for weight in weights)
    layer_bytes = sum(weight.size for weight in weights) // num_layers * jnp.dtype(dtype).itemsize
    # At least two messages: the second one is sent while layers of the first are computed.
    sizes = [size for size in range(1, num_layers // 2 + 1) if num_layers % size == 0]
    return next((size for size in sizes if size * layer_bytes >= MESSAGE_BYTES), max(sizes, default=1))


def _own_experts(partition: Partition) -> dict[str, Weight]:
    """Declarations of the experts that one device of a node stores, by path."""
    return {path: weight for path, weight in partition.own_weights.items() if path.startswith(LAYERS)}


def to_layers(partition: Partition, buckets: Mapping[str, jax.Array], dtype: DTypeLike) -> dict:
    """This node's rows of all layers' experts, float32, from the matrices that devices own.

    Args:
      partition: partition of all weights.
      buckets: this device's shares of the buckets.
      dtype: type of the transfer.
    """
    axes = _cut_axes(partition)
    sent = to_rows({name: buckets[name].astype(dtype) for name in axes}, axes)
    rows = from_own_buckets(_of_rows(partition), sent)
    # float32, because gradients have the same type, and they are sums over all devices.
    return jax.tree.map(lambda x: x.astype(jnp.float32), rows)


def from_layers(partition: Partition, gradients: Mapping) -> dict[str, jax.Array]:
    """Gradients by bucket of the matrices that this device owns, from gradients of its rows of all layers."""
    own = {path: x for path, x in flatten_dict(gradients, sep="/").items() if path.startswith(LAYERS)}
    # In float32: these are the smallest transfers of a step between nodes.
    rows = to_own_buckets(_of_rows(partition), own)
    return from_rows(rows, _cut_axes(partition), rows_of_layers(partition, "float32").num_rows)


def _cut_axes(partition: Partition) -> dict[str, int]:
    """Axis along which the matrices of each bucket are split, by name of the bucket."""
    return {name: _cut_axis(each) for name, each in shared_experts(partition).items()}


def _of_rows(partition: Partition) -> Partition:
    """Partition of the experts with the shapes of one node's rows."""
    num_nodes = partition.num_devices // partition.node_devices
    cut = {path: _cut_weight(weight, num_nodes) for path, weight in _own_experts(partition).items()}
    buckets = shared_experts(partition).values()
    # One device per node, because these weights are already those of a single device.
    return dataclasses.replace(
        partition,
        node_devices=1,
        weights=tuple(cut.items()),
        stacks=tuple(_cut_stack(each, num_nodes) for each in buckets if isinstance(each, MatrixStack)),
        pools=tuple(_cut_pool(each, num_nodes) for each in buckets if isinstance(each, MatrixPool)),
        flat_parameters=(),
        frozen=(),
    )


def _short_axis(shape: tuple[int, ...], axes: MatrixAxes) -> int:
    """Axis of the shorter side of the matrices, which is the axis of rows in a pool."""
    rows, columns = matrix_sides(shape, axes)
    (axis,) = axes.outputs if rows > columns else axes.inputs
    return axis


def _cut_axis(each: Weight | MatrixStack | MatrixPool) -> int:
    axes = matrix_axes(each) if isinstance(each, Weight) else each.axes
    return _short_axis(each.shape, axes)


def _cut_weight(weight: Weight, num_nodes: int) -> Weight:
    return dataclasses.replace(weight, shape=_cut(weight.shape, _cut_axis(weight), num_nodes))


def _cut_stack(stack: MatrixStack, num_nodes: int) -> MatrixStack:
    return dataclasses.replace(stack, unit=_cut(stack.unit, _cut_axis(stack) - 1, num_nodes))


def _cut_pool(pool: MatrixPool, num_nodes: int) -> MatrixPool:
    # The rows of a square matrix, as in `_short_axis`: weights and buckets must be split along the same side.
    def cut(side: int, other: int, *, is_tie: bool) -> int:
        return math.ceil(side / num_nodes) if side < other or (side == other and is_tie) else side

    ranges = tuple(
        dataclasses.replace(
            each,
            rows=cut(each.rows, each.columns, is_tie=True),
            columns=cut(each.columns, each.rows, is_tie=False),
        )
        for each in pool.ranges
    )
    return dataclasses.replace(pool, ranges=ranges)


def _cut(shape: tuple[int, ...], axis: int, num_nodes: int) -> tuple[int, ...]:
    return (*shape[:axis], math.ceil(shape[axis] / num_nodes), *shape[axis + 1 :])
