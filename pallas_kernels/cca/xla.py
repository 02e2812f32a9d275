"""`cca` in XLA, without a kernel. For letters see the package."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.cca.reference import CcaWeights, normalize, rotate
from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.fusion import unfused
from pallas_kernels.product import product


def cca_xla(
    latent_BTC: jax.Array,
    tail_BWC: jax.Array,
    weights: CcaWeights,
    rotation: tuple[jax.Array, jax.Array],
    segments_BT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns rotated queries [B, T, N, H] and keys [B, T, K, H] in float32."""
    mixed_BTAH = _convolve(latent_BTC, tail_BWC, weights, segments_BT)
    latent_BTAH = latent_BTC.reshape(mixed_BTAH.shape)
    # Padding counts as zeros. It is masked where values are read, here by a factor and below in the taps:
    # masked copies of latents or means would be stored once more.
    factor_BT = None if segments_BT is None else (segments_BT != 0).astype(jnp.float32)
    # Unfused, also in the backward pass: fused with arrays [B*T, C], XLA would compute the head of each entry
    # from its index, which was slower.
    return unfused(_heads, latent_BTAH, mixed_BTAH, weights.temperature_K, rotation, factor_BT)


def _heads(
    latent_BTAH: jax.Array,
    mixed_BTAH: jax.Array,
    temperature_K: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    factor_BT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys from the latents and the result of the convolutions."""
    factor = 1.0 if factor_BT is None else factor_BT[:, :, None, None, None]
    num_queries = latent_BTAH.shape[2] - temperature_K.shape[0]
    latent_q_BTNH, latent_k_BTKH = jnp.split(latent_BTAH.astype(jnp.float32), [num_queries], axis=2)
    mean_q_BTNH, mean_k_BTKH = qk_mean(latent_q_BTNH, latent_k_BTKH, factor)
    # Queries and keys together: the same operations on each would be twice as many.
    mean_BTAH = jnp.concatenate([mean_q_BTNH, mean_k_BTKH], axis=2)
    temperature_A = jnp.concatenate([jnp.ones(num_queries), temperature_K])
    heads_BTAH = rotate(normalize(mixed_BTAH + mean_BTAH) * temperature_A[:, None], rotation)
    return heads_BTAH[:, :, :num_queries], heads_BTAH[:, :, num_queries:]


def qk_mean(
    q_BTNH: jax.Array, k_BTKH: jax.Array, factor: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Returns the residual path around the convolutions, times a factor ([CCA] section II-B, qk-mean).

    A query head gets the mean of itself and its key head, a key head the average of its query heads' means.
    """
    batch, time, num_queries, width = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, time, k_BTKH.shape[2], -1, width).astype(jnp.float32)
    mean_BTKGH = (q_BTKGH + k_BTKH[:, :, :, None, :]) * (0.5 * factor)
    return mean_BTKGH.reshape(batch, time, num_queries, width), mean_BTKGH.mean(axis=3)


def _convolve(
    latent_BTC: jax.Array, tail_BWC: jax.Array, weights: CcaWeights, segments_BT: jax.Array | None
) -> jax.Array:
    """Applies both convolutions over time; returns [B, T, A, H], float32.

    Only the operands of the product are rounded to the latent's dtype. On CPUs bfloat16 would be slower as
    well: XLA rounds after each operation there, and its sums of bfloat16 numbers have no fast routine.
    """
    batch, time, _ = latent_BTC.shape
    heads, num_taps, width, _ = weights.grouped_kernel_AJHH.shape
    kernel_IC, bias_C = weights.depthwise_kernel_IC, weights.depthwise_bias_C
    # Several taps read each entry of the result: fused into them, it would be recomputed for each.
    depthwise_BSC = unfused(_depthwise, latent_BTC, tail_BWC, kernel_IC, bias_C, segments_BT)
    segments_BS = segments_with_history(segments_BT, tail_BWC.shape[1])
    # Before the start of a document a tap reads the first convolution's bias, not zero: the sequence is
    # padded once, before the first convolution ([CCA] Listing 1).
    taps = taps_over_time(depthwise_BSC, num_taps, segments_BS, fill=bias_C)
    # With heads first and the taps concatenated, the convolution is one batch of matrix products.
    taps_PJAH = jnp.stack(taps, axis=2).reshape(batch * time, num_taps, heads, width)
    taps_APJH = taps_PJAH.transpose(2, 0, 1, 3)
    taps_APX = taps_APJH.reshape(heads, batch * time, num_taps * width).astype(latent_BTC.dtype)
    kernel_AXH = weights.grouped_kernel_AJHH.reshape(heads, num_taps * width, width).astype(latent_BTC.dtype)
    # Few rows copy the kernel before the small operations that lead to the taps: with copies of all matrices
    # in a row, the other cores stay awake for them. Decoding takes 0.98 of the time for 8 rows.
    mixed_APH = product(taps_APX, kernel_AXH, dtype=jnp.float32, after=latent_BTC)
    mixed_BTAH = checkpoint_name(mixed_APH, KEPT).transpose(1, 0, 2).reshape(batch, time, heads, width)
    return mixed_BTAH + weights.grouped_bias_C.reshape(heads, width)


def _depthwise(
    latent_BTC: jax.Array,
    tail_BWC: jax.Array,
    kernel_IC: jax.Array,
    bias_C: jax.Array,
    segments_BT: jax.Array | None,
) -> jax.Array:
    """Applies the first convolution, also to the tokens that only the second one reads, float32."""
    latent_BSC = jnp.concatenate([tail_BWC, latent_BTC], axis=1).astype(jnp.float32)
    segments_BS = segments_with_history(segments_BT, tail_BWC.shape[1])
    is_token_BS = None
    if segments_BT is not None:
        # Tokens of the tail are never padding, even if the chunk begins with it.
        is_token_BS = jnp.pad(segments_BT != 0, ((0, 0), (tail_BWC.shape[1], 0)), constant_values=True)
    zero = jnp.zeros((), latent_BSC.dtype)
    taps = taps_over_time(latent_BSC, kernel_IC.shape[0], segments_BS, fill=zero, is_token_BS=is_token_BS)
    # Tap by tap: an einsum would need all taps stacked, several times the size of the latent.
    for kernel_C, tap_BSC in zip(kernel_IC, taps, strict=True):
        bias_C = bias_C + kernel_C * tap_BSC
    return bias_C


def segments_with_history(segments_BT: jax.Array | None, num_tokens: int) -> jax.Array | None:
    """Returns document numbers of a chunk and of the tokens before it, which belong to its first document."""
    if segments_BT is None:
        return None
    return jnp.pad(segments_BT, ((0, 0), (num_tokens, 0)), mode="edge")


def taps_over_time(
    history_BSC: jax.Array,
    num_taps: int,
    segments_BS: jax.Array | None,
    *,
    fill: jax.Array,
    is_token_BS: jax.Array | None = None,
) -> list[jax.Array]:
    """Returns the inputs of each tap of a causal convolution, oldest first, [B, S - num_taps + 1, C] each.

    Args:
      history_BSC: the tokens, preceded by the earlier tokens that the first ones read.
      num_taps: number of taps of the convolution.
      segments_BS: document numbers; the last S entries belong to `history_BSC`. None for one document.
      fill: value of a tap at a token of another document.
      is_token_BS: False for padding, which taps read as `fill` too; None if there is no padding.
    """
    size = history_BSC.shape[1]
    time = size - num_taps + 1
    taps = [history_BSC[:, tap : tap + time] for tap in range(num_taps)]
    if segments_BS is None:
        return taps
    segments_BS = segments_BS[:, segments_BS.shape[1] - size :]
    here_BT = segments_BS[:, num_taps - 1 :]

    def is_visible(first: int) -> jax.Array:
        same_BT = segments_BS[:, first : first + time] == here_BT
        return same_BT if is_token_BS is None else same_BT & is_token_BS[:, first : first + time]

    return [jnp.where(is_visible(i)[:, :, None], tap_BTC, fill) for i, tap_BTC in enumerate(taps)]
