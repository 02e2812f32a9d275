"""Which device owns which weight, for an optimiser that is partitioned (ZeRO stage 1, [ZeRO] 5.1).

Everything that the optimiser keeps lies in buckets, arrays whose first axis is sharded evenly. What
divides by the number of devices stays as it is: the reshape from a weight to its bucket costs nothing,
at any size. What does not divide is pooled or padded:

- a stack is a weight of matrices, or as many of them as divide evenly;
- the matrices that are left, of all weights, are sorted by size and pooled, one matrix a device, padded
  with zeros to the largest of the pool. Newton-Schulz of a padded matrix is the padded answer, exactly;
- what AdamW moves is sharded by elements, anywhere, and padded by less than one a device;
- what does not train is sharded so too: a whole float32 copy on each device would be the largest thing there.

No matrix is cut, each has one owner, and all devices have equally many matrices of about equal size.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from zaya_jax.model.weights import Weight, flatten_weights
from zaya_jax.optim.matrices import MatrixAxes, from_matrices, matrix_axes, matrix_sides, to_matrices


@dataclasses.dataclass(frozen=True)
class MatrixStack:
    """Matrices of one weight that divide evenly.

    Attributes:
      name: of the bucket: the weight's path.
      num_units: how many; a unit is all behind the weight's leading axes that count matrices.
      unit: shape of one, for example [D, Q, F]: both halves of an expert's gate_up_proj.
      axes: of the matrices in the bucket [num_units, *unit].
    """

    name: str
    num_units: int
    unit: tuple[int, ...]
    axes: MatrixAxes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the bucket, over all devices."""
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
    """At most one matrix a device, lying on its long side and padded to the largest.

    Attributes:
      name: of the bucket.
      num_devices: the length of the bucket.
      ranges: the matrices, one after the other; zeros follow the last.
    """

    name: str
    num_devices: int
    ranges: tuple[MatrixRange, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the bucket, over all devices."""
        short, long = (max(sides) for sides in zip(*(each.sides for each in self.ranges), strict=True))
        return self.num_devices, short, long

    @property
    def axes(self) -> MatrixAxes:
        """Of the matrices in the bucket."""
        return MatrixAxes((1,), (2,))

    @property
    def range_by_device(self) -> tuple[MatrixRange, ...]:
        """The range of each device's matrix; devices behind the last have none."""
        return tuple(each for each in self.ranges for _ in range(each.count))

    @property
    def num_matrices(self) -> int:
        """Matrices of weights in it, without its padding."""
        return len(self.range_by_device)


@dataclasses.dataclass(frozen=True)
class FlatParameter:
    """A weight that AdamW moves, or nothing, flat: each device has an equal number of its elements.

    Attributes:
      name: of the bucket: the weight's path.
      num_devices: that share.
      size: elements of the weight, without padding.
    """

    name: str
    num_devices: int
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the bucket, over all devices."""
        return self.num_devices, math.ceil(self.size / self.num_devices)


Bucket = MatrixStack | MatrixPool | FlatParameter
"""What one collective sends: one array, sharded along its first axis."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """How the weights of a network are partitioned. Hashable: it is part of a compiled step.

    Attributes:
      num_devices: that share.
      weights: all declarations by path.
      stacks: matrices that divide evenly.
      pools: those that do not.
      flat_parameters: what AdamW moves.
      frozen: what does not train. It is stored, and has neither gradients nor moments.
    """

    num_devices: int
    # Pairs, for a dict has no hash.
    weights: tuple[tuple[str, Weight], ...]
    stacks: tuple[MatrixStack, ...]
    pools: tuple[MatrixPool, ...]
    flat_parameters: tuple[FlatParameter, ...]
    frozen: tuple[FlatParameter, ...]

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


def make_partition(declared: Mapping, num_devices: int, *, by_matrix: bool = True) -> Partition:
    """Partitions declared weights among devices.

    Args:
      declared: the tree of `Weight`s.
      num_devices: how many share.
      by_matrix: keeps matrices whole; otherwise all weights are sharded by elements, for plain AdamW.
    """
    weights = flatten_weights(declared)
    trained = {path: weight for path, weight in weights.items() if weight.trains}
    matrices = {path: weight for path, weight in trained.items() if weight.matrix and by_matrix}
    # A pool mixes weights, so that one rule of decay must be right for all of them.
    assert all(weight.decay for weight in matrices.values()), "every matrix decays"
    stacks = [stack for path, weight in matrices.items() if (stack := _stack(path, weight, num_devices))]
    stacked = {stack.name: stack.num_matrices for stack in stacks}
    left = [_range_from(stacked.get(path, 0), path, weight) for path, weight in matrices.items()]
    return Partition(
        num_devices=num_devices,
        weights=tuple(weights.items()),
        stacks=tuple(stacks),
        pools=_pools(left, num_devices),
        flat_parameters=tuple(
            FlatParameter(path, num_devices, weight.size)
            for path, weight in trained.items()
            if path not in matrices
        ),
        frozen=tuple(
            FlatParameter(path, num_devices, weight.size)
            for path, weight in weights.items()
            if path not in trained
        ),
    )


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
    by_size = sorted(left, key=lambda each: each.sides, reverse=True)
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


def to_buckets(partition: Partition, tree: Mapping) -> dict[str, jax.Array]:
    """The buckets, over all devices, that a tree like the weights lies in.

    Weights that the tree leaves out are left out of the buckets.
    """
    flat: dict[str, Any] = cast(Any, flatten_dict(tree, sep="/"))
    weights = dict(partition.weights)
    buckets = {}
    for stack in partition.stacks:
        if stack.name in flat:
            buckets[stack.name] = flat[stack.name].reshape(-1, *stack.unit)[: stack.num_units]
    for pool in partition.pools:
        # An optimiser's moments have all matrices or none: a pool's first stands for the others.
        if pool.ranges[0].path in flat:
            buckets[pool.name] = _fill_pool(pool, weights, flat)
    for parameter in (*partition.flat_parameters, *partition.frozen):
        if parameter.name in flat:
            padding = math.prod(parameter.shape) - parameter.size
            vector = jnp.pad(flat[parameter.name].reshape(-1), (0, padding))
            buckets[parameter.name] = vector.reshape(parameter.shape)
    return buckets


def from_buckets(partition: Partition, buckets: Mapping[str, jax.Array]) -> dict:
    """The tree that lies in some buckets: `to_buckets` undone. Weights without buckets are left out."""
    weights = dict(partition.weights)
    flat: dict[str, jax.Array] = {}
    pieces: dict[str, list[jax.Array]] = defaultdict(list)
    # Stacks before pools, so that a weight's pieces come in the order in which its matrices are counted.
    for bucket in (*partition.buckets, *partition.frozen):
        if bucket.name not in buckets:
            continue
        x = buckets[bucket.name]
        if isinstance(bucket, MatrixPool):
            for each, matrices in _read_pool(bucket, x):
                pieces[each.path].append(matrices)
        elif isinstance(bucket, FlatParameter):
            flat[bucket.name] = x.reshape(-1)[: bucket.size].reshape(weights[bucket.name].shape)
        elif math.prod(bucket.shape) == weights[bucket.name].size:
            # Nothing is left in pools: a reshape, where the pieces' way would be two transposes.
            flat[bucket.name] = x.reshape(weights[bucket.name].shape)
        else:
            pieces[bucket.name].append(to_matrices(x, bucket.axes))
    for path, matrices in pieces.items():
        flat[path] = from_matrices(jnp.concatenate(matrices), matrix_axes(weights[path]), weights[path].shape)
    return unflatten_dict(flat, sep="/")


def split(partition: Partition, params: Mapping) -> tuple[Mapping, Mapping]:
    """The weights that train, and those that do not, which may be none."""
    if not partition.frozen:
        return params, {}
    frozen = {each.name for each in partition.frozen}
    flat = flatten_dict(params, sep="/")
    trained = {path: x for path, x in flat.items() if path not in frozen}
    rest = {path: x for path, x in flat.items() if path in frozen}
    return unflatten_dict(trained, sep="/"), unflatten_dict(rest, sep="/")


def join(trained: Mapping, frozen: Mapping) -> Mapping:
    """One tree of weights: `split` undone."""
    if not frozen:
        return trained
    return unflatten_dict(flatten_dict(trained, sep="/") | flatten_dict(frozen, sep="/"), sep="/")


def _fill_pool(pool: MatrixPool, weights: Mapping[str, Weight], flat: Mapping[str, Any]) -> jax.Array:
    _, rows, columns = pool.shape
    filled = []
    for each in pool.ranges:
        matrices = to_matrices(flat[each.path], matrix_axes(weights[each.path]))[each.start : each.stop]
        # The orthogonal factor of a transpose is the factor's transpose, so that all may lie one way.
        matrices = matrices.swapaxes(1, 2) if each.rows > each.columns else matrices
        padding = (rows - matrices.shape[1], columns - matrices.shape[2])
        filled.append(jnp.pad(matrices, ((0, 0), (0, padding[0]), (0, padding[1]))))
    # Zeros stay zeros in Newton-Schulz: a device without a matrix computes, and moves nothing.
    empty = pool.num_devices - pool.num_matrices
    if empty:
        filled.append(jnp.zeros((empty, rows, columns), filled[0].dtype))
    return jnp.concatenate(filled)


def _read_pool(pool: MatrixPool, bucket: jax.Array) -> Iterator[tuple[MatrixRange, jax.Array]]:
    # One start more than there are ranges: where the padding begins.
    starts = itertools.accumulate((each.count for each in pool.ranges), initial=0)
    for each, start in zip(pool.ranges, starts, strict=False):
        short, long = each.sides
        matrices = bucket[start : start + each.count, :short, :long]
        yield each, matrices.swapaxes(1, 2) if each.rows > each.columns else matrices
