"""Muon: orthogonalized momentum, all of whose singular values are one ([Muon]; [Moonlight] 2.1)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from zaya_jax.optim.matrices import MatrixAxes, from_matrices, to_matrices
from zaya_jax.optim.newton_schulz import POLYNOMIALS, Polynomials, newton_schulz
from zaya_jax.parallel.bucket_layouts import gather_rows, own_rows

MAX_ENTRIES = 2**28
"""Largest number of entries of a leaf that are orthogonalized at a time: 64 matrices of 2,048 x 2,048."""


class MuonState(NamedTuple):
    """State of Muon: number of updates, and momentum."""

    count: jax.Array
    momentum: optax.Updates


def scale_by_muon(
    axes: Any,
    *,
    rows_in_node: Any = None,
    momentum: float = 0.95,
    polynomials: Polynomials = POLYNOMIALS["jordan"],
    num_steps: int = 5,
    iteration_dtype: str = "float32",
    momentum_dtype: DTypeLike = "float32",
    implementation: str | None = None,
) -> optax.GradientTransformation:
    """Orthogonalized Nesterov momentum.

    Equal to `optax.contrib.scale_by_muon`, which however supports no other type for the iteration, and copies
    matrices to multiply along their shorter side.

    Args:
      axes: tree with the matrix axes of each leaf.
      rows_in_node: tree of booleans: whether the rows of each matrix of a leaf are split over the devices of
        a node. None if all matrices are whole.
      momentum: decay rate of the mean of gradients, which is bias-corrected as in Adam.
      polynomials: polynomials of the Newton-Schulz iteration.
      num_steps: number of steps of the iteration.
      iteration_dtype: type of the iteration's matrix products.
      momentum_dtype: storage type of the momentum.
      implementation: implementation of the iteration, as in `newton_schulz`.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=momentum_dtype))

    iterate = functools.partial(
        newton_schulz,
        polynomials=polynomials,
        num_steps=num_steps,
        dtype=iteration_dtype,
        implementation=implementation,
    )

    def orthogonal(x: jax.Array, axes: MatrixAxes, has_rows: bool = False) -> jax.Array:
        return _in_parts(lambda part: _orthogonal(part, axes, iterate, has_rows), x, axes)

    def update(updates: optax.Updates, state: MuonState, params: optax.Params | None = None) -> Any:
        del params  # weight decay is a later transformation, shared with AdamW
        count = optax.safe_increment(state.count)
        # Computed in float32 regardless of the storage type, so that it is rounded only once per step.
        mean = optax.tree.update_moment(updates, state.momentum, momentum, 1)
        # Nesterov: the mean after another step with the same gradient. The bias correction of the mean is
        # therefore that of the next step.
        ahead = jax.tree.map(
            lambda m, g: momentum * m + (1 - momentum) * g,
            optax.tree.bias_correction(mean, momentum, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, momentum, count),
        )
        # After the momentum, because a mean of orthogonal matrices is not orthogonal ([Muon]).
        updates = jax.tree.map(orthogonal, ahead, axes, *(() if rows_in_node is None else (rows_in_node,)))
        return updates, MuonState(jnp.asarray(count), optax.tree.cast(mean, momentum_dtype))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _orthogonal(
    x: jax.Array, axes: MatrixAxes, iterate: Callable[[jax.Array], jax.Array], has_rows: bool
) -> jax.Array:
    own = to_matrices(x, axes)
    # Each device of a node computes all of its matrices: splitting the work costs more than it saves.
    matrices = iterate(gather_rows(own) if has_rows else own)
    return from_matrices(own_rows(matrices) if has_rows else matrices, axes, x.shape)


def _in_parts(function: Callable[[jax.Array], jax.Array], x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """Applies a function to parts of at most `MAX_ENTRIES` along the first axis, if that counts matrices."""
    # All at once would need several times the memory of the weights, which matters if few devices own them.
    count = max(MAX_ENTRIES * len(x) // x.size, 1) if x.size > MAX_ENTRIES else len(x)
    if count >= len(x) or 0 in axes.inputs + axes.outputs:
        return function(x)
    first = len(x) % count  # matrices of the smaller part, if the others leave a rest

    def replace(out: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
        part = lax.dynamic_slice_in_dim(out, start, size)
        return lax.dynamic_update_slice_in_dim(out, function(part), start, axis=0)

    # Each part replaces its input, so that no second array of the size of the leaf is needed.
    out = x.astype(jnp.float32)
    out = replace(out, 0, first) if first else out
    return lax.fori_loop(0, len(x) // count, lambda i, out: replace(out, first + i * count, count), out)
