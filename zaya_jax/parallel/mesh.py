"""Data parallelism: every device has all weights and its own rows of the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA = "data"


def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the given devices, all by default, along one axis of data."""
    return Mesh(np.array(jax.devices() if devices is None else devices), (DATA,))


def replicated(mesh: Mesh) -> NamedSharding:
    """For what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """For a batch: its first axis is dealt out to the devices."""
    return NamedSharding(mesh, PartitionSpec(DATA))


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


def sum_over_rows(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Runs `function(replicated, rows)` on each device's rows and adds up the results.

    Within `function` there is one device: what it sorts or gathers stays on it. Its result, a tree
    of arrays, must be sums over rows.
    """

    def local(values: Any, rows: Any) -> Any:
        return lax.psum(function(values, rows), DATA)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(DATA)),
        out_specs=PartitionSpec(),
        check_vma=False,  # gradients are summed by hand above, once, not where each weight is used
    )
