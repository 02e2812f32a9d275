"""A mesh of devices, and the collectives on it: each device has its own rows of the batch, or parts of them.

What is of all devices alike, gradients and the optimiser's buckets, goes over all axes as if they were one.
What the devices of one sequence say to each other is in `zaya_jax.parallel.context`, what those of one node
say in `zaya_jax.parallel.node`.

Imports jax and numpy alone, so that any room may call it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Two axes each, for a node is smaller or larger than the devices of a sequence: one of the four has size 1.
DATA, CONTEXT = ("data", "data_in_node"), ("context", "context_in_node")
"""Devices with other rows, and devices with other tokens of the same rows."""
NODES, IN_NODE = (DATA[0], CONTEXT[0]), (DATA[1], CONTEXT[1])
"""Devices of the same number in their nodes, and those of one node."""
ALL = (*DATA, *CONTEXT)
REPLICATED = PartitionSpec()
"""Each device has all of it."""
SHARDED = PartitionSpec(ALL)
"""Each device has its shard of the first axis."""
SHARDED_BY_NODE = PartitionSpec((*IN_NODE, *NODES))
"""The same, of what the devices of a node share: those of one number in their nodes are neighbours in it."""
BATCH = PartitionSpec(DATA, CONTEXT)
"""Each device has its tokens of its rows."""
SLOTS = PartitionSpec(None, CONTEXT)
"""Of a cache's pool: each device has its slots of all rows."""
SUM_DTYPE = "float32"
"""Of gradients on their way. The library that sums them rounds at each hop to the type that it is given: in
bfloat16 a ring of 1,024 devices loses 64% of what they agree on (`zaya bench gradient-sum`)."""


def data_mesh(
    devices: Sequence[Any] | None = None, *, context_devices: int = 1, node_devices: int = 1
) -> Mesh:
    """A mesh of the given devices, all by default, along axes of data and of context.

    Those of a process are neighbours, so that the rows it reads are; and those of a sequence and of a node,
    which speak to each other in every layer.

    Args:
      devices: as many as a multiple of `context_devices` and of `node_devices`.
      context_devices: that share the tokens of a sequence.
      node_devices: that share the experts.

    Raises:
      ValueError: unless the devices can be shared so.
    """
    devices = jax.devices() if devices is None else devices
    check_node_devices(len(devices), context_devices, node_devices)
    in_order = sorted(devices, key=lambda each: (each.process_index, each.id))
    return _mesh(np.array(in_order), context_devices, node_devices)


def _mesh(devices: np.ndarray, context_devices: int, node_devices: int) -> Mesh:
    rows = max(node_devices // context_devices, 1)
    tokens = min(node_devices, context_devices)
    return Mesh(devices.reshape(-1, rows, context_devices // tokens, tokens), ALL)


def size_of(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """How many devices a mesh has along some of its axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def node_size(mesh: Mesh) -> int:
    """How many devices of a node share the experts; 1 where each has all."""
    return size_of(mesh, IN_NODE)


def context_mesh(context_devices: int) -> Mesh:
    """The first devices of this process, for one batch whose cache they share.

    Raises:
      ValueError: if there are not so many.
    """
    devices = jax.local_devices()
    if not 1 <= context_devices <= len(devices):
        raise ValueError(
            f"context_devices is {context_devices}; it must be from 1 to {len(devices)}, the devices here"
        )
    return data_mesh(devices[:context_devices], context_devices=context_devices)


def with_context(mesh: Mesh, context_devices: int) -> Mesh:
    """The same devices in the same order, so many a sequence: what is sharded over all stays in place.

    Raises:
      ValueError: if a process had other tokens of one sequence than of another.
    """
    node_devices = node_size(mesh)
    check_node_devices(mesh.size, context_devices, node_devices)
    shared = _mesh(mesh.devices.reshape(-1), context_devices, node_devices)
    processes = _processes(shared)
    for process in np.unique(processes).tolist():
        mine = processes == process
        if np.any(mine != mine.any(axis=1, keepdims=True) & mine.any(axis=0)):
            raise ValueError(
                f"execution.context_devices is {context_devices}, and process {process} has {mine.sum()} "
                "devices; one must be a multiple of the other"
            )
    return shared


def local_rows(mesh: Mesh, batch_size: int, *, process: int | None = None) -> range:
    """The rows of a batch that a process is to read, this one when None.

    Those which share a sequence read the same rows, each its `local_tokens` of them.
    """
    mine = _places(mesh, process, across=CONTEXT)
    each = batch_size // size_of(mesh, DATA)
    return range(mine.start * each, mine.stop * each)


def local_tokens(mesh: Mesh, num_tokens: int, *, process: int | None = None) -> np.ndarray | None:
    """The tokens of its rows that a process is to read, in ascending order; None for all of them."""
    mine, ranks = _places(mesh, process, across=DATA), size_of(mesh, CONTEXT)
    if len(mine) == ranks:
        return None
    order = zigzag_order(num_tokens, ranks).reshape(ranks, -1)
    return np.sort(order[mine.start : mine.stop], axis=None)


def place_rows(tree: Any, mesh: Mesh) -> Any:
    """Arrays of what this process reads (`local_rows`, `local_tokens`) as arrays of all processes' rows.

    Where devices share a sequence, each has the tokens of its two chunks (`zaya_jax.parallel.context`).
    """
    mine, ranks = _places(mesh, None, across=CONTEXT), size_of(mesh, CONTEXT)
    own_ranks = len(_places(mesh, None, across=DATA))

    def place(rows: np.ndarray) -> jax.Array:
        each, length = rows.shape[0] // len(mine), rows.shape[1] * ranks // own_ranks
        order, own = zigzag_order(length, ranks), local_tokens(mesh, length)

        def shard(index: Any) -> np.ndarray:
            of_all, tokens = index
            first = (of_all.start or 0) - mine.start * each
            wanted = order[tokens] if own is None else np.searchsorted(own, order[tokens])
            return rows[first : first + each, wanted]

        return jax.make_array_from_callback((each * size_of(mesh, DATA), length), of_batch(mesh), shard)

    return jax.tree.map(place, tree)


def _places(mesh: Mesh, process: int | None, *, across: tuple[str, ...]) -> range:
    """Where along the axes that are not `across` a process has devices: neighbours in `data_mesh`."""
    is_own = _processes(mesh) == (jax.process_index() if process is None else process)
    places = np.flatnonzero(is_own.any(axis=0 if across == DATA else 1))
    return range(int(places[0]), int(places[-1]) + 1)


def _processes(mesh: Mesh) -> np.ndarray:
    """Of each device, whose it is: a row of those that share a sequence."""
    devices = mesh.devices.reshape(size_of(mesh, DATA), -1)
    return np.vectorize(lambda device: device.process_index, otypes=[int])(devices)


def zigzag_order(num_tokens: int, ranks: int) -> np.ndarray:
    """The tokens of a sequence as its devices have them: the first has the first and the last chunk.

    Of 2*C chunks device r has r and 2*C - 1 - r. A token attends to those before it, so that an early and a
    late chunk together are as much work on every device ([Llama3] section 3.3.2).

    Args:
      num_tokens: a multiple of 2*C; any number where C is 1.
      ranks: C.

    Returns:
      Numbers of the tokens in their sequence, [num_tokens]; each device has an equal part of these.
    """
    if ranks == 1:
        return np.arange(num_tokens)
    chunks = np.arange(num_tokens).reshape(2 * ranks, -1)
    return np.stack([chunks[:ranks], chunks[: ranks - 1 : -1]], axis=1).reshape(-1)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, REPLICATED)


def sharded(mesh: Mesh) -> NamedSharding:
    """The sharding of the optimiser's buckets: along the first axis, over all devices."""
    return NamedSharding(mesh, SHARDED)


def of_batch(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch [B, T]: rows over the axis of data, tokens over that of context."""
    return NamedSharding(mesh, BATCH)


def evenly_sharded(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """For an array shaped as a weight: along its first axis that divides, replicated if none does."""
    axis = next((i for i, size in enumerate(shape) if size and size % mesh.size == 0), None)
    return replicated(mesh) if axis is None else NamedSharding(mesh, PartitionSpec(*[None] * axis, ALL))


def evenly_sharded_by_node(mesh: Mesh, shape: tuple[int, ...], axis: int) -> NamedSharding:
    """As `evenly_sharded`, for a weight whose experts, along one axis, the devices of a node share.

    The experts over them, and the first other axis that divides over the nodes: from there to their owners
    they need not leave a device's number.
    """
    of_node, nodes = size_of(mesh, IN_NODE), size_of(mesh, NODES)
    others = (i for i, size in enumerate(shape) if i != axis and size and size % nodes == 0)
    other = next(others, None)
    if shape[axis] % of_node or other is None:
        return evenly_sharded(mesh, shape)
    over = {axis: IN_NODE, other: NODES}
    return NamedSharding(mesh, PartitionSpec(*(over.get(i) for i in range(len(shape)))))


def named_shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of `REPLICATED`, `SHARDED` and `SHARDED_BY_NODE` as shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def check_node_devices(num_devices: int, context_devices: int, node_devices: int) -> None:
    """Refuses nodes that the devices, or those of a sequence, cannot be dealt to.

    Raises:
      ValueError: unless a node divides all devices, and a node and a sequence one the other.
    """
    if num_devices % node_devices:
        raise ValueError(
            f"execution.node_devices is {node_devices}; it must divide the number of devices, {num_devices}"
        )
    if max(node_devices, context_devices) % min(node_devices, context_devices):
        raise ValueError(
            f"execution.node_devices is {node_devices} and execution.context_devices {context_devices}; one "
            "must be a multiple of the other"
        )


def check_batch_size(
    batch_size: int, num_microbatches: int, num_devices: int, context_devices: int = 1
) -> None:
    """Refuses a batch whose rows cannot be shared evenly.

    Raises:
      ValueError: unless the batch size is a multiple of the devices with rows of their own times
        microbatches.
    """
    if num_devices % context_devices:
        raise ValueError(
            f"execution.context_devices is {context_devices}; it must divide the number of devices, "
            f"{num_devices}"
        )
    if batch_size % parts_of_batch(num_microbatches, num_devices, context_devices):
        raise ValueError(
            f"data.batch_size is {batch_size}; it must be a multiple of "
            f"{describe_parts(num_microbatches, num_devices, context_devices)}"
        )


def parts_of_batch(num_microbatches: int, num_devices: int, context_devices: int = 1) -> int:
    """Parts that the rows of a batch are cut into."""
    return num_devices // context_devices * num_microbatches


def describe_parts(num_microbatches: int, num_devices: int, context_devices: int = 1) -> str:
    """How many they are, and why."""
    parts = parts_of_batch(num_microbatches, num_devices, context_devices)
    among = f" (of {context_devices} a sequence)" if context_devices > 1 else ""
    return f"{parts}: {num_devices} devices{among} times {num_microbatches} microbatches"


def on_each_device(
    function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Runs a function on every device, on what is there, by its `PartitionSpec`s above.

    Within it there is one device: what it sorts or slices stays on it. The collectives below are how
    it hears of the others.
    """
    # Without check_vma: sums over devices are written out, once, not put where each weight is used.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def all_reduce(tree: Any) -> Any:
    """Sums over all devices. For scalars and counts: of weight-sized arrays each device wants a shard."""
    return tree if _is_single() else lax.psum(tree, ALL)


def reduce_scatter(tree: Any) -> Any:
    """Sums over all devices, in float32, of which each keeps its shard of the first axis."""
    tree = jax.tree.map(lambda x: x.astype(SUM_DTYPE), tree)
    if _is_single():
        return tree
    return jax.tree.map(lambda x: lax.psum_scatter(x, ALL, tiled=True), tree)


def all_gather(tree: Any, axes: tuple[str, ...] = ALL) -> Any:
    """Arrays of which each device along some axes has a shard of the first one, whole on all of them."""
    if _is_single(axes):
        return tree
    return jax.tree.map(lambda x: lax.all_gather(x, axes, tiled=True), tree)


def local_shard(values: np.ndarray, axes: tuple[str, ...] = ALL) -> jax.Array:
    """Of a constant's first axis the shard of this device along some axes."""
    if _is_single(axes):
        return jnp.asarray(values)
    count = values.shape[0] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(jnp.asarray(values), lax.axis_index(axes) * count, count)


def _is_single(axes: tuple[str, ...] = ALL) -> bool:
    # A collective among one still copies on some backends, and hides a step's fusions behind it.
    return lax.axis_size(axes) == 1
