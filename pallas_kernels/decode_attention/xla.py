"""`decode_attention` in XLA. Letters are those of the package; G = N/K, C = K*H."""

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.reference import visible_slots
from pallas_kernels.precision import einsum


def decode_attention_xla(
    q_BNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    lengths_B: jax.Array,
    first_B: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, N, H] in the values' dtype and the logsumexp [B, N], without a transpose.

    For a product per key head, XLA would transpose keys and values first. Instead a query is as wide as all
    key heads together, with zeros for other key heads: K times the work, which is little for one token.
    """
    batch, size, num_keys, width = k_BSKH.shape
    num_queries = q_BNH.shape[1]
    key_head_N1 = jnp.arange(num_queries)[:, None] // (num_queries // num_keys)
    own_NK1 = (key_head_N1 == jnp.arange(num_keys))[..., None]
    q_BNC = jnp.where(own_NK1, q_BNH[:, :, None], 0).reshape(batch, num_queries, -1)
    k_BSC, v_BSC = (x.reshape(batch, size, -1) for x in (k_BSKH, v_BSKH))
    scores_BNS = einsum("bnc,bsc->bns", q_BNC, k_BSC, dtype=jnp.float32) * width**-0.5
    is_visible_BS = visible_slots(lengths_B, first_B, window, size)
    # Not minus infinity: without visible tokens, the difference of two would be NaN.
    scores_BNS = jnp.where(is_visible_BS[:, None], scores_BNS, jnp.finfo(jnp.float32).min)
    top_BN = scores_BNS.max(axis=-1)
    exp_BNS = jnp.exp(scores_BNS - top_BN[..., None])
    sum_BN = exp_BNS.sum(axis=-1)
    out_BNC = einsum("bns,bsc->bnc", exp_BNS.astype(v_BSC.dtype), v_BSC)
    out_BNKH = out_BNC.reshape(batch, num_queries, num_keys, width)
    # Divided after the product: that is one division for each channel instead of one for each slot.
    out_BNH = jnp.sum(jnp.where(own_NK1, out_BNKH, 0), axis=2) / sum_BN[..., None]
    # Without visible slots all scores are equal, and the softmax above is a mean over unused slots.
    is_empty_B1 = ~is_visible_BS.any(axis=1, keepdims=True)
    out_BNH = jnp.where(is_empty_B1[..., None], 0, out_BNH).astype(v_BSKH.dtype)
    return out_BNH, jnp.where(is_empty_B1, -jnp.inf, top_BN + jnp.log(sum_BN))
