"""Conversion of weights to the buckets of a partition (`zaya_jax.optim.partition`) and back."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from zaya_jax.model.weights import EXPERTS, Weight
from zaya_jax.optim.matrices import from_matrices, matrix_axes, to_matrices
from zaya_jax.optim.partition import FlatParameter, MatrixPool, MatrixRange, Partition, is_shared
from zaya_jax.parallel.bucket_layouts import BucketLayout


def to_buckets(partition: Partition, tree: Mapping) -> dict[str, jax.Array]:
    """Converts a tree like the weights to buckets over all devices; missing weights have no buckets."""
    flat: dict[str, Any] = cast(Any, flatten_dict(tree, sep="/"))
    weights, count = dict(partition.weights), partition.node_devices
    shared = {path for path in flat if is_shared(weights[path], count)}
    buckets = _fill(partition, {path: x for path, x in flat.items() if path not in shared})
    # One bucket per device of a node, along a mapped axis, so that devices are independent.
    parts = {path: _to_devices(weights[path], flat[path], count) for path in shared}
    of_devices = jax.vmap(functools.partial(_fill, partition))(parts) if parts else {}
    return buckets | {name: x.reshape(-1, *x.shape[2:]) for name, x in of_devices.items()}


def from_buckets(partition: Partition, buckets: Mapping[str, jax.Array]) -> dict:
    """Inverse of `to_buckets`; weights without buckets are missing in the tree."""
    weights, count = dict(partition.weights), partition.node_devices
    shared = {name for name, layout in partition.layouts.items() if layout is BucketLayout.OWN_EXPERTS} & set(
        buckets
    )
    flat = _read(partition, {name: x for name, x in buckets.items() if name not in shared})
    # In the order of `SHARDED_BY_NODE`: all shares of one device's experts, then those of the next.
    of_devices = {name: buckets[name].reshape(count, -1, *buckets[name].shape[1:]) for name in shared}
    parts = jax.vmap(functools.partial(_read, partition))(of_devices) if shared else {}
    return unflatten_dict(
        flat | {path: _from_devices(weights[path], x) for path, x in parts.items()}, sep="/"
    )


def to_own_buckets(
    partition: Partition, tree: Mapping, *, without: Container[str] = ()
) -> dict[str, jax.Array]:
    """Converts the weights that one device of a node stores, with its own experts, to buckets.

    Args:
      partition: partition of all weights.
      tree: weights of the device.
      without: names of buckets to omit.
    """
    return _fill(partition, cast(Any, flatten_dict(tree, sep="/")), without=without)


def from_own_buckets(partition: Partition, buckets: Mapping[str, jax.Array]) -> dict:
    """Weights of a device as a tree, from its buckets; the inverse of `to_own_buckets`."""
    return unflatten_dict(_read(partition, buckets), sep="/")


def _to_devices(weight: Weight, x: jax.Array, count: int) -> jax.Array:
    """Experts of each device of a node, shape [devices, ...], padded with zeros to equal shares."""
    axis = weight.axes.index(EXPERTS)
    # Padding stays zero: it has no gradient, and Muon and AdamW do not change zeros.
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % count)
    padded = jnp.pad(x, padding)
    parts = padded.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)


def _from_devices(weight: Weight, parts: jax.Array) -> jax.Array:
    """Experts of all devices of a node as one array, without padding; the inverse of `_to_devices`."""
    axis = weight.axes.index(EXPERTS)
    joined = jnp.moveaxis(parts, 0, axis)
    joined = joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
    return lax.slice_in_dim(joined, 0, weight.shape[axis], axis=axis)


def _fill(
    partition: Partition, flat: Mapping[str, Any], *, without: Container[str] = ()
) -> dict[str, jax.Array]:
    """Buckets of weights by path, as one device of a node stores them."""
    weights = partition.own_weights
    buckets = {}
    for stack in partition.stacks:
        if stack.name in flat and stack.name not in without:
            buckets[stack.name] = flat[stack.name].reshape(-1, *stack.unit)[: stack.num_units]
    for pool in partition.pools:
        # Trees of moments contain all matrices or none, so checking the first of a pool is enough.
        if pool.ranges[0].path in flat and pool.name not in without:
            buckets[pool.name] = _fill_pool(pool, weights, flat)
    for parameter in (*partition.flat_parameters, *partition.frozen):
        if parameter.name in flat:
            padding = math.prod(parameter.shape) - parameter.size
            vector = jnp.pad(flat[parameter.name].reshape(-1), (0, padding))
            buckets[parameter.name] = vector.reshape(parameter.shape)
    return buckets


def _read(partition: Partition, buckets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Weights by path, as one device of a node stores them, from buckets."""
    weights = partition.own_weights
    flat: dict[str, jax.Array] = {}
    pieces: dict[str, list[jax.Array]] = defaultdict(list)
    # Stacks before pools, so that the pieces of a weight are in the order of its matrices.
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
            # No matrices in pools: a reshape is enough, and avoids two transposes.
            flat[bucket.name] = x.reshape(weights[bucket.name].shape)
        else:
            pieces[bucket.name].append(to_matrices(x, bucket.axes))
    for path, matrices in pieces.items():
        flat[path] = from_matrices(jnp.concatenate(matrices), matrix_axes(weights[path]), weights[path].shape)
    return flat


def split(partition: Partition, params: Mapping) -> tuple[Mapping, Mapping]:
    """Splits weights into those that train and those that are frozen."""
    if not partition.frozen:
        return params, {}
    frozen = {each.name for each in partition.frozen}
    flat = flatten_dict(params, sep="/")
    trained = {path: x for path, x in flat.items() if path not in frozen}
    rest = {path: x for path, x in flat.items() if path in frozen}
    return unflatten_dict(trained, sep="/"), unflatten_dict(rest, sep="/")


def join(trained: Mapping, frozen: Mapping) -> Mapping:
    """One tree of the weights that train and those that are frozen; the inverse of `split`."""
    if not frozen:
        return trained
    return unflatten_dict(flatten_dict(trained, sep="/") | flatten_dict(frozen, sep="/"), sep="/")


def _fill_pool(pool: MatrixPool, weights: Mapping[str, Weight], flat: Mapping[str, Any]) -> jax.Array:
    _, rows, columns = pool.shape
    filled = []
    for each in pool.ranges:
        matrices = to_matrices(flat[each.path], matrix_axes(weights[each.path]))[each.start : each.stop]
        # Transposed so that rows are the shorter side: orthogonalization commutes with the transpose.
        matrices = matrices.swapaxes(1, 2) if each.rows > each.columns else matrices
        padding = (rows - matrices.shape[1], columns - matrices.shape[2])
        filled.append(jnp.pad(matrices, ((0, 0), (0, padding[0]), (0, padding[1]))))
    # Zeros stay zeros in Newton-Schulz, so an empty slot is computed but has no effect.
    empty = pool.num_slots - pool.num_matrices
    if empty:
        filled.append(jnp.zeros((empty, rows, columns), filled[0].dtype))
    return jnp.concatenate(filled)


def _read_pool(pool: MatrixPool, bucket: jax.Array) -> Iterator[tuple[MatrixRange, jax.Array]]:
    # `accumulate` yields one more start than there are ranges: the start of the padding.
    starts = itertools.accumulate((each.count for each in pool.ranges), initial=0)
    for each, start in zip(pool.ranges, starts, strict=False):
        short, long = each.sides
        matrices = bucket[start : start + each.count, :short, :long]
        yield each, matrices.swapaxes(1, 2) if each.rows > each.columns else matrices
