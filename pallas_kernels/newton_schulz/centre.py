"""Centering of the Gram matrix before rounding. Letters are those of the package; S is the shorter side."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Centre(NamedTuple):
    """An iteration's polynomial around the mean m of the Gram matrix's diagonal; float32 numbers per matrix.

    With G = m I + R the iteration `a X + (b G + c G²) X` is `(a + b m + c m²) X + ((b + 2 c m) R + c R²) X`.
    Rounded to bfloat16, R loses less than G: the diagonal is most of a Gram matrix, and all of it in the last
    iterations. Coefficients multiply float32 numbers only: in bfloat16, 3.4445 is 3.4375.
    """

    mean_M: jax.Array
    """Mean of the diagonal, m."""
    linear_M: jax.Array
    """Factor of R, b + 2 c m."""
    factor_M: jax.Array
    """Factor of X, a + b m + c m²."""


def centre(x_MRC: jax.Array, coefficients: tuple[float, float, float]) -> Centre:
    """Computes the centre for an iteration on these matrices; rows of zeros (padding) do not change it."""
    a, b, c = coefficients
    long_axis = 2 if x_MRC.shape[1] <= x_MRC.shape[2] else 1
    # The diagonal of the Gram matrix, without computing the matrix.
    diagonal_MS = jnp.sum(jnp.square(x_MRC.astype(jnp.float32)), axis=long_axis)
    # The diagonal of a matrix of zeros has no entry to count: its mean must be 0 and not NaN.
    mean_M = diagonal_MS.sum(axis=1) / jnp.maximum(jnp.count_nonzero(diagonal_MS, axis=1), 1)
    return Centre(mean_M, b + 2 * c * mean_M, a + b * mean_M + c * jnp.square(mean_M))
