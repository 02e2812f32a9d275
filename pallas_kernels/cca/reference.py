"""Specification of `cca` in plain jnp. For letters see the package."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.precision import einsum
from pallas_kernels.product import Matrix, own_matrix

MIN_NORM = float(jnp.finfo(jnp.float32).eps)
"""Minimum length for normalization, so that a vector of zeros has a finite gradient."""


class CcaWeights(NamedTuple):
    """Weights of both convolutions, and the temperature of each key head."""

    depthwise_kernel_IC: jax.Array
    depthwise_bias_C: jax.Array
    grouped_kernel_AJHH: Matrix
    """Matrices by head and tap, [input channels, output channels]."""
    grouped_bias_C: jax.Array
    temperature_K: jax.Array


def cca_reference(
    latent_BTC: jax.Array,
    tail_BWC: jax.Array,
    weights: CcaWeights,
    rotation: tuple[jax.Array, jax.Array],
    segments_BT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns rotated queries [B, T, N, H] and keys [B, T, K, H], in float32 or the latent's wider dtype."""
    batch, time, _ = latent_BTC.shape
    heads, _, width, _ = weights.grouped_kernel_AJHH.shape
    num_keys = weights.temperature_K.shape[0]
    wide = jnp.promote_types(latent_BTC.dtype, jnp.float32)
    latent_BTC = latent_BTC.astype(wide)
    if segments_BT is None:
        segments_BT = jnp.ones((batch, time), jnp.int32)
    # Segment 0 is padding: its latents count as zeros.
    latent_BTC = jnp.where((segments_BT == 0)[:, :, None], 0, latent_BTC)
    mixed_BTAH = _convolve(latent_BTC, tail_BWC.astype(wide), weights, segments_BT)
    latent_BTAH = latent_BTC.reshape(batch, time, heads, width)
    q_BTKGH = latent_BTAH[:, :, :-num_keys].reshape(batch, time, num_keys, -1, width)
    # qk-mean: the residual path around the convolutions.
    mean_BTKGH = (q_BTKGH + latent_BTAH[:, :, -num_keys:, None]) / 2
    mean_q_BTNH = mean_BTKGH.reshape(batch, time, -1, width)
    q_BTNH = normalize(mixed_BTAH[:, :, :-num_keys] + mean_q_BTNH)
    k_BTKH = normalize(mixed_BTAH[:, :, -num_keys:] + mean_BTKGH.mean(axis=3))
    return rotate(q_BTNH, rotation), rotate(k_BTKH * weights.temperature_K[:, None], rotation)


def _convolve(
    latent_BTC: jax.Array, tail_BWC: jax.Array, weights: CcaWeights, segments_BT: jax.Array
) -> jax.Array:
    """Applies both convolutions over time; returns [B, T, A, H].

    The sequence is padded once, before the first convolution: before the start of a document, the second one
    reads the bias of the first. The tail belongs to the chunk's first document.
    """
    heads, num_taps, width, _ = weights.grouped_kernel_AJHH.shape
    segments_BS = jnp.pad(segments_BT, ((0, 0), (tail_BWC.shape[1], 0)), mode="edge")
    latent_BSC = jnp.concatenate([tail_BWC, latent_BTC], axis=1)
    num_first, bias_C = weights.depthwise_kernel_IC.shape[0], weights.depthwise_bias_C
    taps_BISC = _taps(latent_BSC, segments_BS, num_first, jnp.zeros_like(bias_C))
    first_BSC = einsum("bisc,ic->bsc", taps_BISC, weights.depthwise_kernel_IC) + bias_C
    taps_BJTC = _taps(first_BSC, segments_BS[:, num_first - 1 :], num_taps, bias_C)
    taps_BJTAH = taps_BJTC.reshape(*taps_BJTC.shape[:3], heads, width)
    mixed_BTAH = einsum("bjtah,ajhx->btax", taps_BJTAH, own_matrix(weights.grouped_kernel_AJHH))
    return mixed_BTAH + weights.grouped_bias_C.reshape(heads, width)


def _taps(history_BSC: jax.Array, segments_BS: jax.Array, num_taps: int, fill_C: jax.Array) -> jax.Array:
    """Inputs of each tap, oldest first, [B, I, S - I + 1, C]; `fill` replaces tokens of other documents."""
    time = history_BSC.shape[1] - num_taps + 1
    here_BT = segments_BS[:, num_taps - 1 :]
    return jnp.stack(
        [
            jnp.where(
                (segments_BS[:, i : i + time] == here_BT)[:, :, None], history_BSC[:, i : i + time], fill_C
            )
            for i in range(num_taps)
        ],
        axis=1,
    )


def normalize(x_BTAH: jax.Array) -> jax.Array:
    """Scales heads to length sqrt(H), so that a score is a cosine times sqrt(H) ([CCA] QK normalization)."""
    # The bound applies to the squared length: with a bound on the length, the gradient of a vector of zeros,
    # which padding produces, would not be finite.
    squared = jnp.maximum(jnp.sum(x_BTAH * x_BTAH, axis=-1, keepdims=True), MIN_NORM**2)
    return x_BTAH * (x_BTAH.shape[-1] ** 0.5 * jax.lax.rsqrt(squared))


def rotate(x_BTAH: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates channel i of each head with channel i + O, for its first 2*O channels (RoPE, NeoX halves).

    Args:
      x_BTAH: heads, [B, T, A, H].
      rotation: cosines and sines, [b, T, O], where b is B or 1.
    """
    cos_BT1O, sin_BT1O = (table[:, :, None] for table in rotation)
    half = cos_BT1O.shape[-1]
    first, second, rest = x_BTAH[..., :half], x_BTAH[..., half : 2 * half], x_BTAH[..., 2 * half :]
    turned = first * cos_BT1O - second * sin_BT1O, second * cos_BT1O + first * sin_BT1O
    return jnp.concatenate([*turned, rest], axis=-1)
