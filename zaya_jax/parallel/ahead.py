"""A layer's matrices, sent between nodes while another layer is computed.

Of every matrix each node has as many rows. A layer's come together in one message, since each one has to go
around all nodes; its gradients part in one as well, to be added up by those whose rows they are of.

Letters: r rows of this device, R of all nodes, X what lies behind a row of all matrices of the layer.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from zaya_jax.parallel.mesh import NODES
from zaya_jax.parallel.node import sum_shards


@dataclasses.dataclass(frozen=True)
class RowsOfNodes:
    """Arrays of which one axis each is cut over the nodes.

    Attributes:
      axes: that are cut, by the arrays' names.
      num_rows: R, of all of these axes, before they were padded to equal parts.
      dtype: in which arrays travel, and are used.
    """

    axes: tuple[tuple[str, int], ...]
    num_rows: int
    dtype: str

    def gather(self, own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The whole arrays; their gradients are added up in float32, and each node keeps its rows' sums.

        Args:
          own: this device's rows, float32, by name.
        """
        return _gather(self, dict(own))

    def pack(self, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """One array [rows, X] of some, the cut axes first."""
        parts = (jnp.moveaxis(arrays[name], axis, 0) for name, axis in self.axes)
        return jnp.concatenate([x.reshape(x.shape[0], -1) for x in parts], axis=1)

    def unpack(self, packed: jax.Array, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """`pack` undone, of arrays that are like some but for their number of rows."""
        found, start = {}, 0
        for name, axis in self.axes:
            shape = list(like[name].shape)
            size = like[name].size // shape.pop(axis)
            rows = lax.slice_in_dim(packed, start, start + size, axis=1)
            found[name] = jnp.moveaxis(rows.reshape(-1, *shape), 0, axis)
            start += size
        return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(rows: RowsOfNodes, own: dict[str, jax.Array]) -> dict[str, jax.Array]:
    # Cast before it is sent: half the bytes on the way.
    packed_rX = rows.pack(own).astype(rows.dtype)
    whole_RX = lax.all_gather(packed_rX, NODES, tiled=True)
    return rows.unpack(whole_RX[: rows.num_rows], own)


def _gather_forward(rows: RowsOfNodes, own: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], None]:
    return _gather(rows, own), None


def _sum_backward(rows: RowsOfNodes, _: None, gradients: dict[str, jax.Array]) -> tuple[dict[str, jax.Array]]:
    packed_RX = rows.pack(gradients)
    padding = -rows.num_rows % lax.axis_size(NODES)
    return (rows.unpack(sum_shards(jnp.pad(packed_RX, ((0, padding), (0, 0))), NODES), gradients),)


_gather.defvjp(_gather_forward, _sum_backward)


def to_rows(whole: Mapping[str, jax.Array], axes: Mapping[str, int]) -> dict[str, jax.Array]:
    """This node's rows of the matrices of all, [U, ...], of which it has [U / nodes, ...] whole; one message.

    Args:
      whole: its own matrices, in arrays of one type by name.
      axes: of the matrices' rows, by the same names; padded to equal parts.
    """
    parts = [_by_node(whole[name], axis) for name, axis in axes.items()]
    sent = lax.all_to_all(jnp.concatenate(parts, axis=2), NODES, 0, 0)
    found, start = {}, 0
    for (name, axis), part in zip(axes.items(), parts, strict=True):
        of_nodes = lax.slice_in_dim(sent, start, start + part.shape[2], axis=2)
        shape = list(whole[name].shape)
        shape.pop(axis)
        rows = jnp.moveaxis(of_nodes.reshape(*part.shape[:2], *shape), 1, axis + 1)
        found[name] = rows.reshape(-1, *rows.shape[2:])
        start += part.shape[2]
    return found


def _by_node(matrices: jax.Array, axis: int) -> jax.Array:
    """[nodes, r, X]: the rows that each node is to have."""
    rows_first = jnp.moveaxis(matrices, axis, 0)
    num_nodes = lax.axis_size(NODES)
    padding = [(0, -rows_first.shape[0] % num_nodes), *((0, 0),) * (matrices.ndim - 1)]
    padded = jnp.pad(rows_first, padding)
    return padded.reshape(num_nodes, padded.shape[0] // num_nodes, -1)


def from_rows(rows: Mapping[str, jax.Array], axes: Mapping[str, int], num_rows: int) -> dict[str, jax.Array]:
    """`to_rows` undone: the node's own matrices whole, of this many rows each."""
    num_nodes = lax.axis_size(NODES)
    parts, shapes = [], []
    for name, axis in axes.items():
        of_nodes = rows[name].reshape(num_nodes, -1, *rows[name].shape[1:])
        rows_first = jnp.moveaxis(of_nodes, axis + 1, 1)
        shapes.append(rows_first.shape[2:])
        parts.append(rows_first.reshape(*rows_first.shape[:2], -1))
    sent = lax.all_to_all(jnp.concatenate(parts, axis=2), NODES, 0, 0)
    found, start = {}, 0
    for (name, axis), part, shape in zip(axes.items(), parts, shapes, strict=True):
        own = lax.slice_in_dim(sent, start, start + part.shape[2], axis=2)
        found[name] = jnp.moveaxis(own.reshape(-1, *shape)[:num_rows], 0, axis)
        start += part.shape[2]
    return found
