"""Residual scaling: an affine on the layer's output and one on the stream ([8B] eq. 6)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_residual(
    output_BTD: Float[Array, "B T D"], residual_BTD: Float[Array, "B T D"], weights: Mapping
) -> Float[Array, "B T D"]:
    """Adds a layer's output to the stream, in float32.

    The bias comes before the scale, as in all released code; [8B] writes it behind (facts 1.4).
    """
    merged_BTD: Any = _merge(output_BTD, residual_BTD, dict(weights))
    return merged_BTD


@jax.custom_vjp
def _merge(output_BTD, residual_BTD, weights):
    output_BTD = (output_BTD.astype(jnp.float32) + weights["output_bias"]) * weights["output_scale"]
    return output_BTD + (residual_BTD + weights["residual_bias"]) * weights["residual_scale"]


def _forward(output_BTD, residual_BTD, weights):
    return _merge(output_BTD, residual_BTD, weights), (output_BTD, residual_BTD, weights)


def _backward(saved, grad_BTD):
    """The gradient's sum over tokens serves both biases and both scales; JAX makes four arrays to sum."""
    output_BTD, residual_BTD, weights = saved
    sum_D = grad_BTD.sum(axis=(0, 1))
    grads = {}
    for name, x_BTD in (("output", output_BTD), ("residual", residual_BTD)):
        bias_D, scale_D = weights[f"{name}_bias"], weights[f"{name}_scale"]
        along_D = jnp.sum(grad_BTD * x_BTD.astype(jnp.float32), axis=(0, 1))
        grads |= {f"{name}_bias": scale_D * sum_D, f"{name}_scale": along_D + bias_D * sum_D}
    grad_output_BTD = (grad_BTD * weights["output_scale"]).astype(output_BTD.dtype)
    return grad_output_BTD, grad_BTD * weights["residual_scale"], grads


_merge.defvjp(_forward, _backward)
