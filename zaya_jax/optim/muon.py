"""Muon: momentum whose singular values are all made one ([Muon]; [Moonlight] 2.1)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from zaya_jax.optim.matrices import MatrixAxes, from_matrices, to_matrices
from zaya_jax.optim.newton_schulz import POLYNOMIALS, Polynomials, newton_schulz
from zaya_jax.parallel.layouts import gather_rows, own_rows


class MuonState(NamedTuple):
    """What Muon remembers from step to step."""

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
    """Orthogonalised momentum with Nesterov's look-ahead.

    Equal to `optax.contrib.scale_by_muon`, which has neither an iteration in another type nor
    the shape of its products chosen by the shorter side without copies.

    Args:
      axes: a tree with the matrix axes of each leaf.
      rows_in_node: a like tree: whether each device of a node has as many rows of each matrix of the leaf.
        None where all have whole matrices.
      momentum: decay of the mean of gradients; bias-corrected, as in Adam.
      polynomials: of the Newton-Schulz iteration.
      num_steps: of the iteration.
      iteration_dtype: of the iteration's products.
      momentum_dtype: in which the mean is kept.
      implementation: of the iteration, as `newton_schulz` takes it.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=momentum_dtype))

    def orthogonal(x: jax.Array, axes: MatrixAxes, has_rows: bool = False) -> jax.Array:
        own = to_matrices(x, axes)
        # A node's devices each do all of its matrices: to divide them would cost more than it saves.
        matrices = newton_schulz(
            gather_rows(own) if has_rows else own,
            polynomials,
            num_steps=num_steps,
            dtype=iteration_dtype,
            implementation=implementation,
        )
        return from_matrices(own_rows(matrices) if has_rows else matrices, axes, x.shape)

    def update(updates: optax.Updates, state: MuonState, params: optax.Params | None = None) -> Any:
        del params  # decay comes behind, for what AdamW moves too
        count = optax.safe_increment(state.count)
        # In float32 whatever it is kept in: a mean in bfloat16 is rounded once a step, not at each operation.
        mean = optax.tree.update_moment(updates, state.momentum, momentum, 1)
        # Nesterov: where the mean will be after the next gradient, were that the same as this one. So the
        # mean is corrected for one step more than has been made.
        ahead = jax.tree.map(
            lambda m, g: momentum * m + (1 - momentum) * g,
            optax.tree.bias_correction(mean, momentum, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, momentum, count),
        )
        # Behind the momentum: orthogonalised first, a mean of orthogonal matrices would be none ([Muon]).
        updates = jax.tree.map(orthogonal, ahead, axes, *(() if rows_in_node is None else (rows_in_node,)))
        return updates, MuonState(jnp.asarray(count), optax.tree.cast(mean, momentum_dtype))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]
