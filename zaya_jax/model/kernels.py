"""The places where the network can take a Pallas kernel, in its own letters.

Letters: B batch, T time, S slots of a layer's cache, D model width, N query heads, K key/value heads,
H head width, O half of the rotated channels, b is B or 1.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.cca import CcaWeights, cca
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.rms_norm import ResidualScaling, residual_rms_norm
from zaya_jax.model.cca import CcaState, latents_and_values
from zaya_jax.model.remat import KEPT


def attend_flash(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    *,
    window: Int[Array, ""] | None,
    segments_BT: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Attention of a chunk to itself; no scores are in memory."""
    q_BTNH, k_BTKH, v_BTKH = (checkpoint_name(x, KEPT) for x in (q_BTNH, k_BTKH, v_BTKH))
    return flash_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        window=window,
        query_segments_BT=segments_BT,
        key_segments_BS=segments_BT,
        implementation="pallas",
    )[0]


def attend_to_cache(
    q_B1NH: Float[Array, "B 1 N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    *,
    length: Int[Array, ""],
    first_B: Int[Array, " B"],
    window: Int[Array, ""],
) -> Float[Array, "B 1 N H"]:
    """Attention of the newest token to a ring of slots, itself among them.

    Args:
      q_B1NH: its queries.
      k_BSKH: keys of a layer.
      v_BSKH: its values.
      length: tokens so far, the newest included.
      first_B: number of each sequence's first token behind its padding.
      window: tokens that the newest sees.
    """
    dtype = jnp.promote_types(q_B1NH.dtype, k_BSKH.dtype)  # a cache may be kept in another type
    out_BNH, _ = decode_attention(
        q_B1NH[:, 0].astype(dtype),
        k_BSKH.astype(dtype),
        v_BSKH.astype(dtype),
        jnp.broadcast_to(length, first_B.shape),
        first_B=first_B,
        window=window,
        implementation="pallas",
    )
    return out_BNH[:, None].astype(v_BSKH.dtype)


def merge_and_norm(
    output_BTD: Float[Array, "B T D"],
    residual_BTD: Float[Array, "B T D"],
    residual_weights: Mapping,
    scale_D: Float[Array, " D"],
    *,
    eps: float,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """`merge_residual`, and the merged stream's `rms_norm` in the dtype of the output, in one pass."""
    width = output_BTD.shape[-1]
    scaling = ResidualScaling(
        *(
            residual_weights[name]
            for name in ("output_bias", "output_scale", "residual_bias", "residual_scale")
        )
    )
    rows = residual_rms_norm(
        output_BTD.reshape(-1, width),
        residual_BTD.reshape(-1, width),
        scaling,
        scale_D,
        eps=eps,
        implementation="pallas",
    )
    stream_BTD, normed_BTD = (x.reshape(output_BTD.shape) for x in rows)
    return stream_BTD, normed_BTD


def project_and_rotate(
    x_BTD: Float[Array, "B T D"],
    weights: Mapping,
    state: CcaState,
    rotation: tuple[Float[Array, "b T O"], Float[Array, "b T O"]],
    segments_BT: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"], CcaState]:
    """`cca_projection` and `apply_rope`, all behind the projection in one kernel; q, k in the dtype of x."""
    latent_BTC, v_BTKH, behind = latents_and_values(x_BTD, weights, state, segments_BT)
    depthwise, grouped = weights["conv_depthwise"], weights["conv_grouped"]
    q_BTNH, k_BTKH = cca(
        latent_BTC,
        state.tail_BWC.astype(latent_BTC.dtype),
        CcaWeights(
            depthwise["kernel"],
            depthwise["bias"],
            grouped["kernel"],
            grouped["bias"],
            weights["temperature"],
        ),
        rotation,
        segments_BT=segments_BT,
        implementation="pallas",
    )
    return q_BTNH, k_BTKH, v_BTKH, behind
