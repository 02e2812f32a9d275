"""A residual block's end in one pass: the layer's output joins the stream, and the stream is normed.

Letters: P rows (tokens), D width.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementation, choose
from pallas_kernels.rms_norm import triton
from pallas_kernels.rms_norm.reference import residual_rms_norm_reference
from pallas_kernels.rms_norm.triton import Blocks

BLOCKS = Blocks(rows=4, run=32, num_warps=8)
"""Chosen from what the compiler says for MI300X (registers, local memory); no time was measured."""


class ResidualScaling(NamedTuple):
    """An affine on a layer's output and one on the stream, the bias before the scale; each [D]."""

    output_bias_D: jax.Array
    output_scale_D: jax.Array
    residual_bias_D: jax.Array
    residual_scale_D: jax.Array


def residual_rms_norm(
    output_PD: jax.Array,
    residual_PD: jax.Array,
    scaling: ResidualScaling,
    scale_D: jax.Array,
    *,
    eps: float,
    implementation: Implementation | None = None,
    blocks: Blocks = BLOCKS,
) -> tuple[jax.Array, jax.Array]:
    """`stream = (output + b)·s + (residual + b')·s'`, and the stream's RMSNorm.

    All sums are in float32. The kernels read and write each row once in each direction and keep
    nothing but the arguments for the backward pass. Gradients of weights are added up in a fixed
    order.

    Args:
      output_PD: of the layer.
      residual_PD: the stream before the layer, float32.
      scaling: both affines, float32.
      scale_D: of the norm, float32.
      eps: added to the mean square.
      implementation: "pallas", "xla", or None for what `choice.TABLE` says of the platform.
      blocks: settings of the kernels.

    Returns:
      The new stream in float32, and its norm in the dtype of the output.

    Raises:
      ValueError: if shapes, dtypes or settings do not go together.
    """
    _check(output_PD, residual_PD, scaling, scale_D)
    if choose("residual_rms_norm", implementation, width=output_PD.shape[1]) == "pallas":
        triton.check(output_PD.shape[1], blocks)
        return _pallas(output_PD, residual_PD, scaling, scale_D, eps, blocks)
    stream_PD, norm_PD = residual_rms_norm_reference(output_PD, residual_PD, scaling, scale_D, eps=eps)
    return stream_PD, norm_PD.astype(output_PD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _pallas(output_PD, residual_PD, scaling, scale_D, eps, blocks):
    if output_PD.size == 0:
        return residual_PD, output_PD
    return triton.forward(
        output_PD, residual_PD, scaling, scale_D, eps=eps, dtype=output_PD.dtype, blocks=blocks
    )


def _forward(output_PD, residual_PD, scaling, scale_D, eps, blocks):
    arguments = output_PD, residual_PD, scaling, scale_D
    return _pallas(*arguments, eps, blocks), arguments


def _backward(eps, blocks, arguments, gradients):
    if arguments[0].size == 0:
        return jax.tree.map(jnp.zeros_like, arguments)
    output, residual, scaling, scale = triton.backward(*arguments, *gradients, eps=eps, blocks=blocks)
    return output, residual, ResidualScaling(*scaling), scale


_pallas.defvjp(_forward, _backward)


def _check(
    output_PD: jax.Array, residual_PD: jax.Array, scaling: ResidualScaling, scale_D: jax.Array
) -> None:
    if output_PD.ndim != 2 or output_PD.shape != residual_PD.shape:
        raise ValueError(f"output {output_PD.shape}, residual {residual_PD.shape}: they must both be [P, D]")
    for name, vector in (*scaling._asdict().items(), ("scale_D", scale_D)):
        if vector.shape != output_PD.shape[1:]:
            raise ValueError(f"{name} is {vector.shape}; it must be [D], {output_PD.shape[1:]}")
        if vector.dtype != jnp.float32:
            raise ValueError(f"{name} is {vector.dtype}; it must be float32")
    if residual_PD.dtype != jnp.float32 or output_PD.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"output is {output_PD.dtype}, residual {residual_PD.dtype}; the output must be float32 or "
            "bfloat16, the residual float32"
        )
