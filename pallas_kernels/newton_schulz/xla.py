"""`newton_schulz` in XLA. Letters are those of the package; S is the shorter side."""

import jax
import jax.numpy as jnp

from pallas_kernels.newton_schulz.centre import centre
from pallas_kernels.precision import matmul


def newton_schulz_xla(x_MRC: jax.Array, coefficients: tuple[tuple[float, float, float], ...]) -> jax.Array:
    """Runs the iterations; terms are accumulated in float32, and each result is rounded once."""
    # The Gram matrix of the shorter side is the smaller one, and both give the same result.
    is_wide = x_MRC.shape[1] <= x_MRC.shape[2]
    dtype = x_MRC.dtype
    for step in coefficients:
        mean_M11, linear_M11, factor_M11 = (x_M[:, None, None] for x_M in centre(x_MRC, step))
        gram_MSS = _product(x_MRC, x_MRC.mT) if is_wide else _product(x_MRC.mT, x_MRC)
        # Centered before it is rounded: see `Centre`.
        rest_MSS = (gram_MSS - mean_M11 * jnp.eye(gram_MSS.shape[1])).astype(dtype)
        polynomial_MSS = (linear_M11 * rest_MSS + step[2] * _product(rest_MSS, rest_MSS)).astype(dtype)
        moved_MRC = _product(polynomial_MSS, x_MRC) if is_wide else _product(x_MRC, polynomial_MSS)
        x_MRC = (factor_M11 * x_MRC + moved_MRC).astype(dtype)
    return x_MRC


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return matmul(left, right, dtype=jnp.float32)
