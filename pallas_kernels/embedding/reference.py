"""The specification of `look_up`, in plain jnp. Letters: see the package."""

import jax
import jax.numpy as jnp


def look_up_reference(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Each token's row, as a product with its one-hot vector, [B, T, D]."""
    one_hot_BTV = jax.nn.one_hot(tokens_BT, table_VD.shape[0], dtype=table_VD.dtype)
    return jnp.einsum("btv,vd->btd", one_hot_BTV, table_VD)
