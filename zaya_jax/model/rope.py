"""Rotary position embedding of the first channels of each head, NeoX halves.

Letters: O half of the rotated channels.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Rotation = tuple[Float[Array, "B T O"], Float[Array, "B T O"]]


def rope_table(positions_BT: Int[Array, "B T"], *, theta: float, rotary_dim: int) -> Rotation:
    """Cosines and sines of `position * theta^(-2i/rotary_dim)`, float32."""
    frequencies_O = theta ** (-jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)
    angles_BTO = positions_BT[:, :, None].astype(jnp.float32) * frequencies_O
    return jnp.cos(angles_BTO), jnp.sin(angles_BTO)


def apply_rope(x_BTNH: Float[Array, "b T N H"], rotation: Rotation) -> Float[Array, "b T N H"]:
    """Rotates channel i against channel i + O, for the first 2*O channels of each head."""
    cos_BT1O, sin_BT1O = (table[:, :, None, :].astype(x_BTNH.dtype) for table in rotation)
    half = cos_BT1O.shape[-1]
    first, second, rest = jnp.split(x_BTNH, [half, 2 * half], axis=-1)
    return jnp.concatenate(
        [first * cos_BT1O - second * sin_BT1O, second * cos_BT1O + first * sin_BT1O, rest], axis=-1
    )
