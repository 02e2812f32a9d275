"""Devices that share the cache of a batch: each holds every so many-th token, and all know the newest one.

Imports jax alone, so that the network may call it.
"""

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

CONTEXT = "context"
SLOTS = PartitionSpec(None, CONTEXT)
"""Of a cache's pool: each device has its slots of every row."""


def context_mesh(num_devices: int) -> Mesh:
    """The first devices of this process, along the axis of context.

    Raises:
      ValueError: if there are not so many.
    """
    devices = jax.local_devices()
    if not 1 <= num_devices <= len(devices):
        raise ValueError(f"context_devices is {num_devices}; it must be from 1 to {len(devices)}, those here")
    return Mesh(np.array(devices[:num_devices]), (CONTEXT,))


def rank() -> jax.Array:
    """The number of this device among those that share a cache."""
    return lax.axis_index(CONTEXT)


def all_max(x: jax.Array) -> jax.Array:
    """The largest of all devices' values, element by element."""
    return lax.pmax(x, CONTEXT)


def all_sum(x: jax.Array) -> jax.Array:
    """The sum of all devices' values, element by element; the same bits on each of them."""
    return lax.psum(x, CONTEXT)


def to_next(tree: Any) -> Any:
    """A step around the ring: each device gets what the one before it has."""
    ranks = lax.axis_size(CONTEXT)
    around = [(i, (i + 1) % ranks) for i in range(ranks)]
    return jax.tree.map(lambda x: lax.ppermute(x, CONTEXT, around), tree)
