"""A mesh of devices, and the collectives on it: each device has its own rows of the batch.

Imports jax and numpy alone, so that any room may call it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA = "data"
REPLICATED = PartitionSpec()
"""Each device has all of it."""
SHARDED = PartitionSpec(DATA)
"""Each device has its shard of the first axis."""
SUM_DTYPE = "float32"
"""Of gradients on their way. The library that sums them rounds at each hop to the type that it is given: in
bfloat16 a ring of 1,024 devices loses 64% of what they agree on (`zaya bench gradient-sum`)."""


def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the given devices, all by default, along one axis of data.

    Those of a process are neighbours, so that the rows it reads are.
    """
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(sorted(devices, key=lambda each: (each.process_index, each.id))), (DATA,))


def local_rows(mesh: Mesh, batch_size: int, *, process: int | None = None) -> range:
    """The rows of a batch that a process is to read, this one when None."""
    process = jax.process_index() if process is None else process
    owners = [each.process_index for each in mesh.devices.flat]
    each, first = batch_size // len(owners), owners.index(process)
    return range(first * each, (first + owners.count(process)) * each)


def place_rows(tree: Any, mesh: Mesh) -> Any:
    """Arrays of this process' rows, which are what `local_rows` says, as arrays of all processes' rows."""
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharded(mesh), rows), tree)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, REPLICATED)


def sharded(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch, and of the optimiser's buckets: along the first axis."""
    return NamedSharding(mesh, SHARDED)


def evenly_sharded(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """For an array shaped as a weight: along its first axis that divides, replicated if none does."""
    axis = next((i for i, size in enumerate(shape) if size and size % mesh.size == 0), None)
    return replicated(mesh) if axis is None else NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))


def named_shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of `REPLICATED` and `SHARDED` as shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def check_batch_size(batch_size: int, num_microbatches: int, num_devices: int) -> None:
    """Refuses a batch whose rows cannot be shared evenly.

    Raises:
      ValueError: unless the batch size is a multiple of devices times microbatches.
    """
    parts = num_devices * num_microbatches
    if batch_size % parts:
        raise ValueError(
            f"data.batch_size is {batch_size}; it must be a multiple of {parts}: {num_devices} devices times "
            f"{num_microbatches} microbatches"
        )


def on_each_device(
    function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Runs a function on every device, on what is there, `REPLICATED` or `SHARDED` along its first axis.

    Within it there is one device: what it sorts or slices stays on it. The collectives below are how
    it hears of the others.
    """
    # Without check_vma: sums over devices are written out, once, not put where each weight is used.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def all_reduce(tree: Any) -> Any:
    """Sums over all devices. For scalars and counts: of weight-sized arrays each device wants a shard."""
    return tree if _is_single() else lax.psum(tree, DATA)


def reduce_scatter(tree: Any) -> Any:
    """Sums over all devices, in float32, of which each keeps its shard of the first axis."""
    tree = jax.tree.map(lambda x: x.astype(SUM_DTYPE), tree)
    if _is_single():
        return tree
    return jax.tree.map(lambda x: lax.psum_scatter(x, DATA, tiled=True), tree)


def all_gather(tree: Any) -> Any:
    """Arrays of which each device has a shard of the first axis, whole on all."""
    if _is_single():
        return tree
    return jax.tree.map(lambda x: lax.all_gather(x, DATA, tiled=True), tree)


def local_shard(values: np.ndarray) -> jax.Array:
    """This device's shard of a constant's first axis."""
    if _is_single():
        return jnp.asarray(values)
    count = values.shape[0] // lax.axis_size(DATA)
    return lax.dynamic_slice_in_dim(jnp.asarray(values), lax.axis_index(DATA) * count, count)


def _is_single() -> bool:
    # A collective among one still copies on some backends, and hides a step's fusions behind it.
    return lax.axis_size(DATA) == 1
