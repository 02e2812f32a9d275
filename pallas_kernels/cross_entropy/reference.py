"""Specification of `cross_entropy` in plain jnp. For letters see the package."""

import jax
import jax.numpy as jnp

from pallas_kernels.precision import einsum


def cross_entropy_reference(
    hidden_PD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    targets_P: jax.Array,
    weights_P: jax.Array,
    *,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of losses and the logsumexp of each row, by way of all logits [P, V]."""
    wide = jnp.promote_types(hidden_PD.dtype, jnp.float32)
    logits_PV = einsum("pd,vd->pv", hidden_PD.astype(wide), table_VD.astype(wide))
    if bias_V is not None:
        logits_PV = logits_PV + bias_V
    logsumexp_P = jax.nn.logsumexp(logits_PV, axis=1)
    # A comparison instead of a gather: a target outside of the vocabulary then has logit 0, as specified.
    is_target_PV = targets_P[:, None] == jnp.arange(table_VD.shape[0])
    losses_P = logsumexp_P - jnp.sum(jnp.where(is_target_PV, logits_PV, 0), axis=1)
    return jnp.sum(weights_P * (losses_P + z_loss * logsumexp_P**2)), logsumexp_P
