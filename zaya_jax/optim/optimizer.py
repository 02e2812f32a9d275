"""Muon on matrices, AdamW on the rest; the split is read off the declarations of the weights.

Sources: facts 4.2 (the split), Jordan's Muon, Moonlight arXiv 2502.16982 (the scale of the update,
so that Muon takes AdamW's learning rate and weight decay).
"""

from collections.abc import Mapping

import optax

from zaya_jax.config import OptimizerConfig
from zaya_jax.model.weights import Weight, map_weights

ADAMW_RMS = 0.2
"""Root mean square of a Muon update before the learning rate: what AdamW's usually is (Moonlight)."""


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then a cosine to `final_learning_rate` at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.final_learning_rate,
    )


def make_optimizer(
    config: OptimizerConfig, declared: Mapping, num_steps: int
) -> optax.GradientTransformation:
    """The transformation from gradients to updates: clipping, then Muon and AdamW.

    Args:
      config: names the optimiser and its values.
      declared: the tree of `Weight`s that the parameters follow.
      num_steps: length of the schedule.
    """
    schedule = learning_rate_schedule(config, num_steps)
    decayed = map_weights(lambda weight: weight.decay, declared)
    if config.name == "adamw":
        move = optax.adamw(
            schedule, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay, mask=decayed
        )
    else:
        move = optax.contrib.muon(
            schedule,
            ns_steps=config.newton_schulz_steps,
            beta=config.momentum,
            eps=config.eps,
            weight_decay=config.weight_decay,
            weight_decay_mask=decayed,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=map_weights(matrix_axes, declared),
            consistent_rms=ADAMW_RMS,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), move)


def matrix_axes(weight: Weight) -> optax.contrib.MuonDimensionNumbers | None:
    """Which axes of a weight are its matrices' input and output; None where AdamW moves it."""
    if weight.matrix is None:
        return None
    reduced, output = (tuple(weight.axes.index(a) for a in axes) for axes in weight.matrix)
    return optax.contrib.MuonDimensionNumbers(reduced, output)
