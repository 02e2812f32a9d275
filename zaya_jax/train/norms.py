"""Norms of what is dealt out to devices, of each group of weights."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zaya_jax.parallel.deal import Deal, Round
from zaya_jax.parallel.mesh import own, total

GROUPS = ("embedding", "attention", "router", "experts", "scales")


def group_of(path: str) -> str:
    """The group that a weight is counted in; norms and residual scalings are "scales"."""
    return next((name for name in path.split("/")[:2] if name in GROUPS), "scales")


def norms_by_group(dealt: Deal, parts: dict[str, jax.Array]) -> dict[str, Float[Array, ""]]:
    """Norms over all devices of a tree like the weights, by group. Sums of squares alone are sent."""
    squares_G = jnp.zeros(len(GROUPS))
    for part in dealt.parts:
        square_U = jnp.square(parts[part.name])
        if isinstance(part, Round):
            squares_G += square_U.sum(axis=(1, 2)) @ own(_groups_of_round(part))
        else:
            squares_G = squares_G.at[GROUPS.index(group_of(part.path))].add(square_U.sum())
    norms_G = jnp.sqrt(total(squares_G))
    return {name: norms_G[i] for i, name in enumerate(GROUPS)}


def global_norm(norms: dict[str, Float[Array, ""]]) -> Float[Array, ""]:
    """Of all groups together."""
    return jnp.sqrt(sum(jnp.square(norm) for norm in norms.values()))


def _groups_of_round(round_: Round) -> np.ndarray:
    """Which matrix of a round belongs to which group, [devices, groups], 0 or 1."""
    member = np.zeros((round_.num_devices, len(GROUPS)), np.float32)
    groups = [GROUPS.index(group_of(run.path)) for run in round_.runs for _ in range(run.count)]
    member[np.arange(len(groups)), groups] = 1
    return member
