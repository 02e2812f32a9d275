"""Shared experts whose matrices pass between nodes a layer at a time, while another one is computed.

A device that owns a matrix for Muon has all of it, and of most layers none. Sent as they lie, some would send
all of a layer and the rest nothing. So each matrix is cut once a step: owners send all nodes rows of it, a
1,024th of the weights each on 1,024 devices, and layers gather rows from all nodes alike. Gradients come back
the same way.
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
from zaya_jax.parallel.ahead import RowsOfNodes, from_rows, to_rows
from zaya_jax.parallel.layouts import BucketLayout

LAYERS = "layers/experts/"
"""Where the experts of all layers stand."""


def shared_experts(partition: Partition) -> dict[str, MatrixStack | MatrixPool]:
    """The buckets by name, if several nodes share each device's own experts and Muon moves all of these.

    Else none: a vector's elements, as AdamW's buckets have them, lie anywhere, and no layer finds its own.
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


def rows_of_layer(partition: Partition, dtype: str) -> RowsOfNodes:
    """How the experts' matrices of one layer are cut over the nodes."""
    weights = {path: weight for path, weight in partition.own_weights.items() if path.startswith(LAYERS)}
    # A layer's own have no axis of layers. All of a model's experts have sides of two lengths.
    axes = tuple((path.removeprefix(LAYERS), _cut_axis(weight) - 1) for path, weight in weights.items())
    (num_rows,) = {weight.shape[_cut_axis(weight)] for weight in weights.values()}
    return RowsOfNodes(axes, num_rows, dtype)


def to_layers(partition: Partition, buckets: Mapping[str, jax.Array], dtype: DTypeLike) -> dict:
    """This node's rows of all layers' experts, float32, of the matrices that it owns.

    Args:
      partition: of all weights.
      buckets: its own shares of them.
      dtype: in which they travel.
    """
    axes = _cut_axes(partition)
    sent = to_rows({name: buckets[name].astype(dtype) for name in axes}, axes)
    rows = from_own_buckets(_of_rows(partition), sent)
    # A gradient has the type of what it is of, and these are sums of all devices.
    return jax.tree.map(lambda x: x.astype(jnp.float32), rows)


def from_layers(partition: Partition, gradients: Mapping) -> dict[str, jax.Array]:
    """Gradients of the matrices that this device owns, by bucket, of those of its rows of all layers."""
    own = {path: x for path, x in flatten_dict(gradients, sep="/").items() if path.startswith(LAYERS)}
    # As they are, in float32: of what a step sends between nodes they are the least.
    rows = to_own_buckets(_of_rows(partition), own)
    return from_rows(rows, _cut_axes(partition), rows_of_layer(partition, "float32").num_rows)


def _cut_axes(partition: Partition) -> dict[str, int]:
    """Of each bucket of shared experts, by name, the axis of its matrices' rows."""
    return {name: _cut_axis(each) for name, each in shared_experts(partition).items()}


def _of_rows(partition: Partition) -> Partition:
    """The experts' buckets and weights as one node has its rows of them."""
    num_nodes = partition.num_devices // partition.node_devices
    weights = {path: weight for path, weight in partition.own_weights.items() if path.startswith(LAYERS)}
    cut = {path: _cut_weight(weight, num_nodes) for path, weight in weights.items()}
    buckets = shared_experts(partition).values()
    # Of one device a node, or these weights, which are a device's own already, would be dealt again.
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
    """That of the matrices' shorter side: matrices of a pool lie so that it is their rows."""
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
    # Of a square matrix the rows, as above: weights and buckets must be cut along one side.
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
