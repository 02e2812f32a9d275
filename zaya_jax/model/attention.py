"""Causal attention with grouped queries, a sliding window and documents.

Letters: B batch, T query time, S key time, N query heads, K key/value heads, G = N/K, H head width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def attention_mask(
    query_T: Int[Array, " T"],
    key_S: Int[Array, " S"],
    *,
    window: Int[Array, ""] | int | None,
    query_segments_BT: Int[Array, "B T"] | None = None,
    key_segments_BS: Int[Array, "B S"] | None = None,
) -> Bool[Array, "b T S"]:
    """Which keys a query may look at: earlier or equal, within the window, of the same document.

    Args:
      query_T: index of each query in its sequence.
      key_S: index of each key; a negative one is nobody's.
      window: tokens a query sees, itself included; None for all.
      query_segments_BT: documents of the queries.
      key_segments_BS: documents of the keys.

    Returns:
      [1, T, S] without segments, else [B, T, S].
    """
    distance_TS = query_T[:, None] - key_S[None, :]
    mask_TS = (distance_TS >= 0) & (key_S >= 0)
    if window is not None:
        mask_TS = mask_TS & (distance_TS < window)
    if query_segments_BT is None or key_segments_BS is None:
        return mask_TS[None]
    return mask_TS & (query_segments_BT[:, :, None] == key_segments_BS[:, None, :])


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "b T S"],
) -> Float[Array, "B T N H"]:
    """Softmax attention with scale 1/sqrt(H); scores and softmax in float32.

    Query head n belongs to key head n // G. A query that may look at nothing gets a mean of all
    values, a finite number that nobody reads: only padding is in that place.
    """
    batch, time, _, width = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, time, k_BSKH.shape[2], -1, width)
    scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BKGTS = scores_BKGTS * width**-0.5
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)
    probs_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", probs_BKGTS, v_BSKH).reshape(q_BTNH.shape)
