"""Hyperball: matrices that move on the sphere of their initial Frobenius norm ([Hyperball])."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from zaya_jax.optim.matrices import matrix_norms, normalized
from zaya_jax.optim.partition import MatrixPool, MatrixStack


def hyperball_step(
    bucket: MatrixStack | MatrixPool, update: jax.Array, weight: jax.Array, rate: ArrayLike
) -> jax.Array:
    """Returns the change of weights to `R (W + rate R u / |u|) / |W + rate R u / |u||`, with R = |W|.

    R is the norm of the weights before the step, not a stored one, which would be another array in
    checkpoints. Rounding in float32 changes the norm of a matrix by about 1e-9 of it per step, so that it
    drifts by 0.1% in a million steps. Matrices of zeros, such as the padding of a pool, and those without an
    update stay as they are.

    Args:
      bucket: bucket of the matrices.
      update: direction u of each matrix, of any norm; this device's part of the bucket.
      weight: weights W, float32, of the same shape.
      rate: length of the step relative to the norm, negative to subtract the update.
    """

    axes, layout = bucket.axes, bucket.layout
    norm = matrix_norms(weight, axes, layout)
    moved = weight + normalized(update, axes, layout) * (rate * norm)
    # The ratio of norms is exactly 1 without an update, and 0 for zeros.
    ratio = norm / jnp.maximum(matrix_norms(moved, axes, layout), jnp.finfo(jnp.float32).tiny)
    return moved * ratio - weight
