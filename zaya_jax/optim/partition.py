"""Which device owns which weight, for an optimiser that is partitioned (ZeRO stage 1, [ZeRO] 5.1).

Everything that the optimiser keeps lies in buckets, arrays whose first axis is sharded evenly. What
divides by the number of devices stays as it is: the reshape from a weight to its bucket costs nothing,
at any size. What does not divide is pooled or padded:

- a stack is a weight of matrices, or as many of them as divide evenly;
- the matrices that are left, of all weights, are sorted by size and pooled, one matrix a device, padded
  with zeros to the largest of the pool. Newton-Schulz of a padded matrix is the padded answer, exactly;
- what AdamW moves is sharded by elements, anywhere, and padded by less than one a device;
- what does not train is sharded so too: a whole float32 copy on each device would be the largest thing there.

Where the devices of a node share the experts, each has its own of them (`zaya_jax.parallel.node`), and those
are partitioned among the devices of one number in their nodes, in buckets of their own.

No matrix is cut, each has one owner, and all devices have equally many matrices of about equal size.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from flax.traverse_util import unflatten_dict

from zaya_jax.model.weights import EXPERTS, Weight, flatten_weights
from zaya_jax.optim.matrices import MatrixAxes, matrix_axes, matrix_sides
from zaya_jax.parallel.layouts import BucketLayout


@dataclasses.dataclass(frozen=True)
class MatrixStack:
    """Matrices of one weight that divide evenly.

    Attributes:
      name: of the bucket: the weight's path.
      num_units: how many; a unit is all behind the weight's leading axes that count matrices.
      unit: shape of one, for example [D, Q, F]: both halves of an expert's gate_up_proj.
      axes: of the matrices in the bucket [num_units, *unit].
      layout: who has what of it.
    """

    name: str
    num_units: int
    unit: tuple[int, ...]
    axes: MatrixAxes
    layout: BucketLayout = BucketLayout.ALL_DEVICES

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the bucket, over the devices that share it."""
        return (self.num_units, *self.unit)

    @property
    def num_matrices(self) -> int:
        """Real ones; a stack has no padding."""
        return math.prod(self.shape) // math.prod(matrix_sides(self.shape, self.axes))


@dataclasses.dataclass(frozen=True)
class MatrixRange:
    """Consecutive matrices of one weight, numbered as `to_matrices` counts them."""

    path: str
    start: int
    stop: int
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """How many matrices there are."""
        return self.stop - self.start

    @property
    def sides(self) -> tuple[int, int]:
        """The shorter side of each matrix, and the longer."""
        return min(self.rows, self.columns), max(self.rows, self.columns)


@dataclasses.dataclass(frozen=True)
class MatrixPool:
    """At most so many matrices a device, lying on their long sides and padded to the largest.

    Attributes:
      name: of the bucket.
      num_slots: the length of the bucket.
      ranges: the matrices, one after the other; zeros follow the last.
      rows_divide: the number of rows is a multiple of this.
      layout: as of a `MatrixStack`.
    """

    name: str
    num_slots: int
    ranges: tuple[MatrixRange, ...]
    rows_divide: int = 1
    layout: BucketLayout = BucketLayout.ALL_DEVICES

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the bucket, over the devices that share it."""
        short, long = (max(sides) for sides in zip(*(each.sides for each in self.ranges), strict=True))
        return self.num_slots, -(-short // self.rows_divide) * self.rows_divide, long

    @property
    def axes(self) -> MatrixAxes:
        """Of the matrices in the bucket."""
        return MatrixAxes((1,), (2,))

    @property
    def range_by_slot(self) -> tuple[MatrixRange, ...]:
        """The range of each matrix; slots behind the last have none."""
        return tuple(each for each in self.ranges for _ in range(each.count))

    @property
    def num_matrices(self) -> int:
        """Matrices of weights in it, without its padding."""
        return len(self.range_by_slot)


@dataclasses.dataclass(frozen=True)
class FlatParameter:
    """A weight that AdamW moves, or nothing, flat: each device has an equal number of its elements.

    Attributes:
      name: of the bucket: the weight's path.
      num_devices: that share.
      size: elements of the weight, without padding.
      layout: as of a `MatrixStack`.
    """

    name: str
    num_devices: int
    size: int
    layout: BucketLayout = BucketLayout.ALL_DEVICES

    @property
    def shape(self) -> tuple[int, int]:
        """Of the bucket, over the devices that share it."""
        return self.num_devices, math.ceil(self.size / self.num_devices)


Bucket = MatrixStack | MatrixPool | FlatParameter
"""What one collective sends: one array, sharded along its first axis."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """How the weights of a network are partitioned. Hashable: it is part of a compiled step.

    Attributes:
      num_devices: that share.
      node_devices: of each node, that share the experts.
      weights: all declarations by path.
      stacks: matrices that divide evenly.
      pools: those that do not.
      flat_parameters: what AdamW moves.
      frozen: what does not train. It is stored, and has neither gradients nor moments.
    """

    num_devices: int
    node_devices: int
    # Pairs, for a dict has no hash.
    weights: tuple[tuple[str, Weight], ...]
    stacks: tuple[MatrixStack, ...]
    pools: tuple[MatrixPool, ...]
    flat_parameters: tuple[FlatParameter, ...]
    frozen: tuple[FlatParameter, ...]

    @property
    def own_weights(self) -> dict[str, Weight]:
        """All declarations by path, of what one device of a node has."""
        return {path: _of_device(weight, self.node_devices) for path, weight in self.weights}

    @property
    def trained(self) -> dict[str, Any]:
        """Declarations of the weights that train, nested."""
        return unflatten_dict({path: weight for path, weight in self.weights if weight.trains}, sep="/")

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All that train, those of matrices first."""
        return (*self.matrix_buckets, *self.flat_parameters)

    @property
    def matrix_buckets(self) -> tuple[MatrixStack | MatrixPool, ...]:
        """The buckets that Muon moves, those with matrices."""
        return (*self.stacks, *self.pools)

    @property
    def layouts(self) -> dict[str, BucketLayout]:
        """Of all buckets by name, those that do not train too."""
        return {each.name: each.layout for each in (*self.buckets, *self.frozen)}


def make_partition(
    declared: Mapping, num_devices: int, *, node_devices: int = 1, by_matrix: bool = True
) -> Partition:
    """Partitions declared weights among devices.

    Args:
      declared: the tree of `Weight`s.
      num_devices: how many share.
      node_devices: of each node, that share the experts; they divide `num_devices`.
      by_matrix: keeps matrices whole; otherwise all weights are sharded by elements, for plain AdamW.
    """
    weights, num_nodes = flatten_weights(declared), num_devices // node_devices
    # What a node's devices share is dealt among those of one number in their nodes, the rest among all.
    shared = {path: _of_device(w, node_devices) for path, w in weights.items() if is_shared(w, node_devices)}
    rest = {path: weight for path, weight in weights.items() if path not in shared}
    deals = [_deal(rest, num_devices, by_matrix, node_devices=node_devices)]
    if shared:
        own = _deal(shared, num_nodes, by_matrix)
        deals.append({field: tuple(map(_of_own_experts, buckets)) for field, buckets in own.items()})
    return Partition(
        num_devices=num_devices,
        node_devices=node_devices,
        weights=tuple(weights.items()),
        **{field: tuple(bucket for deal in deals for bucket in deal[field]) for field in deals[0]},
    )


def is_shared(weight: Weight, node_devices: int) -> bool:
    """Whether the devices of a node have parts of a weight, and none all of it."""
    return node_devices > 1 and weight.of_experts


def _of_device(weight: Weight, node_devices: int) -> Weight:
    """A weight as one device of a node has it: of its share of the experts, padded to equal shares."""
    if not is_shared(weight, node_devices):
        return weight
    axis = weight.axes.index(EXPERTS)
    shape = list(weight.shape)
    shape[axis] = math.ceil(shape[axis] / node_devices)
    return dataclasses.replace(weight, shape=tuple(shape))


def _of_own_experts(bucket: Any) -> Any:
    # Pools are numbered, in each deal from 0.
    name = f"experts' {bucket.name}" if isinstance(bucket, MatrixPool) else bucket.name
    return dataclasses.replace(bucket, name=name, layout=BucketLayout.OWN_EXPERTS)


def _deal(
    weights: Mapping[str, Weight], num_devices: int, by_matrix: bool, *, node_devices: int = 1
) -> dict[str, tuple[Any, ...]]:
    """Buckets of weights over so many devices, by their fields of `Partition`.

    Of nodes with several devices the matrices go to the nodes, which then cut their rows: a node's devices
    have few matrices to share, and a slot for each would be empty for most.
    """
    trained = {path: weight for path, weight in weights.items() if weight.trains}
    matrices = {path: weight for path, weight in trained.items() if weight.matrix and by_matrix}
    # A pool mixes weights, so that one rule of decay must be right for all of them.
    assert all(weight.decay for weight in matrices.values()), "every matrix decays"
    if node_devices > 1:
        stacks = []
        pools = _pools_of_nodes(matrices, num_devices // node_devices, node_devices)
    else:
        found = (_stack(path, weight, num_devices) for path, weight in matrices.items())
        stacks = [stack for stack in found if stack]
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
    # Leading axes alone: units that lie one after the other in memory are cut without a copy.
    leading = min(axes.inputs + axes.outputs)
    num_units = math.prod(weight.shape[:leading]) // num_devices * num_devices
    if not num_units:  # fewer than devices: all of them are pooled
        return None
    # In the bucket one axis, that of units, stands before those of a unit.
    in_bucket = MatrixAxes(*(tuple(i - leading + 1 for i in side) for side in axes))
    return MatrixStack(path, num_units, weight.shape[leading:], in_bucket)


def _range_from(start: int, path: str, weight: Weight) -> MatrixRange:
    """The matrices of a weight from `start` on."""
    rows, columns = matrix_sides(weight.shape, matrix_axes(weight))
    return MatrixRange(path, start, weight.size // (rows * columns), rows, columns)


def _pools(left: Iterable[MatrixRange], num_devices: int) -> tuple[MatrixPool, ...]:
    """Largest matrices first, as many a pool as there are devices."""
    # Sorted, neighbours are of about one size: little padding, and no device waits long for another.
    by_size = sorted(left, key=_sides, reverse=True)
    pools: list[list[MatrixRange]] = []
    room = 0
    for each in by_size:
        while each.count:
            if not room:  # a weight's matrices may go on in the next pool
                pools.append([])
                room = num_devices
            taken = min(each.count, room)
            pools[-1].append(dataclasses.replace(each, stop=each.start + taken))
            each = dataclasses.replace(each, start=each.start + taken)
            room -= taken
    return tuple(MatrixPool(f"pool {i}", num_devices, tuple(ranges)) for i, ranges in enumerate(pools))


def _pools_of_nodes(
    matrices: Mapping[str, Weight], num_nodes: int, node_devices: int
) -> tuple[MatrixPool, ...]:
    """Of each size as many matrices as divide by the nodes in one pool, and what is left in mixed ones."""
    ranges = [_range_from(0, path, weight) for path, weight in matrices.items()]
    pools, left = [], []
    for _, of_size in itertools.groupby(sorted(ranges, key=_sides, reverse=True), key=_sides):
        of_size = list(of_size)
        # Of one size there is no padding, as far as they divide.
        taken, rest = _take(of_size, sum(each.count for each in of_size) // num_nodes * num_nodes)
        pools += [(sum(each.count for each in taken), taken)] if taken else []
        left += rest
    pools += [(num_nodes, pool.ranges) for pool in _pools(left, num_nodes)]
    layout = BucketLayout.ROWS_IN_NODE
    return tuple(
        MatrixPool(f"pool {i}", slots, tuple(ranges), rows_divide=node_devices, layout=layout)
        for i, (slots, ranges) in enumerate(pools)
    )


def _sides(each: MatrixRange) -> tuple[int, int]:
    return each.sides


def _take(ranges: Iterable[MatrixRange], count: int) -> tuple[list[MatrixRange], list[MatrixRange]]:
    """The first so many matrices, and the rest."""
    taken, rest = [], []
    for each in ranges:
        middle = each.start + min(each.count, count)
        count -= middle - each.start
        taken += [dataclasses.replace(each, stop=middle)] if middle > each.start else []
        rest += [dataclasses.replace(each, start=middle)] if middle < each.stop else []
    return taken, rest
