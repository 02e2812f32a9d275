"""Compressed convolutional attention: queries, keys and values from a narrow, mixed latent.

Source: [CCA] arXiv 2510.04476 section II-B and Listing 1; the temperature is linear ([8B] App. C).
Letters: B batch, T time, D model width, N query heads, K key/value heads, G query heads a key/value
head, A = N + K heads, H head width, C = A*H latent channels, U = K*H/2 half of the value channels,
I and J taps of the two convolutions, W = I + J - 2 earlier tokens that they need.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import apart
from zaya_jax.model.norms import l2_norm
from zaya_jax.model.products import product
from zaya_jax.model.remat import KEPT
from zaya_jax.pytree import pytree


@pytree
class CcaState:
    """What the tokens before a chunk leave behind; zeros before the first one."""

    tail_BWC: Float[Array, "*L B W C"]
    """Latent queries and keys of the last W tokens, before the convolutions."""
    delayed_BU: Float[Array, "*L B U"]
    """The last token's half value, which the next token uses."""


def cca_projection(
    x_BTD: Float[Array, "B T D"],
    weights: Mapping,
    state: CcaState,
    segments_BT: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"], CcaState]:
    """Queries, keys and values of a chunk of tokens, before the rotary embedding.

    Args:
      x_BTD: normalised hidden states.
      weights: of the block's "attention", without the layer axis, through `join_projections`.
      state: of the tokens before the chunk.
      segments_BT: documents; nothing crosses from one to another, and segment 0 is padding, which
        counts as zeros. None is one document. The chunk's first document continues `state`.

    Returns:
      q, k (float32: both are normalised), v (dtype of x), and the state behind the chunk.
    """
    latent_BTC, v_BTKH, behind = latents_and_values(x_BTD, weights, state, segments_BT)
    mixed_BTAH = _convolve(latent_BTC, weights, state.tail_BWC, _looking_back(segments_BT, state))
    latent_BTAH = latent_BTC.reshape(mixed_BTAH.shape)
    num_queries = latent_BTAH.shape[2] - weights["temperature"].shape[0]
    mean_q_BTNH, mean_k_BTKH = qk_mean(*jnp.split(latent_BTAH, [num_queries], axis=2))
    mixed_q_BTNH, mixed_k_BTKH = jnp.split(mixed_BTAH, [num_queries], axis=2)
    mixed_q_BTNH = l2_norm(mixed_q_BTNH + mean_q_BTNH)
    mixed_k_BTKH = l2_norm(mixed_k_BTKH + mean_k_BTKH) * weights["temperature"][:, None]
    return mixed_q_BTNH, mixed_k_BTKH, v_BTKH, behind


def latents_and_values(
    x_BTD: Float[Array, "B T D"],
    weights: Mapping,
    state: CcaState,
    segments_BT: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B T K H"], CcaState]:
    """The first half of `cca_projection`: latent queries and keys, values, and the state behind the chunk."""
    if segments_BT is not None:
        x_BTD = jnp.where((segments_BT == 0)[:, :, None], 0, x_BTD)
    latent_BTC, current_BTU, delayed_BTU = _project(x_BTD, weights, state.delayed_BU.shape[-1])
    segments_BS = _looking_back(segments_BT, state)
    v_BTU2, delayed_BU = _value_shift(current_BTU, delayed_BTU, state.delayed_BU, segments_BS)
    v_BTKH = v_BTU2.reshape(*v_BTU2.shape[:2], weights["temperature"].shape[0], -1)
    history_BSC = jnp.concatenate([state.tail_BWC.astype(latent_BTC.dtype), latent_BTC], axis=1)
    tail_BWC = history_BSC[:, latent_BTC.shape[1] :].astype(state.tail_BWC.dtype)
    return latent_BTC, v_BTKH, CcaState(tail_BWC, delayed_BU)


def _looking_back(segments_BT: jax.Array | None, state: CcaState) -> jax.Array | None:
    """Documents of the chunk and of what came before it, which belongs to its first document."""
    if segments_BT is None:
        return None
    lookback = max(state.tail_BWC.shape[1], 1)
    return jnp.pad(segments_BT, ((0, 0), (lookback, 0)), mode="edge")


def join_projections(weights: Mapping) -> dict:
    """Puts the matrices for queries, keys and both halves of the values side by side.

    They are narrow: one product with all four costs less than four products. Done for all layers at
    once, so that a loop over layers, or over tokens, finds it done.

    Args:
      weights: declared weights of "attention", of one layer or with the axis L.

    Returns:
      The same with "projections" [*L, D, C + 2*U] in place of the four.
    """
    rest = dict(weights)
    names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    depth = weights["v_proj_current"].ndim - 1  # axes before the columns
    parts = [rest.pop(name) for name in names]
    flat = [part.reshape(*part.shape[:depth], -1) for part in parts]
    return rest | {"projections": jnp.concatenate(flat, axis=-1)}


def _project(x_BTD: jax.Array, weights: Mapping, half: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The latent queries and keys [B, T, C], and both halves of the values [B, T, U]."""
    x_PD = x_BTD.reshape(-1, x_BTD.shape[2])
    out_PX = product(x_PD, weights["projections"].astype(x_BTD.dtype))
    out_BTX = out_PX.reshape(*x_BTD.shape[:2], -1)
    columns = out_BTX.shape[2]
    latent_BTC, current_BTU, delayed_BTU = jnp.split(out_BTX, [columns - 2 * half, columns - half], axis=-1)
    return latent_BTC, current_BTU, delayed_BTU


def qk_mean(
    q_BTNH: Float[Array, "B T N H"], k_BTKH: Float[Array, "B T K H"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """The residual path around the convolutions, float32 ([CCA] section II-B, qk-mean).

    A query head takes the mean of itself and its key head; a key head the mean of its query heads'.
    """
    batch, time, num_queries, width = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, time, k_BTKH.shape[2], -1, width).astype(jnp.float32)
    mean_BTKGH = (q_BTKGH + k_BTKH[:, :, :, None, :]) * 0.5
    return mean_BTKGH.reshape(batch, time, num_queries, width), mean_BTKGH.mean(axis=3)


def _value_shift(
    current_BTU: jax.Array, delayed_BTU: jax.Array, before_BU: jax.Array, segments_BS: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Values [B, T, 2*U]: the first half of the channels of this token, the second of the one before."""
    history_BSU = jnp.concatenate([before_BU[:, None].astype(delayed_BTU.dtype), delayed_BTU], axis=1)
    shifted_BTU, _ = taps_over_time(history_BSU, 2, segments_BS, fill=jnp.zeros((), delayed_BTU.dtype))
    return jnp.concatenate([current_BTU, shifted_BTU], axis=-1), delayed_BTU[:, -1].astype(before_BU.dtype)


def _convolve(
    latent_BTC: jax.Array, weights: Mapping, tail_BWC: jax.Array, segments_BS: jax.Array | None
) -> jax.Array:
    """Both convolutions over time, [B, T, A, H] in float32.

    Where the second one looks to before a document's start it must find the first one's bias, not
    zero: the sequence is padded once, before the first (facts 2.1, step 2).
    """
    batch, time, _ = latent_BTC.shape
    dtype = latent_BTC.dtype
    depthwise, grouped = weights["conv_depthwise"], weights["conv_grouped"]
    heads, num_taps, width, _ = grouped["kernel"].shape
    latent_BSC = jnp.concatenate([tail_BWC.astype(dtype), latent_BTC], axis=1)
    kernel_IC, bias_C = depthwise["kernel"].astype(dtype), depthwise["bias"].astype(dtype)
    taps = taps_over_time(latent_BSC, kernel_IC.shape[0], segments_BS, fill=jnp.zeros((), dtype))
    depthwise_BSC = apart(_weighted_sum, kernel_IC, bias_C, taps)  # each entry is read by several taps
    taps = taps_over_time(depthwise_BSC, num_taps, segments_BS, fill=bias_C)
    # Heads lead and taps lie side by side: the convolution is one batch of matrix products.
    taps_APX = jnp.concatenate(
        [tap_BTC.reshape(-1, heads, width).transpose(1, 0, 2) for tap_BTC in taps], axis=-1
    )
    kernel_AXH = grouped["kernel"].reshape(heads, num_taps * width, width).astype(dtype)
    mixed_APH = checkpoint_name(product(taps_APX, kernel_AXH, dtype=jnp.float32), KEPT)
    mixed_BTAH = mixed_APH.transpose(1, 0, 2).reshape(batch, time, heads, width)
    return mixed_BTAH + grouped["bias"].reshape(heads, width)


def _weighted_sum(kernel_IC: jax.Array, bias_C: jax.Array, taps: list[jax.Array]) -> jax.Array:
    for kernel_C, tap_BSC in zip(kernel_IC, taps, strict=True):
        bias_C = bias_C + kernel_C * tap_BSC
    return bias_C


def taps_over_time(
    history_BSC: Float[Array, "B S C"],
    num_taps: int,
    segments_BS: Int[Array, "B Z"] | None,
    *,
    fill: Float[Array, "*C"],
) -> list[Float[Array, "B T C"]]:
    """What each tap of a causal convolution sees, the oldest first; T = S - num_taps + 1.

    Args:
      history_BSC: the tokens, and before them those that the first ones look back on.
      num_taps: of the convolution.
      segments_BS: documents; their last S entries belong to `history_BSC`.
      fill: what a tap sees in place of a token of another document.
    """
    size = history_BSC.shape[1]
    time = size - num_taps + 1
    taps = [history_BSC[:, tap : tap + time] for tap in range(num_taps)]
    if segments_BS is None:
        return taps
    segments_BS = segments_BS[:, segments_BS.shape[1] - size :]
    here_BT = segments_BS[:, num_taps - 1 :]
    return [
        jnp.where((segments_BS[:, tap : tap + time] == here_BT)[:, :, None], tap_BTC, fill)
        for tap, tap_BTC in enumerate(taps)
    ]
