"""The specification of `product`, in plain jnp. Letters: see the package."""

import jax
import jax.numpy as jnp


def product_reference(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel`, in the wider of float32 and the dtype of the factors."""
    wide = jnp.promote_types(jnp.result_type(x, kernel), jnp.float32)
    return jnp.einsum("...pd,...df->...pf", x.astype(wide), kernel.astype(wide))
