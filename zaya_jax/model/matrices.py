"""Weights as stacks of the matrices that they are made of.

A weight declares which of its axes are a matrix's input and output; all others count matrices. The
gate and up halves of gate_up_proj [L, E, D, Q, F] are so two matrices [D, F] of each expert.
"""

import math

import jax
import optax

from zaya_jax.model.weights import Weight

MatrixAxes = optax.contrib.MuonDimensionNumbers
"""Axes of an array that are its matrices' input (`reduction_axis`) and output, as tuples."""


def matrix_axes(weight: Weight) -> MatrixAxes | None:
    """Which axes of a weight are its matrices'; None where AdamW moves it."""
    if weight.matrix is None:
        return None
    reduced, output = (tuple(weight.axes.index(a) for a in axes) for axes in weight.matrix)
    return MatrixAxes(reduced, output)


def matrix_sides(shape: tuple[int, ...], axes: MatrixAxes) -> tuple[int, int]:
    """Rows (inputs) and columns (outputs) of each matrix of an array."""
    reduced, output = (math.prod(shape[i] for i in side) for side in _order(len(shape), axes)[1:])
    return reduced, output


def to_matrices(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """[count, inputs, outputs], counted in the order of the other axes."""
    counting, reduced, output = _order(x.ndim, axes)
    moved = x.transpose(counting + reduced + output)
    return moved.reshape(-1, *matrix_sides(x.shape, axes))


def from_matrices(matrices: jax.Array, axes: MatrixAxes, shape: tuple[int, ...]) -> jax.Array:
    """The array of that shape whose matrices these are: `to_matrices` undone."""
    order = sum(_order(len(shape), axes), ())
    moved = matrices.reshape([shape[i] for i in order])
    return moved.transpose(sorted(range(len(shape)), key=order.__getitem__))


def _order(ndim: int, axes: MatrixAxes) -> tuple[tuple[int, ...], ...]:
    """Axes that count, that are inputs, that are outputs."""
    reduced, output = tuple(axes.reduction_axis), tuple(axes.output_axis)  # pyright: ignore[reportArgumentType]
    return tuple(i for i in range(ndim) if i not in reduced + output), reduced, output
