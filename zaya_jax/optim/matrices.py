"""Weights as stacks of the matrices that they are made of.

A weight declares which of its axes are a matrix's input and output; all others count matrices. The
gate and up halves of gate_up_proj [L, E, D, Q, F] are so two matrices [D, F] of each expert.
"""

import math
from typing import NamedTuple

import jax

from zaya_jax.model.weights import Weight


class MatrixAxes(NamedTuple):
    """Which axes of an array are its matrices' inputs and outputs."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def matrix_axes(weight: Weight) -> MatrixAxes:
    """Which axes of a weight are its matrices', for one that Muon moves."""
    assert weight.matrix is not None, "AdamW moves what has no matrices"
    return MatrixAxes(*(tuple(weight.axes.index(letter) for letter in letters) for letters in weight.matrix))


def matrix_sides(shape: tuple[int, ...], axes: MatrixAxes) -> tuple[int, int]:
    """Rows (inputs) and columns (outputs) of each matrix of an array."""
    return math.prod(shape[i] for i in axes.inputs), math.prod(shape[i] for i in axes.outputs)


def to_matrices(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """[count, inputs, outputs], counted in the order of the other axes."""
    return x.transpose(_counting_first(x.ndim, axes)).reshape(-1, *matrix_sides(x.shape, axes))


def from_matrices(matrices: jax.Array, axes: MatrixAxes, shape: tuple[int, ...]) -> jax.Array:
    """The array of that shape whose matrices these are: `to_matrices` undone."""
    order = _counting_first(len(shape), axes)
    moved = matrices.reshape([shape[i] for i in order])
    # The order's argsort is its inverse.
    return moved.transpose(sorted(range(len(shape)), key=order.__getitem__))


def _counting_first(ndim: int, axes: MatrixAxes) -> tuple[int, ...]:
    counting = (i for i in range(ndim) if i not in axes.inputs + axes.outputs)
    return (*counting, *axes.inputs, *axes.outputs)
