"""Partition of the optimizer state over devices (ZeRO stage 1, [ZeRO] 5.1).

The optimizer state is stored in buckets, arrays whose first axis is sharded evenly. Weights that divide
evenly by the number of devices keep their layout, so the reshape from a weight to its bucket is free. The
others are pooled or padded:

- a stack contains the matrices of one weight, as many as divide evenly;
- the remaining matrices of all weights are sorted by size and pooled, one matrix per device, padded with
  zeros to the largest of the pool. Newton-Schulz of a padded matrix is exactly the padded result;
- weights that AdamW updates are sharded by elements and padded by less than one element per device;
- frozen weights are sharded in the same way, because a full float32 copy on each device would dominate
memory.

If the devices of a node share the experts, each device owns some of them (`zaya_jax.parallel.node`). Those
are partitioned over the devices with the same index in all nodes, in separate buckets.

No matrix is split, each has one owner, and all devices have the same number of matrices of about equal size.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from flax.traverse_util import unflatten_dict

from zaya_jax.model.weights import EXPERTS, Weight, flatten_weights
from zaya_jax.optim.matrices import MatrixAxes, matrix_axes, matrix_sides
from zaya_jax.parallel.bucket_layouts import BucketLayout


@dataclasses.dataclass(frozen=True)
class MatrixStack:
    """Bucket with those matrices of one weight that divide evenly.

    Attributes:
      name: name of the bucket: the path of the weight.
      num_units: number of units; a unit is everything after the weight's leading axes that index matrices.
      unit: shape of a unit, for example [D, Q, F] for both halves of an expert's gate_up_proj.
      axes: axes of the matrices in the bucket [num_units, *unit].
      layout: distribution of the bucket over devices.
    """

    name: str
    num_units: int
    unit: tuple[int, ...]
    axes: MatrixAxes
    layout: BucketLayout = BucketLayout.ALL_DEVICES

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the bucket over all devices that share it."""
        return (self.num_units, *self.unit)

    @property
    def num_matrices(self) -> int:
        """Number of matrices; a stack has no padding."""
        return math.prod(self.shape) // math.prod(matrix_sides(self.shape, self.axes))


@dataclasses.dataclass(frozen=True)
class MatrixRange:
    """Consecutive matrices of one weight, in the order of `to_matrices`.

    Attributes:
      path: path of the weight.
      start: index of the first matrix.
      stop: index after the last matrix.
      rows: rows of each matrix.
      columns: columns of each matrix.
    """

    path: str
    start: int
    stop: int
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.stop - self.start

    @property
    def sides(self) -> tuple[int, int]:
        """Lengths of the shorter and the longer side of each matrix."""
        return min(self.rows, self.columns), max(self.rows, self.columns)


BY_SIZE = operator.attrgetter("sides")
"""Key that sorts ranges by the lengths of their sides."""


@dataclasses.dataclass(frozen=True)
class MatrixPool:
    """Bucket with matrices of several weights, padded to the largest; rows are the shorter side.

    Attributes:
      name: name of the bucket.
      num_slots: length of the first axis of the bucket, a multiple of the number of devices.
      ranges: the matrices in order; zeros fill the remaining slots.
      rows_divide: divisor of the number of rows, after padding.
      layout: distribution of the bucket over devices.
    """

    name: str
    num_slots: int
    ranges: tuple[MatrixRange, ...]
    rows_divide: int = 1
    layout: BucketLayout = BucketLayout.ALL_DEVICES

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the bucket over all devices that share it."""
        short, long = (max(sides) for sides in zip(*(each.sides for each in self.ranges), strict=True))
        return self.num_slots, -(-short // self.rows_divide) * self.rows_divide, long

    @property
    def axes(self) -> MatrixAxes:
        """Axes of the matrices in the bucket."""
        return MatrixAxes((1,), (2,))

    @property
    def range_by_slot(self) -> tuple[MatrixRange, ...]:
        """Range of the matrix in each slot; slots after the last matrix are excluded."""
        return tuple(each for each in self.ranges for _ in range(each.count))

    @property
    def num_matrices(self) -> int:
        """Number of matrices, without padding."""
        return len(self.range_by_slot)


@dataclasses.dataclass(frozen=True)
class FlatParameter:
    """Bucket with a flattened weight that is frozen or updated by AdamW, sharded by elements.

    Attributes:
      name: name of the bucket: the path of the weight.
      num_devices: number of devices that share the bucket.
      size: number of elements of the weight, without padding.
      layout: distribution of the bucket over devices.
    """

    name: str
    num_devices: int
    size: int
    layout: BucketLayout = BucketLayout.ALL_DEVICES

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the bucket over all devices that share it."""
        return self.num_devices, math.ceil(self.size / self.num_devices)


Bucket = MatrixStack | MatrixPool | FlatParameter
"""An array that is sharded along its first axis; collectives operate on buckets."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """Partition of the weights of a model. It is hashable, because compiled steps depend on it.

    Attributes:
      num_devices: number of devices that share the optimizer state.
      node_devices: number of devices of a node that share the experts.
      weights: all declarations, as pairs of path and weight.
      stacks: buckets of matrices that divide evenly.
      pools: buckets of the remaining matrices.
      flat_parameters: buckets of weights that AdamW updates.
      frozen: buckets of weights that do not train; they have neither gradients nor moments.
    """

    num_devices: int
    node_devices: int
    # Pairs, because a dict is not hashable.
    weights: tuple[tuple[str, Weight], ...]
    stacks: tuple[MatrixStack, ...]
    pools: tuple[MatrixPool, ...]
    flat_parameters: tuple[FlatParameter, ...]
    frozen: tuple[FlatParameter, ...]

    @property
    def own_weights(self) -> dict[str, Weight]:
        """All declarations by path, with the shapes that one device of a node stores."""
        return {path: _of_device(weight, self.node_devices) for path, weight in self.weights}

    @property
    def trained(self) -> dict[str, Any]:
        """Nested declarations of the weights that train."""
        return unflatten_dict({path: weight for path, weight in self.weights if weight.trains}, sep="/")

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets of all weights that train, those of matrices first."""
        return (*self.matrix_buckets, *self.flat_parameters)

    @property
    def matrix_buckets(self) -> tuple[MatrixStack | MatrixPool, ...]:
        """Buckets of matrices, which Muon updates."""
        return (*self.stacks, *self.pools)

    @property
    def layouts(self) -> dict[str, BucketLayout]:
        """Layout of each bucket by name, frozen ones included."""
        return {each.name: each.layout for each in (*self.buckets, *self.frozen)}


def make_partition(
    declared: Mapping, num_devices: int, *, node_devices: int = 1, by_matrix: bool = True
) -> Partition:
    """Partitions declared weights over devices.

    Args:
      declared: tree of `Weight`.
      num_devices: number of devices that share the optimizer state.
      node_devices: number of devices of a node that share the experts; a divisor of `num_devices`.
      by_matrix: whether to keep matrices whole; otherwise all weights are sharded by elements, for plain
        AdamW.
    """
    weights, num_nodes = flatten_weights(declared), num_devices // node_devices
    # Experts that a node shares are assigned to the devices with the same index in all nodes, the rest to
    # all.
    shared = {path: _of_device(w, node_devices) for path, w in weights.items() if is_shared(w, node_devices)}
    rest = {path: weight for path, weight in weights.items() if path not in shared}
    assignments = [_assign(rest, num_devices, by_matrix, node_devices=node_devices)]
    if shared:
        own = _assign(shared, num_nodes, by_matrix)
        assignments.append({field: tuple(map(_of_own_experts, buckets)) for field, buckets in own.items()})
    return Partition(
        num_devices=num_devices,
        node_devices=node_devices,
        weights=tuple(weights.items()),
        **{
            field: tuple(bucket for assignment in assignments for bucket in assignment[field])
            for field in assignments[0]
        },
    )


def is_shared(weight: Weight, node_devices: int) -> bool:
    """Whether the devices of a node each store a part of a weight."""
    return node_devices > 1 and weight.of_experts


def _of_device(weight: Weight, node_devices: int) -> Weight:
    """Declaration of a weight as one device stores it: its share of the experts, padded to equal shares."""
    if not is_shared(weight, node_devices):
        return weight
    axis = weight.axes.index(EXPERTS)
    shape = list(weight.shape)
    shape[axis] = math.ceil(shape[axis] / node_devices)
    return dataclasses.replace(weight, shape=tuple(shape))


def _of_own_experts(bucket: Any) -> Any:
    # Pools are numbered from 0 in each assignment, so their names would clash.
    name = f"experts' {bucket.name}" if isinstance(bucket, MatrixPool) else bucket.name
    return dataclasses.replace(bucket, name=name, layout=BucketLayout.OWN_EXPERTS)


def _assign(
    weights: Mapping[str, Weight], num_devices: int, by_matrix: bool, *, node_devices: int = 1
) -> dict[str, tuple[Any, ...]]:
    """Assigns weights to buckets over devices; returns the buckets by field of `Partition`.

    If nodes have several devices, matrices are assigned to nodes and their rows split within the node. There
    are few matrices per node, so that most devices would otherwise have an empty slot.
    """
    trained = {path: weight for path, weight in weights.items() if weight.trains}
    matrices = {path: weight for path, weight in trained.items() if weight.matrix and by_matrix}
    # A pool mixes weights, so all of them must have the same weight decay.
    assert all(weight.decay for weight in matrices.values()), "every matrix decays"
    if node_devices > 1:
        stacks = []
        pools = _pools_of_nodes(matrices, num_devices // node_devices, node_devices)
    else:
        candidates = (_stack(path, weight, num_devices) for path, weight in matrices.items())
        stacks = [stack for stack in candidates if stack]
        stacked = {stack.name: stack.num_matrices for stack in stacks}
        left = [_range_from(stacked.get(path, 0), path, weight) for path, weight in matrices.items()]
        pools = _pools(left, num_devices)
    flat = [path for path in trained if path not in matrices]
    frozen = [path for path in weights if path not in trained]
    return {
        "stacks": tuple(stacks),
        "pools": pools,
        "flat_parameters": tuple(FlatParameter(path, num_devices, weights[path].size) for path in flat),
        "frozen": tuple(FlatParameter(path, num_devices, weights[path].size) for path in frozen),
    }


def _stack(path: str, weight: Weight, num_devices: int) -> MatrixStack | None:
    axes = matrix_axes(weight)
    # Only leading axes: units that are contiguous in memory can be split without a copy.
    leading = min(axes.inputs + axes.outputs)
    num_units = math.prod(weight.shape[:leading]) // num_devices * num_devices
    if not num_units:  # fewer units than devices: all matrices are pooled
        return None
    # In the bucket, one axis of units precedes the axes of a unit.
    in_bucket = MatrixAxes(*(tuple(i - leading + 1 for i in side) for side in axes))
    return MatrixStack(path, num_units, weight.shape[leading:], in_bucket)


def _range_from(start: int, path: str, weight: Weight) -> MatrixRange:
    """The matrices of a weight from index `start`."""
    rows, columns = matrix_sides(weight.shape, matrix_axes(weight))
    return MatrixRange(path, start, weight.size // (rows * columns), rows, columns)


def _pools(left: Iterable[MatrixRange], num_devices: int) -> tuple[MatrixPool, ...]:
    """Pools with one matrix per device, largest matrices first."""
    # Sorting puts matrices of similar size in a pool: little padding, and balanced work.
    by_size = sorted(left, key=BY_SIZE, reverse=True)
    pools: list[list[MatrixRange]] = []
    num_free = 0
    for each in by_size:
        while each.count:
            if not num_free:  # the matrices of a weight may continue in the next pool
                pools.append([])
                num_free = num_devices
            taken = min(each.count, num_free)
            pools[-1].append(dataclasses.replace(each, stop=each.start + taken))
            each = dataclasses.replace(each, start=each.start + taken)
            num_free -= taken
    return tuple(MatrixPool(f"pool {i}", num_devices, tuple(ranges)) for i, ranges in enumerate(pools))


def _pools_of_nodes(
    matrices: Mapping[str, Weight], num_nodes: int, node_devices: int
) -> tuple[MatrixPool, ...]:
    """One pool per size of matrix, as far as matrices divide evenly by nodes; mixed pools for the rest."""
    ranges = [_range_from(0, path, weight) for path, weight in matrices.items()]
    pools, left = [], []
    for _, of_size in itertools.groupby(sorted(ranges, key=BY_SIZE, reverse=True), key=BY_SIZE):
        of_size = list(of_size)
        # Matrices of one size need no padding.
        taken, rest = _split_at(of_size, sum(each.count for each in of_size) // num_nodes * num_nodes)
        pools += [(sum(each.count for each in taken), taken)] if taken else []
        left += rest
    pools += [(num_nodes, pool.ranges) for pool in _pools(left, num_nodes)]
    layout = BucketLayout.ROWS_IN_NODE
    return tuple(
        MatrixPool(f"pool {i}", slots, tuple(ranges), rows_divide=node_devices, layout=layout)
        for i, (slots, ranges) in enumerate(pools)
    )


def _split_at(ranges: Iterable[MatrixRange], count: int) -> tuple[list[MatrixRange], list[MatrixRange]]:
    """The first `count` matrices, and the rest."""
    taken, rest = [], []
    for each in ranges:
        middle = each.start + min(each.count, count)
        count -= middle - each.start
        taken += [dataclasses.replace(each, stop=middle)] if middle > each.start else []
        rest += [dataclasses.replace(each, start=middle)] if middle < each.stop else []
    return taken, rest
