"""Conversion of weights to stacks of matrices.

A weight declares the axes that are a matrix's inputs and outputs; all other axes index matrices. For example,
gate_up_proj [L, E, D, Q, F] has two matrices [D, F], gate and up, for each expert of each layer.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.model.weights import Weight
from zaya_jax.parallel.bucket_layouts import BucketLayout, sum_rows_in_node


class MatrixAxes(NamedTuple):
    """Axes of an array that are its matrices' inputs and outputs."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def matrix_axes(weight: Weight) -> MatrixAxes:
    """Axes of the matrices of a weight that Muon updates."""
    assert weight.matrix is not None, "weights without matrices are updated by AdamW"
    return MatrixAxes(*(tuple(weight.axes.index(letter) for letter in letters) for letters in weight.matrix))


def matrix_sides(shape: tuple[int, ...], axes: MatrixAxes) -> tuple[int, int]:
    """Number of rows (inputs) and columns (outputs) of the matrices of an array."""
    return math.prod(shape[i] for i in axes.inputs), math.prod(shape[i] for i in axes.outputs)


def matrix_norms(x: jax.Array, axes: MatrixAxes, layout: BucketLayout) -> jax.Array:
    """Frobenius norm of each matrix of a device's part of a bucket; the axes of matrices have size 1."""
    squares = jnp.sum(jnp.square(x), axis=axes.inputs + axes.outputs, keepdims=True)
    return jnp.sqrt(sum_rows_in_node(squares, layout))


def normalized(x: jax.Array, axes: MatrixAxes, layout: BucketLayout) -> jax.Array:
    """Divides each matrix of a device's part of a bucket by its Frobenius norm; zeros stay zeros."""
    # Avoids 0 / 0. A factor of 1 / norm would be infinite instead.
    return x / jnp.maximum(matrix_norms(x, axes, layout), jnp.finfo(jnp.float32).tiny)


def to_matrices(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """Matrices of an array, shape [count, inputs, outputs], in the order of the other axes."""
    return x.transpose(_counting_first(x.ndim, axes)).reshape(-1, *matrix_sides(x.shape, axes))


def from_matrices(matrices: jax.Array, axes: MatrixAxes, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `to_matrices`, for an array of the given shape."""
    order = _counting_first(len(shape), axes)
    moved = matrices.reshape([shape[i] for i in order])
    # The argsort of a permutation is its inverse.
    return moved.transpose(sorted(range(len(shape)), key=order.__getitem__))


def _counting_first(ndim: int, axes: MatrixAxes) -> tuple[int, ...]:
    counting = (i for i in range(ndim) if i not in axes.inputs + axes.outputs)
    return (*counting, *axes.inputs, *axes.outputs)
