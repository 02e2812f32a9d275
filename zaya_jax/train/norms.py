"""Norms of what is partitioned among devices, of each group of weights."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zaya_jax.optim.partition import MatrixPool, Partition
from zaya_jax.parallel.mesh import all_reduce, local_shard

GROUPS = ("embedding", "attention", "router", "experts", "scales")


def group_of(path: str) -> str:
    """The group that a weight is counted in; norms and residual scalings are "scales".

    An adapter counts in the group of the weight that it changes: "adapters/attention/q_proj/a".
    """
    return next((name for name in path.split("/")[:2] if name in GROUPS), "scales")


def norms_by_group(partition: Partition, buckets: dict[str, jax.Array]) -> dict[str, Float[Array, ""]]:
    """Norms over all devices of a tree like the weights, by group. Sums of squares alone are sent."""
    # One vector for all groups: a single collective, of five numbers.
    squares_G = jnp.zeros(len(GROUPS))
    for bucket in partition.buckets:
        square_U = jnp.square(buckets[bucket.name])
        # A device's matrix of a pool is of another group than its neighbour's: each adds by its own row.
        if isinstance(bucket, MatrixPool):
            squares_G += square_U.sum(axis=(1, 2)) @ local_shard(_groups_of_pool(bucket), bucket.layout.axes)
        else:
            squares_G = squares_G.at[GROUPS.index(group_of(bucket.name))].add(square_U.sum())
    norms_G = jnp.sqrt(all_reduce(squares_G))
    return {name: norms_G[i] for i, name in enumerate(GROUPS)}


def global_norm(norms: dict[str, Float[Array, ""]]) -> Float[Array, ""]:
    """The norm of all groups together, a scalar."""
    return jnp.sqrt(sum(jnp.square(norm) for norm in norms.values()))


def _groups_of_pool(pool: MatrixPool) -> np.ndarray:
    """Which matrix of a pool belongs to which group, [slots, groups], 0 or 1."""
    # Slots without a matrix are in no group; the padding's squares are zeros anyway.
    member = np.zeros((pool.num_slots, len(GROUPS)), np.float32)
    groups = [GROUPS.index(group_of(each.path)) for each in pool.range_by_slot]
    member[np.arange(len(groups)), groups] = 1
    return member
