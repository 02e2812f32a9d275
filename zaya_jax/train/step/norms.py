"""Norms of partitioned gradients and updates, by group of weights."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.precision import matmul
from zaya_jax.optim.partition import MatrixPool, Partition
from zaya_jax.parallel.mesh import all_reduce, local_shard

GROUPS = ("embedding", "attention", "router", "experts", "scales")


def group_of(path: str) -> str:
    """Returns the group of a weight by its path; norms and residual scalings are "scales".

    An adapter belongs to the group of the weight that it changes: "adapters/attention/q_proj/a".
    """
    return next((name for name in path.split("/")[:2] if name in GROUPS), "scales")


def norms_by_group(partition: Partition, buckets: dict[str, jax.Array]) -> dict[str, Float[Array, ""]]:
    """Returns norms over all devices by group, for buckets shaped like those of the weights."""
    # One vector for all groups: a single collective of five sums of squares.
    squares_G = jnp.zeros(len(GROUPS))
    for bucket in partition.buckets:
        square_U = jnp.square(buckets[bucket.name])
        # The devices' matrices of a pool belong to different groups: each device adds by its own row.
        if isinstance(bucket, MatrixPool):
            squares_G += matmul(
                square_U.sum(axis=(1, 2)), local_shard(_groups_of_pool(bucket), bucket.layout.axes)
            )
        else:
            squares_G = squares_G.at[GROUPS.index(group_of(bucket.name))].add(square_U.sum())
    norms_G = jnp.sqrt(all_reduce(squares_G))
    return {name: norms_G[i] for i, name in enumerate(GROUPS)}


def global_norm(norms: dict[str, Float[Array, ""]]) -> Float[Array, ""]:
    """Returns the norm over all groups of weights, a scalar, from the norm of each group."""
    return jnp.sqrt(sum(jnp.square(norm) for norm in norms.values()))


def _groups_of_pool(pool: MatrixPool) -> np.ndarray:
    """Returns the group membership of a pool's matrices, shape [slots, groups], 0 or 1."""
    # Slots without a matrix are in no group; the squares of padding are zeros anyway.
    member = np.zeros((pool.num_slots, len(GROUPS)), np.float32)
    groups = [GROUPS.index(group_of(each.path)) for each in pool.range_by_slot]
    member[np.arange(len(groups)), groups] = 1
    return member
