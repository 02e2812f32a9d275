"""The specification of `newton_schulz`, in plain jnp. Letters: see the package."""

import jax


def newton_schulz_reference(
    x_MRC: jax.Array, coefficients: tuple[tuple[float, float, float], ...]
) -> jax.Array:
    """Steps of `a X + (b G + c G G) X` with the Gram matrix `G = X X^T`, in the dtype of the matrices."""
    for a, b, c in coefficients:
        gram_MRR = x_MRC @ x_MRC.mT
        x_MRC = a * x_MRC + (b * gram_MRR + c * (gram_MRR @ gram_MRR)) @ x_MRC
    return x_MRC
