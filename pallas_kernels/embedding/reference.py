"""Specification of `look_up` in plain jnp. For letters see the package."""

import jax

from pallas_kernels.precision import einsum


def look_up_reference(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns each token's row as a product with its one-hot vector, [B, T, D]."""
    # A product instead of a gather, so that the gradient that JAX derives is a product too, and not a
    # scatter.
    one_hot_BTV = jax.nn.one_hot(tokens_BT, table_VD.shape[0], dtype=table_VD.dtype)
    return einsum("btv,vd->btd", one_hot_BTV, table_VD)
