"""Specification of `decode_attention` in plain jnp. For letters see the package."""

import jax
import jax.numpy as jnp

from pallas_kernels.precision import einsum


def token_in_slot(lengths_B: jax.Array, num_slots: int) -> jax.Array:
    """Returns the index of the token in each slot after `length` tokens, [B, S]; negative if it is empty.

    Up to S tokens, token s is in slot s: a plain cache is a ring buffer that is not full.
    """
    # The newest token with the slot's remainder modulo S.
    last_B1 = lengths_B[:, None] - 1
    return last_B1 - (last_B1 - jnp.arange(num_slots)) % num_slots


def visible_slots(lengths_B: jax.Array, first_B: jax.Array, window: jax.Array, num_slots: int) -> jax.Array:
    """Mask of the slots that the newest token attends to, [B, S]."""
    token_BS = token_in_slot(lengths_B, num_slots)
    distance_BS = lengths_B[:, None] - 1 - token_BS
    return (token_BS >= 0) & (token_BS >= first_B[:, None]) & (distance_BS < window)


def decode_attention_reference(
    q_BNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    lengths_B: jax.Array,
    first_B: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, N, H] and the logsumexp [B, N]."""
    group, width = q_BNH.shape[1] // k_BSKH.shape[2], q_BNH.shape[2]
    wide = jnp.promote_types(q_BNH.dtype, jnp.float32)
    k_BSNH, v_BSNH = (jnp.repeat(x.astype(wide), group, axis=2) for x in (k_BSKH, v_BSKH))
    mask_B1S = visible_slots(lengths_B, first_B, window, k_BSKH.shape[1])[:, None]
    scores_BNS = einsum("bnh,bsnh->bns", q_BNH.astype(wide), k_BSNH) * width**-0.5
    scores_BNS = jnp.where(mask_B1S, scores_BNS, -jnp.inf)
    is_empty_B11 = ~mask_B1S.any(axis=2, keepdims=True)
    top_BN1 = jnp.where(is_empty_B11, 0, scores_BNS.max(axis=2, keepdims=True))
    exp_BNS = jnp.exp(scores_BNS - top_BN1)
    sum_BN1 = jnp.where(is_empty_B11, 1, exp_BNS.sum(axis=2, keepdims=True))
    out_BNH = einsum("bns,bsnh->bnh", exp_BNS / sum_BN1, v_BSNH)
    return out_BNH, jnp.where(is_empty_B11, -jnp.inf, top_BN1 + jnp.log(sum_BN1))[..., 0]
