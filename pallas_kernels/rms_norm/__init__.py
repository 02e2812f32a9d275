"""Residual scaling and RMSNorm: adds a block's output to the residual stream and normalizes the sum.

Letters: D width; the other axes are tokens, P all of them together.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checkpoint_names import STREAM
from pallas_kernels.choice import choose
from pallas_kernels.errors import ArgumentError
from pallas_kernels.rms_norm import triton
from pallas_kernels.rms_norm.reference import ResidualScaling, rms_norm_reference
from pallas_kernels.rms_norm.triton import Blocks
from pallas_kernels.rms_norm.xla import add_to_stream_xla, residual_rms_norm_xla

BLOCKS = Blocks(rows=4, run=32, num_warps=8)
"""Block sizes, chosen by the registers and local memory that the compiler reports for MI300X; untimed."""


def rms_norm(x: jax.Array, scale_D: jax.Array, *, eps: float) -> jax.Array:
    """Computes `scale * x / sqrt(mean(x^2) + eps)` in float32. There is no kernel, because XLA fuses it.

    Args:
      x: input of any float dtype, [..., D].
      scale_D: scale of the norm.
      eps: number added to the mean square.
    """
    return rms_norm_reference(x, scale_D, eps=eps)


def add_to_stream(output: jax.Array, residual: jax.Array, scaling: ResidualScaling) -> jax.Array:
    """Computes residual scaling alone: `(output + b)·s + (residual + b')·s'`, float32 [..., D].

    Args:
      output: output of the block, [..., D].
      residual: residual stream before the block, float32 [..., D].
      scaling: biases and scales of both, float32.
    """
    stream: Any = add_to_stream_xla(output, residual, scaling)
    return stream


def residual_rms_norm(
    output: jax.Array,
    residual: jax.Array,
    scaling: ResidualScaling,
    scale_D: jax.Array,
    *,
    eps: float,
    implementation: str | None = None,
    blocks: Blocks = BLOCKS,
) -> tuple[jax.Array, jax.Array]:
    """Computes `add_to_stream`, and `rms_norm` of the new stream.

    Sums are float32. The kernels read and write each row once in the forward and once in the backward pass,
    and keep only the arguments. Gradients of weights are summed in a fixed order.

    Args:
      output: output of the block, float32 or bfloat16, [..., D].
      residual: residual stream before the block, float32 [..., D].
      scaling: biases and scales of both, float32.
      scale_D: scale of the norm, float32.
      eps: number added to the mean square.
      implementation: "pallas", "xla", or None for the default of `choice.TABLE`.
      blocks: block sizes of the kernels.

    Returns:
      The new stream, float32, and its norm in the dtype of the output.

    Raises:
      ArgumentError: if shapes, dtypes or settings do not match.
    """
    _check(output, residual, scaling, scale_D)
    if choose("residual_rms_norm", implementation, width=output.shape[-1]) == "xla":
        return residual_rms_norm_xla(output, residual, scaling, scale_D, eps=eps)
    triton.check(output.shape[-1], blocks)
    rows = math.prod(output.shape[:-1]), output.shape[-1]
    results: Any = _pallas(output.reshape(rows), residual.reshape(rows), scaling, scale_D, eps, blocks)
    stream, norm = (x.reshape(output.shape) for x in results)
    # Named for remat policies: keeping the stream saves a block's recomputation.
    return checkpoint_name(stream, STREAM), norm


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _pallas(output_PD, residual_PD, scaling, scale_D, eps, blocks):
    return triton.forward(
        output_PD, residual_PD, scaling, scale_D, eps=eps, dtype=output_PD.dtype, blocks=blocks
    )


def _forward(output_PD, residual_PD, scaling, scale_D, eps, blocks):
    arguments = output_PD, residual_PD, scaling, scale_D
    return _pallas(*arguments, eps, blocks), arguments


def _backward(eps, blocks, arguments, gradients):
    output, residual, scaling, scale = triton.backward(*arguments, *gradients, eps=eps, blocks=blocks)
    return output, residual, ResidualScaling(*scaling), scale


_pallas.defvjp(_forward, _backward)


def _check(output: jax.Array, residual: jax.Array, scaling: ResidualScaling, scale_D: jax.Array) -> None:
    if output.ndim < 2 or output.shape != residual.shape:
        raise ArgumentError(
            f"output {output.shape}, residual {residual.shape}: they must both be [..., P, D]"
        )
    for name, vector in (*scaling._asdict().items(), ("scale_D", scale_D)):
        if vector.shape != output.shape[-1:]:
            raise ArgumentError(f"{name} is {vector.shape}; it must be [D], {output.shape[-1:]}")
        if vector.dtype != jnp.float32:
            raise ArgumentError(f"{name} is {vector.dtype}; it must be float32")
    if residual.dtype != jnp.float32 or output.dtype not in (jnp.float32, jnp.bfloat16):
        raise ArgumentError(
            f"output is {output.dtype}, residual {residual.dtype}; the output must be float32 or "
            "bfloat16, the residual float32"
        )
