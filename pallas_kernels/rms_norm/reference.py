"""Specifications of `residual_rms_norm` and `rms_norm` in plain jnp. For letters see the package."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ResidualScaling(NamedTuple):
    """Biases and scales of a block's output and of the residual stream, each [D]; the bias is added first.

    [ZAYA1-8B] equation 6 adds the bias after scaling; all released code adds it before.
    """

    output_bias_D: jax.Array
    output_scale_D: jax.Array
    residual_bias_D: jax.Array
    residual_scale_D: jax.Array


def rms_norm_reference(x_PD: jax.Array, scale_D: jax.Array, *, eps: float) -> jax.Array:
    """Returns `scale * x / sqrt(mean(x^2) + eps)`, in float32 or the wider dtype of x."""
    x_PD = x_PD.astype(jnp.promote_types(x_PD.dtype, jnp.float32))
    return scale_D * (x_PD * jax.lax.rsqrt(jnp.mean(x_PD * x_PD, axis=-1, keepdims=True) + eps))


def residual_rms_norm_reference(
    output_PD: jax.Array,
    residual_PD: jax.Array,
    scaling: ResidualScaling,
    scale_D: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns the new stream, and its norm in the stream's dtype."""
    output_bias_D, output_scale_D, residual_bias_D, residual_scale_D = scaling
    output_PD = output_PD.astype(jnp.promote_types(output_PD.dtype, jnp.float32))
    stream_PD = (output_PD + output_bias_D) * output_scale_D
    stream_PD = stream_PD + (residual_PD + residual_bias_D) * residual_scale_D
    return stream_PD, rms_norm_reference(stream_PD, scale_D, eps=eps)
