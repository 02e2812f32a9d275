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
    # float32 from the start: bfloat16 cannot represent angles of positions up to 131,071.
    frequencies_O = theta ** (-jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)
    angles_BTO = positions_BT[:, :, None].astype(jnp.float32) * frequencies_O
    return jnp.cos(angles_BTO), jnp.sin(angles_BTO)


def rotations(config: ModelConfig, positions_BT: Int[Array, "b T"]) -> tuple[Rotation, ...]:
    """Tables for the types of layers of the model, "hybrid" first."""
    thetas = {HYBRID: config.rope_theta, HYBRID_SLIDING: config.sliding_rope_theta}
    return tuple(
        rope_table(positions_BT, theta=theta, rotary_dim=config.rotary_dim)
        for kind, theta in thetas.items()
        if kind in config.layer_types
    )


def rotation_of_layer(tables: tuple[Rotation, ...], is_sliding: Int[Array, ""]) -> Rotation:
    """The table of a layer, from the result of `rotations`."""
    if len(tables) == 1:
        return tables[0]
    # A select, not a branch: the scan compiles one layer for both types.
    return jax.tree.map(lambda full, sliding: jnp.where(is_sliding, sliding, full), *tables)
