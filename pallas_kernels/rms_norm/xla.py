"""`add_to_stream` and `residual_rms_norm` in XLA. For letters see the package."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import STREAM
from pallas_kernels.rms_norm.reference import ResidualScaling, rms_norm_reference


def residual_rms_norm_xla(
    output: jax.Array, residual: jax.Array, scaling: ResidualScaling, scale_D: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the new stream, float32, and its norm in the dtype of the output."""
    stream: Any = checkpoint_name(add_to_stream_xla(output, residual, scaling), STREAM)
    return stream, rms_norm_reference(stream, scale_D, eps=eps).astype(output.dtype)


@jax.custom_vjp
def add_to_stream_xla(output: jax.Array, residual: jax.Array, scaling: ResidualScaling) -> jax.Array:
    """Returns `(output + b)·s + (residual + b')·s'`, float32."""
    output = (output.astype(jnp.float32) + scaling.output_bias_D) * scaling.output_scale_D
    return output + (residual + scaling.residual_bias_D) * scaling.residual_scale_D


def _forward(output, residual, scaling):
    return add_to_stream_xla(output, residual, scaling), (output, residual, scaling)


def _backward(saved, grad):
    output, residual, scaling = saved
    leading = tuple(range(grad.ndim - 1))
    # One sum over tokens serves both biases and both scales; JAX would store four arrays and sum each.
    sum_D = grad.sum(axis=leading)

    def of_affine(x, bias_D, scale_D):
        along_D = jnp.sum(grad * x.astype(jnp.float32), axis=leading)
        # The bias is the same for all tokens, so that its part of the scale's gradient needs only the sum.
        return scale_D * sum_D, along_D + bias_D * sum_D

    grad_scaling = ResidualScaling(
        *of_affine(output, scaling.output_bias_D, scaling.output_scale_D),
        *of_affine(residual, scaling.residual_bias_D, scaling.residual_scale_D),
    )
    grad_output = (grad * scaling.output_scale_D).astype(output.dtype)
    return grad_output, grad * scaling.residual_scale_D, grad_scaling


add_to_stream_xla.defvjp(_forward, _backward)
