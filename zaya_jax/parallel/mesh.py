"""Data parallelism: each device has its own rows of the batch and owns a share of the optimiser."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA = "data"
WHOLE = PartitionSpec()
"""Each device has all of it."""
CUT = PartitionSpec(DATA)
"""Each device has its part of the first axis."""
SUM_DTYPE = "float32"
"""Of gradients on their way. The library that sums them rounds at each hop to the type that it is given: in
bfloat16 a ring of 1,024 devices loses 64% of what they agree on (`zaya bench gradient-sum`)."""


def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the given devices, all by default, along one axis of data."""
    return Mesh(np.array(jax.devices() if devices is None else devices), (DATA,))


def replicated(mesh: Mesh) -> NamedSharding:
    """For what every device holds whole."""
    return NamedSharding(mesh, WHOLE)


def by_rows(mesh: Mesh) -> NamedSharding:
    """For a batch, and for the optimiser's parts: each device has its part of the first axis."""
    return NamedSharding(mesh, CUT)


def check_batch_size(batch_size: int, num_microbatches: int, num_devices: int) -> None:
    """Refuses a batch that cannot be dealt out.

    Raises:
      ValueError: unless the batch size is a multiple of devices times microbatches.
    """
    parts = num_devices * num_microbatches
    if batch_size % parts:
        raise ValueError(
            f"data.batch_size is {batch_size}; it must be a multiple of {parts}: {num_devices} devices times "
            f"{num_microbatches} microbatches"
        )


def on_mesh(specs: Any, mesh: Mesh) -> Any:
    """A tree of `WHOLE` and `CUT` as shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def spread(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """For an array shaped as a weight: cut along its first axis that divides, whole if none does."""
    cut = next((i for i, size in enumerate(shape) if size and size % mesh.size == 0), None)
    return replicated(mesh) if cut is None else NamedSharding(mesh, PartitionSpec(*[None] * cut, DATA))


def on_each_device(
    function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Runs a function on every device, on what is there, `WHOLE` or `CUT` by its first axis.

    Within it there is one device: what it sorts or gathers stays on it. The functions below are how
    it hears of the others.
    """
    # Without check_vma: sums over devices are written out, once, not put where each weight is used.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def total(tree: Any) -> Any:
    """Sums over all devices. For scalars and counts: of weight-sized arrays each device wants a part."""
    return tree if _alone() else lax.psum(tree, DATA)


def total_of_own(tree: Any) -> Any:
    """Sums over all devices, of which each keeps its part of the first axis: a reduce-scatter, in float32."""
    tree = jax.tree.map(lambda x: x.astype(SUM_DTYPE), tree)
    if _alone():
        return tree
    return jax.tree.map(lambda x: lax.psum_scatter(x, DATA, tiled=True), tree)


def gather(tree: Any) -> Any:
    """Arrays of which each device has a part of the first axis, whole on all (an all-gather)."""
    if _alone():
        return tree
    return jax.tree.map(lambda x: lax.all_gather(x, DATA, tiled=True), tree)


def own(values: np.ndarray) -> jax.Array:
    """This device's part of a constant's first axis."""
    if _alone():
        return jnp.asarray(values)
    count = values.shape[0] // lax.axis_size(DATA)
    return lax.dynamic_slice_in_dim(jnp.asarray(values), lax.axis_index(DATA) * count, count)


def _alone() -> bool:
    return lax.axis_size(DATA) == 1
