"""The device mesh, shardings, and collectives over all devices.

Each device has its own rows of the batch, or a part of the tokens of these rows. Gradients and the
optimizer's buckets are sharded over all axes as if these were one. `zaya_jax.parallel.context` has the
collectives between devices that share a sequence, `zaya_jax.parallel.node` those between the devices of a
node.

Imports only jax and numpy, so that every package may use it.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax.errors import UserError

# Data and context have two axes each, because a node may have fewer or more devices than a sequence is split
# over. At least one of the four axes has size 1.
DATA, CONTEXT = ("data", "data_in_node"), ("context", "context_in_node")
"""Axes of devices with different rows, and of devices with different tokens of the same rows."""
NODES, IN_NODE = (DATA[0], CONTEXT[0]), (DATA[1], CONTEXT[1])
"""Axes of devices with the same index in different nodes, and of the devices of one node."""
ALL = (*DATA, *CONTEXT)
REPLICATED = PartitionSpec()
"""Each device has the whole array."""
SHARDED = PartitionSpec(ALL)
"""Each device has its shard of the first dimension."""
SHARDED_BY_NODE = PartitionSpec((*IN_NODE, *NODES))
"""Each device has its shard of the first dimension, divided first among the devices of a node: those
with the same index in their nodes have adjacent shards."""
BATCH = PartitionSpec(DATA, CONTEXT)
"""Each device has its tokens of its rows."""
SLOTS = PartitionSpec(None, CONTEXT)
"""Sharding of a cache pool: each device has its slots of all rows."""
STREAMS: dict[tuple[str, ...], str] = {IN_NODE: "0", NODES: "1"}
"""XLA's communication stream of collectives along some axes. Collectives of one stream run one after the
other. Those in a node and those between nodes use different links, and overlap on two streams."""
SUM_DTYPE = "float32"
"""Type in which gradients are summed across devices. Communication libraries round to the type of their input
at each hop: in bfloat16 a ring of 1,024 devices loses 64% of a common gradient
(`notebooks/gradient_sum.py`)."""


def data_mesh(
    devices: Sequence[Any] | None = None, *, context_devices: int = 1, node_devices: int = 1
) -> Mesh:
    """Returns the mesh of the given devices, with the axes `ALL`.

    The devices of a process are adjacent, so that it reads adjacent rows. Those of a sequence and of a node,
    which communicate in every layer, are adjacent as well.

    Args:
      devices: devices of the mesh; their number is a multiple of `context_devices` and of `node_devices`.
        None for all devices.
      context_devices: number of devices that share the tokens of a sequence.
      node_devices: number of devices that share the experts.

    Raises:
      UserError: if the devices cannot be divided like this.
    """
    devices = jax.devices() if devices is None else devices
    check_node_devices(len(devices), context_devices, node_devices)
    # jax.devices() is not sorted by process on every backend.
    in_order = sorted(devices, key=lambda each: (each.process_index, each.id))
    return _mesh(np.array(in_order), context_devices, node_devices)


def _mesh(devices: np.ndarray, context_devices: int, node_devices: int) -> Mesh:
    # A node has several sequences, or a sequence spans several nodes; `check_node_devices` allows nothing
    # else.
    rows = max(node_devices // context_devices, 1)
    tokens = min(node_devices, context_devices)
    return Mesh(devices.reshape(-1, rows, context_devices // tokens, tokens), ALL)


def size_of(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along some axes of a mesh."""
    return math.prod(mesh.shape[axis] for axis in axes)


def node_size(mesh: Mesh) -> int:
    """Returns the number of devices of a node that share the experts; 1 if each device has all experts."""
    return size_of(mesh, IN_NODE)


def context_mesh(context_devices: int) -> Mesh:
    """Returns a mesh of the first devices of this process, which share the cache of one batch.

    Args:
      context_devices: number of devices.

    Raises:
      UserError: if this process has fewer devices.
    """
    devices = jax.local_devices()
    if not 1 <= context_devices <= len(devices):
        raise UserError(
            f"context_devices is {context_devices}; it must be from 1 to {len(devices)}, the devices here"
        )
    return data_mesh(devices[:context_devices], context_devices=context_devices)


def with_context(mesh: Mesh, context_devices: int) -> Mesh:
    """Returns the mesh with another number of devices per sequence.

    The order of the devices is the same, so that arrays sharded over all devices stay in place.

    Raises:
      UserError: if a process would have different tokens of one sequence than of another.
    """
    node_devices = node_size(mesh)
    check_node_devices(mesh.size, context_devices, node_devices)
    shared = _mesh(mesh.devices.reshape(-1), context_devices, node_devices)
    processes = _processes(shared)
    for process in np.unique(processes).tolist():
        mine = processes == process
        # A process reads a rectangle of rows and tokens: `local_rows` times `local_tokens`.
        if np.any(mine != mine.any(axis=1, keepdims=True) & mine.any(axis=0)):
            raise UserError(
                f"execution.context_devices is {context_devices}, and process {process} has {mine.sum()} "
                "devices; one must be a multiple of the other"
            )
    return shared


def local_rows(mesh: Mesh, batch_size: int, *, process: int | None = None) -> range:
    """Returns the rows of a batch that a process reads.

    Processes that share sequences read the same rows, and each reads only its `local_tokens` of them.

    Args:
      mesh: devices of all processes.
      batch_size: number of rows of the batch.
      process: number of the process; None for this one.
    """
    own = _indices(mesh, process, across=CONTEXT)
    rows_per_device = batch_size // size_of(mesh, DATA)
    return range(own.start * rows_per_device, own.stop * rows_per_device)


def local_tokens(mesh: Mesh, num_tokens: int, *, process: int | None = None) -> np.ndarray | None:
    """Returns the sorted positions of the tokens of its rows that a process reads; None for all of them."""
    own, ranks = _indices(mesh, process, across=DATA), size_of(mesh, CONTEXT)
    if len(own) == ranks:
        return None
    order = zigzag_order(num_tokens, ranks).reshape(ranks, -1)
    return np.sort(order[own.start : own.stop], axis=None)


def place_rows(tree: Any, mesh: Mesh) -> Any:
    """Assembles global arrays, sharded as `batch_sharding`, from the parts that each process has read.

    If devices share a sequence, each gets the tokens of its two chunks (`zaya_jax.parallel.context`).

    Args:
      tree: arrays [rows, tokens, ...] with this process' `local_rows` and `local_tokens`.
      mesh: devices of all processes.
    """

    def place(rows: np.ndarray) -> jax.Array:
        shape = *_global_shape(rows, mesh), *rows.shape[2:]
        shard = functools.partial(_part_of_rows, rows, mesh)
        return jax.make_array_from_callback(shape, batch_sharding(mesh), shard)

    return jax.tree.map(place, tree)


def place_row_values(
    tree: Any, mesh: Mesh, function: Callable[[Any], np.ndarray], *, num_values: int
) -> jax.Array:
    """Places values of each row's parts on their devices, [rows, devices of a sequence, num_values].

    Args:
      tree: arrays as for `place_rows`.
      mesh: devices of all processes.
      function: returns values [rows of a device, num_values] of the parts that `place_rows` sends to it.
      num_values: number of values of a row.
    """
    num_rows, length = _global_shape(jax.tree.leaves(tree)[0], mesh)
    ranks = size_of(mesh, CONTEXT)

    def shard(index: Any) -> np.ndarray:
        rows, rank = index[0], index[1].start or 0
        tokens = slice(rank * length // ranks, (rank + 1) * length // ranks)
        return function(jax.tree.map(lambda x: _part_of_rows(x, mesh, (rows, tokens)), tree))[:, None]

    return jax.make_array_from_callback((num_rows, ranks, num_values), batch_sharding(mesh), shard)


def _global_shape(rows: np.ndarray, mesh: Mesh) -> tuple[int, int]:
    """Returns the numbers of rows and tokens of a batch, of which a process has read `rows`."""
    own, own_ranks = (_indices(mesh, None, across=axes) for axes in (CONTEXT, DATA))
    return (
        rows.shape[0] // len(own) * size_of(mesh, DATA),
        rows.shape[1] * size_of(mesh, CONTEXT) // len(own_ranks),
    )


def _part_of_rows(rows: np.ndarray, mesh: Mesh, index: Any) -> np.ndarray:
    """Returns the part of one device, from its indices in the batch, of what a process has read."""
    own, (num_rows, length) = _indices(mesh, None, across=CONTEXT), _global_shape(rows, mesh)
    order, positions = zigzag_order(length, size_of(mesh, CONTEXT)), local_tokens(mesh, length)
    rows_per_device = num_rows // size_of(mesh, DATA)
    global_rows, tokens, *_ = index  # further axes are not sharded
    first = (global_rows.start or 0) - own.start * rows_per_device
    columns = order[tokens] if positions is None else np.searchsorted(positions, order[tokens])
    return rows[first : first + rows_per_device, columns]


def _indices(mesh: Mesh, process: int | None, *, across: tuple[str, ...]) -> range:
    """Returns the indices of a process' devices along the axes other than `across`; they are contiguous."""
    is_own = _processes(mesh) == (jax.process_index() if process is None else process)
    indices = np.flatnonzero(is_own.any(axis=0 if across == DATA else 1))
    return range(int(indices[0]), int(indices[-1]) + 1)


def _processes(mesh: Mesh) -> np.ndarray:
    """Returns the process number of each device, [data, context]."""
    devices = mesh.devices.reshape(size_of(mesh, DATA), -1)
    return np.vectorize(lambda device: device.process_index, otypes=[int])(devices)


def zigzag_order(num_tokens: int, ranks: int) -> np.ndarray:
    """Returns the order in which the tokens of a sequence are split over its C devices.

    Of 2*C chunks device r has chunks r and 2*C - 1 - r. Since a token attends to all tokens before it, an
    early and a late chunk together are the same amount of work on every device ([Llama3] section 3.3.2).

    Args:
      num_tokens: length of the sequence, a multiple of 2*C; any number if C is 1.
      ranks: number of devices of a sequence, C.

    Returns:
      Positions in the sequence, [num_tokens]; each device has an equal, contiguous part of this array.
    """
    if ranks == 1:
        return np.arange(num_tokens)
    chunks = np.arange(num_tokens).reshape(2 * ranks, -1)
    return np.stack([chunks[:ranks], chunks[: ranks - 1 : -1]], axis=1).reshape(-1)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device has whole."""
    return NamedSharding(mesh, REPLICATED)


def sharded(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the optimizer's buckets: the first dimension over all devices."""
    return NamedSharding(mesh, SHARDED)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch [B, T]: rows over the data axes, tokens over the context axes."""
    return NamedSharding(mesh, BATCH)


def replicated_like(array: jax.Array) -> jax.sharding.Sharding:
    """Returns the sharding of an array that all devices of another array hold whole."""
    if isinstance(array.sharding, NamedSharding):
        return NamedSharding(array.sharding.mesh, REPLICATED)
    (device,) = array.devices()
    return jax.sharding.SingleDeviceSharding(device)


def named_shardings(specs: Any, mesh: Mesh) -> Any:
    """Returns the shardings of a tree of partition specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def check_node_devices(num_devices: int, context_devices: int, node_devices: int) -> None:
    """Checks that devices can be divided into nodes and sequences.

    Args:
      num_devices: total number of devices.
      context_devices: number of devices that share a sequence.
      node_devices: number of devices of a node.

    Raises:
      UserError: unless `node_devices` divides all devices, and it divides `context_devices` or is a multiple.
    """
    if num_devices % node_devices:
        raise UserError(
            f"execution.node_devices is {node_devices}; it must divide the number of devices, {num_devices}"
        )
    if max(node_devices, context_devices) % min(node_devices, context_devices):
        raise UserError(
            f"execution.node_devices is {node_devices} and execution.context_devices {context_devices}; one "
            "must be a multiple of the other"
        )


def check_batch_size(
    batch_size: int, num_microbatches: int, num_devices: int, context_devices: int = 1
) -> None:
    """Checks that the rows of a batch can be split evenly over devices and microbatches.

    Raises:
      UserError: unless the batch size is a multiple of `num_batch_parts`.
    """
    if num_devices % context_devices:
        raise UserError(
            f"execution.context_devices is {context_devices}; it must divide the number of devices, "
            f"{num_devices}"
        )
    if batch_size % num_batch_parts(num_microbatches, num_devices, context_devices):
        raise UserError(
            f"data.batch_size is {batch_size}; it must be a multiple of "
            f"{describe_batch_parts(num_microbatches, num_devices, context_devices)}"
        )


def num_batch_parts(num_microbatches: int, num_devices: int, context_devices: int = 1) -> int:
    """Returns the number of parts that the rows of a batch are split into."""
    return num_devices // context_devices * num_microbatches


def describe_batch_parts(num_microbatches: int, num_devices: int, context_devices: int = 1) -> str:
    """Returns that number and its factors as text."""
    parts = num_batch_parts(num_microbatches, num_devices, context_devices)
    shared = f" ({context_devices} per sequence)" if context_devices > 1 else ""
    return f"{parts}: {num_devices} devices{shared} times {num_microbatches} microbatches"


def on_each_device(
    function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Maps a function over the devices with `jax.shard_map`.

    Within the function every array is the part on one device; the collectives below communicate.

    Args:
      function: function of per-device arrays.
      mesh: devices.
      in_specs: partition specs of the arguments.
      out_specs: partition specs of the results.
    """
    # check_vma would insert a sum over devices at each use of a weight; here each sum is written out, once.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def all_reduce(tree: Any) -> Any:
    """Sums over all devices. For scalars and counts; weight-sized arrays should use `reduce_scatter`."""
    return tree if _is_single() else lax.psum(tree, ALL)


def reduce_scatter(tree: Any) -> Any:
    """Sums over all devices in float32; each device keeps its shard of the first dimension."""
    tree = jax.tree.map(lambda x: x.astype(SUM_DTYPE), tree)
    if _is_single():
        return tree
    return jax.tree.map(lambda x: sum_scatter(x, ALL, tiled=True), tree)


def sum_scatter(x: jax.Array, axes: tuple[str, ...], *, tiled: bool = False) -> jax.Array:
    """`lax.psum_scatter` of the first dimension, with correct sums between processes on CPUs too."""
    if not _uses_gloo():
        return lax.psum_scatter(x, axes, tiled=tiled)
    # gloo's reduce-scatter in jaxlib 0.10.2 returns wrong sums of 256 KiB and more next to other collectives.
    count = lax.axis_size(axes)
    shards = x.reshape(count, x.shape[0] // count, *x.shape[1:])
    summed = jnp.sum(lax.all_to_all(shards, axes, 0, 0), axis=0)
    return summed if tiled else summed[0]


def _uses_gloo() -> bool:
    return jax.distributed.is_initialized() and jax.default_backend() == "cpu"


def all_gather(tree: Any, axes: tuple[str, ...] = ALL) -> Any:
    """Gathers whole arrays on all devices along some axes from their shards of the first dimension."""
    if _is_single(axes):
        return tree
    return jax.tree.map(lambda x: gather(x, axes, tiled=True), tree)


def gather(x: jax.Array, axes: tuple[str, ...], **options: Any) -> jax.Array:
    """`lax.all_gather` on the stream of its links."""
    with _on_stream(axes):
        return lax.all_gather(x, axes, **options)


def exchange(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`lax.all_to_all` of the first dimension on the stream of its links."""
    with _on_stream(axes):
        return lax.all_to_all(x, axes, 0, 0)


def _on_stream(axes: tuple[str, ...]) -> contextlib.AbstractContextManager:
    # Other backends ignore the attribute. No order of execution can deadlock: a group of devices in a node
    # and one of devices in different nodes have one device in common, and a cycle of waiting needs two.
    stream = STREAMS.get(axes)
    return contextlib.nullcontext() if stream is None else set_xla_metadata(_xla_stream_annotation=stream)


def local_shard(values: np.ndarray, axes: tuple[str, ...] = ALL) -> jax.Array:
    """Returns this device's shard, along some axes, of a constant's first dimension."""
    if _is_single(axes):
        return jnp.asarray(values)
    count = values.shape[0] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(jnp.asarray(values), lax.axis_index(axes) * count, count)


def place_among_rows() -> tuple[jax.Array, int]:
    """Returns this device's place among those with different rows, and their number."""
    return lax.axis_index(DATA), lax.axis_size(DATA)


def device_number() -> jax.Array:
    """Returns the number of this device in the mesh, within `on_each_device`."""
    return lax.axis_index(ALL)


def _is_single(axes: tuple[str, ...] = ALL) -> bool:
    # On some backends a collective over one device still copies, and prevents fusions across it.
    return lax.axis_size(axes) == 1
