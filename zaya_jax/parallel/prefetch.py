"""Matrices of some layers whose rows are divided over the nodes, gathered while others are computed.

Every node has an equal part of the rows of every matrix. The matrices are gathered in one message, because
a collective over all nodes has a high latency; their gradients are summed in one message as well, each row by
the node that owns it.

Letters: r rows of this device, R rows of all nodes, X concatenated columns of all matrices of the message.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.parallel.mesh import NODES, exchange, gather
from zaya_jax.parallel.node import sum_shards


@dataclasses.dataclass(frozen=True)
class RowsOfNodes:
    """Description of arrays with one axis divided over the nodes.

    Attributes:
      axes: name and divided axis of each array.
      num_rows: length R of the divided axes, without padding to equal parts.
      dtype: type in which the arrays are sent and used.
    """

    axes: tuple[tuple[str, int], ...]
    num_rows: int
    dtype: str

    def gather(self, own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Gathers the whole arrays. Gradients are summed in float32, and each node keeps those of its rows.

        Args:
          own: this device's rows, float32, by name.
        """
        return _gather(self, dict(own))

    def pack(self, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Concatenates arrays into one, [rows, X], with the divided axes first."""
        parts = (jnp.moveaxis(arrays[name], axis, 0) for name, axis in self.axes)
        return jnp.concatenate([x.reshape(x.shape[0], -1) for x in parts], axis=1)

    def unpack(self, packed: jax.Array, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Splits a packed array: the inverse of `pack`.

        Args:
          packed: packed array, [rows, X].
          like: arrays with the shapes of the results, except for the number of rows.
        """
        arrays, start = {}, 0
        for name, axis in self.axes:
            shape = list(like[name].shape)
            size = like[name].size // shape.pop(axis)
            rows = lax.slice_in_dim(packed, start, start + size, axis=1)
            arrays[name] = jnp.moveaxis(rows.reshape(-1, *shape), 0, axis)
            start += size
        return arrays


# The transpose of the all-gather would sum gradients in the dtype of the message. The custom gradient adds up
# in float32 and needs no residuals, so that the gathered matrices of a layer are freed after its forward
# pass.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(rows: RowsOfNodes, own: dict[str, jax.Array]) -> dict[str, jax.Array]:
    # The cast precedes the collective, which then sends half as many bytes.
    packed_rX = rows.pack(own).astype(rows.dtype)
    whole_RX = gather(packed_rX, NODES, tiled=True)
    # Without the rows of padding, which make the parts of the nodes equal.
    return rows.unpack(whole_RX[: rows.num_rows], own)


def _gather_forward(rows: RowsOfNodes, own: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], None]:
    return _gather(rows, own), None


def _sum_backward(rows: RowsOfNodes, _: None, gradients: dict[str, jax.Array]) -> tuple[dict[str, jax.Array]]:
    packed_RX = rows.pack(gradients)
    padding = -rows.num_rows % lax.axis_size(NODES)
    return (rows.unpack(sum_shards(jnp.pad(packed_RX, ((0, padding), (0, 0))), NODES), gradients),)


_gather.defvjp(_gather_forward, _sum_backward)


def to_rows(whole: Mapping[str, jax.Array], axes: Mapping[str, int]) -> dict[str, jax.Array]:
    """Exchanges the whole matrices of each node, [U / nodes, ...], for its rows of all U matrices.

    All matrices are exchanged in one message.

    Args:
      whole: this node's matrices, in arrays of one type, by name.
      axes: axes of the matrices' rows, by name. Rows are padded to equal parts.
    """
    # `_by_node` flattens each matrix to [nodes, r, X], so that matrices of different shapes can be
    # concatenated.
    parts = [_by_node(whole[name], axis) for name, axis in axes.items()]
    sent = exchange(jnp.concatenate(parts, axis=2), NODES)
    arrays, start = {}, 0
    for (name, axis), part in zip(axes.items(), parts, strict=True):
        by_node = lax.slice_in_dim(sent, start, start + part.shape[2], axis=2)
        shape = list(whole[name].shape)
        shape.pop(axis)
        rows = jnp.moveaxis(by_node.reshape(*part.shape[:2], *shape), 1, axis + 1)
        arrays[name] = rows.reshape(-1, *rows.shape[2:])
        start += part.shape[2]
    return arrays


def _by_node(matrices: jax.Array, axis: int) -> jax.Array:
    """Returns the rows that each node receives, padded and flattened: [nodes, r, X]."""
    rows_first = jnp.moveaxis(matrices, axis, 0)
    num_nodes = lax.axis_size(NODES)
    padding = [(0, -rows_first.shape[0] % num_nodes), *((0, 0),) * (matrices.ndim - 1)]
    padded = jnp.pad(rows_first, padding)
    return padded.reshape(num_nodes, padded.shape[0] // num_nodes, -1)


def from_rows(rows: Mapping[str, jax.Array], axes: Mapping[str, int], num_rows: int) -> dict[str, jax.Array]:
    """Exchanges rows for whole matrices: the inverse of `to_rows`.

    Args:
      rows: this node's rows of all matrices, by name.
      axes: axes of the matrices' rows, by name.
      num_rows: number of rows of each matrix, without padding.
    """
    num_nodes = lax.axis_size(NODES)
    parts, shapes = [], []
    for name, axis in axes.items():
        by_node = rows[name].reshape(num_nodes, -1, *rows[name].shape[1:])
        rows_first = jnp.moveaxis(by_node, axis + 1, 1)
        shapes.append(rows_first.shape[2:])
        parts.append(rows_first.reshape(*rows_first.shape[:2], -1))
    sent = exchange(jnp.concatenate(parts, axis=2), NODES)
    arrays, start = {}, 0
    for (name, axis), part, shape in zip(axes.items(), parts, shapes, strict=True):
        own = lax.slice_in_dim(sent, start, start + part.shape[2], axis=2)
        arrays[name] = jnp.moveaxis(own.reshape(-1, *shape)[:num_rows], 0, axis)
        start += part.shape[2]
    return arrays
