"""NorMuon: Muon's update with about the same root mean square in each output neuron ([NorMuon] algorithm 1).

The state is the mean square of each neuron's part of the orthogonalized update. In a stack it has the shape
of the bucket, with size 1 along the axes of inputs. In a pool, where the outputs of some matrices are rows
and those of others columns, it is [U, N, W]: N devices of a node share the rows of a matrix, and each has W
values. These are the mean squares of its rows, or of all columns, whichever are the outputs.

Letters: U slots of a pool, R rows, C columns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zaya_jax.optim.matrices import matrix_sides, normalized
from zaya_jax.optim.partition import Bucket, FlatParameter, MatrixPool, MatrixRange, MatrixStack
from zaya_jax.parallel.bucket_layouts import sum_rows_in_node
from zaya_jax.parallel.mesh import local_shard


class NorMuonState(NamedTuple):
    """State of NorMuon: mean squares of neurons by bucket, float32."""

    mean_square: optax.Updates


def scale_by_neurons(
    buckets: Sequence[MatrixStack | MatrixPool], beta2: float, eps: float, *, rms: float
) -> optax.GradientTransformation:
    """Divides orthogonalized updates by the root mean square of each output neuron, averaged over steps.

    The mean is not bias-corrected: a common factor of all neurons has no effect on the result.

    Args:
      buckets: buckets of matrices; others are unchanged.
      beta2: decay rate of the mean square.
      eps: value added to its root.
      rms: root mean square of the elements of each matrix after the division.
    """
    named = {bucket.name: bucket for bucket in buckets}

    def init(params: Any) -> NorMuonState:
        return NorMuonState(
            {name: _zeros(named[name], x.shape) if name in named else x for name, x in params.items()}
        )

    def update(updates: optax.Updates, state: NorMuonState, params: Any = None) -> Any:
        del params
        scaled, means = dict(cast(Mapping, updates)), dict(cast(Mapping, state.mean_square))
        for name, bucket in named.items():
            x, mean = scaled[name], means[name]
            now = _mean_over_inputs(bucket, jnp.square(x), mean.shape[-1])
            means[name] = beta2 * mean + (1 - beta2) * now
            divided = x / (jnp.sqrt(_by_element(bucket, means[name], x.shape, _local(bucket))) + eps)
            scaled[name] = normalized(divided, bucket.axes, bucket.layout) * (rms * _root_of_size(bucket))
        return scaled, NorMuonState(means)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def values_by_slot(pool: MatrixPool, function: Callable[[MatrixRange], float]) -> np.ndarray:
    """A value of the matrix in each slot of a pool, shape [U, 1, 1]; 0 in slots after the last matrix."""
    values = np.zeros((pool.num_slots, 1, 1), np.float32)
    values[: pool.num_matrices, 0, 0] = [function(each) for each in pool.range_by_slot]
    return values


def to_elements(bucket: Bucket, state: jax.Array) -> jax.Array:
    """Repeats a neuron's mean square for all of its inputs, so that it can be repartitioned like weights.

    Args:
      bucket: bucket of a partition.
      state: state of the bucket over all devices; arrays in the shape of the bucket are returned unchanged.
    """
    shape = (state.shape[0], *bucket.shape[1:])
    if isinstance(bucket, FlatParameter) or state.shape == shape:
        return state
    return jnp.broadcast_to(_by_element(bucket, state, shape, _everywhere(bucket, len(state))), shape)


def from_elements(bucket: Bucket, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `to_elements`.

    Args:
      bucket: bucket of a partition.
      x: array in the shape of the bucket over all devices.
      shape: shape of the state; with that of `x` it is returned unchanged.
    """
    if x.shape == shape or isinstance(bucket, FlatParameter):
        return x
    # The maximum, because all inputs have the same value, except padding, which is 0.
    if isinstance(bucket, MatrixStack):
        return x.max(bucket.axes.inputs, keepdims=True)
    num_slots, num_parts, width = shape
    rows = _padded(x.max(2).reshape(num_slots, num_parts, -1), width)
    columns = _padded(x.max(1, keepdims=True), width)
    return jnp.where(_everywhere(bucket, num_slots), rows, columns)


def _zeros(bucket: MatrixStack | MatrixPool, shape: tuple[int, ...]) -> jax.Array:
    """State before the first update, for a bucket over all devices or a device's part of it."""
    if isinstance(bucket, MatrixStack):
        return jnp.zeros(
            [1 if i in bucket.axes.inputs else size for i, size in enumerate(shape)], jnp.float32
        )
    num_slots, rows, columns = shape
    rows_per_device = bucket.shape[1] // bucket.rows_divide
    return jnp.zeros((num_slots, rows // rows_per_device, max(rows_per_device, columns)), jnp.float32)


def _mean_over_inputs(bucket: MatrixStack | MatrixPool, x: jax.Array, width: int) -> jax.Array:
    """Means over the inputs of matrices, without padding, in the shape of a device's state."""
    if isinstance(bucket, MatrixStack):
        return x.mean(bucket.axes.inputs, keepdims=True)
    num_inputs = local_shard(values_by_slot(bucket, lambda each: each.rows), bucket.layout.axes)
    rows = _padded(x.sum(2, keepdims=True).swapaxes(1, 2), width)
    columns = _padded(sum_rows_in_node(x.sum(1, keepdims=True), bucket.layout), width)
    return jnp.where(_local(bucket), rows, columns) / jnp.maximum(num_inputs, 1)


def _by_element(
    bucket: MatrixStack | MatrixPool, state: jax.Array, shape: tuple[int, ...], outputs_are_rows: Any
) -> jax.Array:
    """Mean squares of the neurons of a bucket of this shape, which broadcast to its elements."""
    if isinstance(bucket, MatrixStack):
        return state
    num_slots, rows, columns = shape
    of_rows = state[:, :, : rows // state.shape[1]].reshape(num_slots, rows, 1)
    return jnp.where(outputs_are_rows, of_rows, state[:, :1, :columns])


def _root_of_size(bucket: MatrixStack | MatrixPool) -> float | jax.Array:
    """Square root of the number of elements of each matrix, without padding."""
    if isinstance(bucket, MatrixStack):
        return math.prod(matrix_sides(bucket.shape, bucket.axes)) ** 0.5
    roots_U11 = np.sqrt(values_by_slot(bucket, lambda each: each.rows * each.columns))
    return local_shard(roots_U11, bucket.layout.axes)


def _outputs_are_rows(pool: MatrixPool) -> np.ndarray:
    # As `buckets._fill_pool` transposes matrices, so that rows are the shorter side.
    return values_by_slot(pool, lambda each: each.rows > each.columns) > 0


def _local(bucket: MatrixStack | MatrixPool) -> Any:
    """Whether outputs are rows, for each slot of this device, [U, 1, 1]; None for a stack."""
    if isinstance(bucket, MatrixStack):
        return None
    return local_shard(_outputs_are_rows(bucket), bucket.layout.axes)


def _everywhere(bucket: MatrixStack | MatrixPool, num_slots: int) -> Any:
    """Like `_local` for all devices, each of which has the same slots if a node shares its experts."""
    if isinstance(bucket, MatrixStack):
        return None
    return np.resize(_outputs_are_rows(bucket), (num_slots, 1, 1))


def _padded(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2])))
