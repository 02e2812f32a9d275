"""Residual scaling: an affine on the layer's output and one on the stream ([8B] eq. 6)."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_residual(
    output_BTD: Float[Array, "B T D"], residual_BTD: Float[Array, "B T D"], weights: Mapping
) -> Float[Array, "B T D"]:
    """Adds a layer's output to the stream, in float32.

    The bias comes before the scale, as in all released code; [8B] writes it behind (facts 1.4).
    """
    output_BTD = (output_BTD.astype(jnp.float32) + weights["output_bias"]) * weights["output_scale"]
    return output_BTD + (residual_BTD + weights["residual_bias"]) * weights["residual_scale"]
