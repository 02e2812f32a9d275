"""Specification of `product` in plain jnp. For letters see the package."""

import jax
import jax.numpy as jnp

from pallas_kernels.precision import einsum


def product_reference(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `x @ kernel` in float32 or the operands' wider dtype."""
    wide = jnp.promote_types(jnp.result_type(x, kernel), jnp.float32)
    return einsum("...pd,...df->...pf", x.astype(wide), kernel.astype(wide))
