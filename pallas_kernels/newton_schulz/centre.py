"""Where a step of `newton_schulz` rounds. Letters as in the package; S the shorter side."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Centre(NamedTuple):
    """A step's polynomial around the mean m of the Gram matrix's diagonal: one number a matrix each, float32.

    With G = m I + R the step `a X + (b G + c G²) X` is `(a + b m + c m²) X + ((b + 2 c m) R + c R²) X`.
    Kept in bfloat16, R loses less than G does: the diagonal is most of a Gram matrix, and all of it at
    the end. The coefficients meet float32 alone: in bfloat16 3.4445 is 3.4375.
    """

    mean_M: jax.Array
    """m."""
    linear_M: jax.Array
    """b + 2 c m."""
    factor_M: jax.Array
    """a + b m + c m²."""


def centre(x_MRC: jax.Array, coefficients: tuple[float, float, float]) -> Centre:
    """The centre of a step of these matrices. Rows of zeros, which pad a matrix, leave it where it was."""
    a, b, c = coefficients
    long_axis = 2 if x_MRC.shape[1] <= x_MRC.shape[2] else 1
    diagonal_MS = jnp.sum(jnp.square(x_MRC.astype(jnp.float32)), axis=long_axis)
    mean_M = diagonal_MS.sum(axis=1) / jnp.maximum(jnp.count_nonzero(diagonal_MS, axis=1), 1)
    return Centre(mean_M, b + 2 * c * mean_M, a + b * mean_M + c * jnp.square(mean_M))
