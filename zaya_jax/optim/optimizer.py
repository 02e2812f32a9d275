"""Muon on matrices, AdamW on the rest; the split is read off the declarations of the weights.

Sources: facts 4.2 (the split), Jordan's Muon, Moonlight arXiv 2502.16982 (the scale of the update,
so that Muon takes AdamW's learning rate and weight decay).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from zaya_jax.config import OptimizerConfig
from zaya_jax.model.matrices import matrix_sides
from zaya_jax.optim.muon import scale_by_muon
from zaya_jax.optim.newton_schulz import POLYNOMIALS, newton_schulz_flops
from zaya_jax.parallel.deal import Deal, Elements, Round, Stack
from zaya_jax.parallel.mesh import own

ADAMW_RMS = 0.2
"""Root mean square of a Muon update before the learning rate: what AdamW's usually is (Moonlight)."""


def make_optimizer(
    config: OptimizerConfig,
    dealt: Deal,
    schedule: optax.Schedule,
    *,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The transformation from clipped gradients to updates, of the parts that a device owns.

    Its `update` takes `step`, the steps that the run has done, skipped ones included: the learning rate
    follows them. The corrections of means that began at zero follow the updates that were made.

    Args:
      config: names the optimiser and its values.
      dealt: how the weights are dealt out; by elements alone for "adamw".
      schedule: the learning rate over the run's steps.
      implementation: of Muon's Newton-Schulz, as `scale_by_muon` takes it.
    """
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    groups = {part.name: "adam" if isinstance(part, Elements) else "muon" for part in dealt.parts}
    weights = dict(dealt.weights)
    decay = {
        part.name: weights[part.path].decay if isinstance(part, Elements) else True for part in dealt.parts
    }
    return optax.chain(
        optax.partition({"muon": _muon(config, dealt, implementation), "adam": adam}, groups),
        optax.add_decayed_weights(config.weight_decay, decay),
        _scale_by_learning_rate(schedule),
    )


def _scale_by_learning_rate(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Optax's own would count updates, and after a skipped step lag behind the schedule for good."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None, *, step: ArrayLike, **others: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, others
        return optax.tree.scale(-jnp.asarray(schedule(step)), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def _muon(config: OptimizerConfig, dealt: Deal, implementation: str | None) -> optax.GradientTransformation:
    """Orthogonalised momentum, scaled to AdamW's root mean square."""
    masked = {part.name: optax.MaskedNode() for part in dealt.elements}
    scales = {part.name: _rms_factor(part) for part in dealt.matrix_parts}
    return optax.chain(
        scale_by_muon(
            {part.name: part.axes for part in dealt.matrix_parts} | masked,
            momentum=config.momentum,
            polynomials=POLYNOMIALS[config.newton_schulz],
            num_steps=config.newton_schulz_steps,
            iteration_dtype=config.newton_schulz_dtype,
            momentum_dtype=config.momentum_dtype,
            implementation=implementation,
        ),
        optax.stateless(
            lambda updates, _: jax.tree.map(lambda x, scale: x * _own(scale), updates, scales | masked)
        ),
    )


def _rms_factor(part: Stack | Round) -> float | np.ndarray:
    """`0.2 * sqrt(max(fan_in, fan_out))`: an orthogonal matrix has RMS 1/sqrt of the larger side.

    A round has one for each device, by its matrix's own sides, not the padded ones.
    """
    if isinstance(part, Stack):
        return ADAMW_RMS * max(matrix_sides(part.shape, part.axes)) ** 0.5
    factors = np.zeros((part.num_devices, 1, 1), np.float32)
    sides = [max(run.rows, run.columns) for run in part.runs for _ in range(run.count)]
    factors[: len(sides), 0, 0] = ADAMW_RMS * np.sqrt(sides)
    return factors


def _own(scale: float | np.ndarray) -> float | jax.Array:
    return own(scale) if isinstance(scale, np.ndarray) else scale


def optimizer_flops(dealt: Deal, *, num_steps: int) -> int:
    """Of Newton-Schulz's products on each device, padding included."""
    return sum(
        part.shape[0] // dealt.num_devices * _flops_of_unit(part, num_steps) for part in dealt.matrix_parts
    )


def _flops_of_unit(part: Stack | Round, num_steps: int) -> int:
    rows, columns = matrix_sides(part.shape, part.axes)
    matrices = math.prod(part.shape[1:]) // (rows * columns)
    return matrices * newton_schulz_flops(rows, columns, num_steps=num_steps)
