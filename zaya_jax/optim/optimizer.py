"""Muon on matrices, AdamW on the rest; the split is read off the declarations of the weights.

Sources: facts 4.2 (the split), Jordan's Muon, Moonlight arXiv 2502.16982 (the scale of the update,
so that Muon takes AdamW's learning rate and weight decay).
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from zaya_jax.config import OptimizerConfig
from zaya_jax.model.weights import Weight, map_weights

ADAMW_RMS = 0.2
"""Root mean square of a Muon update before the learning rate: what AdamW's usually is (Moonlight)."""


def make_optimizer(
    config: OptimizerConfig, declared: Mapping, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The transformation from gradients to updates: clipping, then Muon and AdamW.

    Args:
      config: names the optimiser and its values.
      declared: the tree of `Weight`s that the parameters follow.
      schedule: the learning rate over the run's steps.
    """
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    if config.name == "adamw":
        direction = adam
    else:
        groups = map_weights(lambda weight: "muon" if weight.matrix else "adam", declared)
        direction = optax.partition({"muon": _muon(config, declared), "adam": adam}, groups)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        direction,
        optax.add_decayed_weights(config.weight_decay, map_weights(lambda weight: weight.decay, declared)),
        optax.scale_by_learning_rate(schedule),
    )


def _muon(config: OptimizerConfig, declared: Mapping) -> optax.GradientTransformation:
    """Orthogonalised momentum, scaled to AdamW's root mean square."""
    axes = map_weights(lambda weight: matrix_axes(weight) or optax.MaskedNode(), declared)
    rms = map_weights(lambda weight: _rms_factor(weight) if weight.matrix else optax.MaskedNode(), declared)
    return optax.chain(
        optax.contrib.scale_by_muon(
            ns_steps=config.newton_schulz_steps, beta=config.momentum, weight_dimension_numbers=axes
        ),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, rms)),
    )


def _rms_factor(weight: Weight) -> float:
    """`0.2 * sqrt(max(fan_in, fan_out))`: an orthogonal matrix has RMS 1/sqrt of the larger side."""
    assert weight.matrix is not None, "only matrices are scaled by their sides"
    sizes = dict(zip(weight.axes, weight.shape, strict=True))
    return ADAMW_RMS * max(math.prod(sizes[axis] for axis in side) for side in weight.matrix) ** 0.5


def matrix_axes(weight: Weight) -> optax.contrib.MuonDimensionNumbers | None:
    """Which axes of a weight are its matrices' input and output; None where AdamW moves it."""
    if weight.matrix is None:
        return None
    reduced, output = (tuple(weight.axes.index(a) for a in axes) for axes in weight.matrix)
    return optax.contrib.MuonDimensionNumbers(reduced, output)
