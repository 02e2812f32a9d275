"""Specification of `newton_schulz` in plain jnp. For letters see the package."""

import jax
import jax.numpy as jnp

from pallas_kernels.precision import matmul


def newton_schulz_reference(
    x_MRC: jax.Array, coefficients: tuple[tuple[float, float, float], ...]
) -> jax.Array:
    """Iterates `a X + (b G + c G G) X` with the Gram matrix `G = X X^T`, in float32 or wider.

    For tall matrices it is `X (b G + c G G)` with `G = X^T X`, which is equal and smaller. Only the result is
    rounded to the dtype of the matrices.
    """
    is_wide, dtype = x_MRC.shape[1] <= x_MRC.shape[2], x_MRC.dtype
    x_MRC = x_MRC.astype(jnp.promote_types(dtype, jnp.float32))
    for a, b, c in coefficients:
        gram = matmul(x_MRC, x_MRC.mT) if is_wide else matmul(x_MRC.mT, x_MRC)
        polynomial = b * gram + c * matmul(gram, gram)
        x_MRC = a * x_MRC + (matmul(polynomial, x_MRC) if is_wide else matmul(x_MRC, polynomial))
    return x_MRC.astype(dtype)
