"""The specification of `newton_schulz`, in plain jnp. Letters: see the package."""

import jax
import jax.numpy as jnp


def newton_schulz_reference(
    x_MRC: jax.Array, coefficients: tuple[tuple[float, float, float], ...]
) -> jax.Array:
    """Steps of `a X + (b G + c G G) X` with the Gram matrix `G = X X^T`, in float32 or wider.

    Of tall matrices it is `X (b G + c G G)` with `G = X^T X`: the same, and of the shorter side. The result
    alone is rounded to the dtype of the matrices.
    """
    is_wide, dtype = x_MRC.shape[1] <= x_MRC.shape[2], x_MRC.dtype
    x_MRC = x_MRC.astype(jnp.promote_types(dtype, jnp.float32))
    for a, b, c in coefficients:
        gram = x_MRC @ x_MRC.mT if is_wide else x_MRC.mT @ x_MRC
        polynomial = b * gram + c * (gram @ gram)
        x_MRC = a * x_MRC + (polynomial @ x_MRC if is_wide else x_MRC @ polynomial)
    return x_MRC.astype(dtype)
