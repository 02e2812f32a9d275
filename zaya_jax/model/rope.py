"""Rotary position embedding of the first channels of each head, NeoX halves ([RoPE] section 3.4).

Letters: B batch, T time, O half of the rotated channels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zaya_jax.config import HYBRID, HYBRID_SLIDING, ModelConfig

Rotation = tuple[Float[Array, "b T O"], Float[Array, "b T O"]]
"""Cosines and sines, for `pallas_kernels.cca.rotate`; b is B, or 1 where rows have the same positions."""


def rope_table(positions_BT: Int[Array, "b T"], *, theta: float, rotary_dim: int) -> Rotation:
    """Cosines and sines of `position * theta^(-2i/rotary_dim)`, float32."""
    # In float32 from the start: a position of 131,071 times a frequency has no room in bfloat16.
    frequencies_O = theta ** (-jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)
    angles_BTO = positions_BT[:, :, None].astype(jnp.float32) * frequencies_O
    return jnp.cos(angles_BTO), jnp.sin(angles_BTO)


def rotations(config: ModelConfig, positions_BT: Int[Array, "b T"]) -> tuple[Rotation, ...]:
    """A table for each kind of layer that there is, "hybrid" first."""
    thetas = {HYBRID: config.rope_theta, HYBRID_SLIDING: config.sliding_rope_theta}
    return tuple(
        rope_table(positions_BT, theta=theta, rotary_dim=config.rotary_dim)
        for kind, theta in thetas.items()
        if kind in config.layer_types
    )


def rotation_of_layer(tables: tuple[Rotation, ...], is_sliding: Int[Array, ""]) -> Rotation:
    """The table of a layer, of those that `rotations` gave."""
    if len(tables) == 1:
        return tables[0]
    # Data, not a branch: the scan over layers compiles one layer for both kinds.
    return jax.tree.map(lambda full, sliding: jnp.where(is_sliding, sliding, full), *tables)
