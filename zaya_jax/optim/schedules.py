"""The learning rate as a function of the optimiser steps done, over all phases of a run."""

import optax

from zaya_jax.config import Config, OptimizerConfig


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """The learning rate over the steps of a whole run: its phases' schedules, one after the other.

    One schedule for all phases: the optimiser's count of steps goes on from phase to phase.
    """
    phases = config.resolved_phases
    schedules = [phase_schedule(phase.config.optimizer, phase.config.train.num_steps) for phase in phases]
    return optax.join_schedules(schedules, [phase.first_step for phase in phases[1:]])


def phase_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then what `config.schedule` names, to the last step of a phase.

    Args:
      config: names the schedule and its values.
      num_steps: of the phase, the warm-up included.
    """
    peak, final, warmup = config.learning_rate, config.final_learning_rate, config.warmup_steps
    rest = num_steps - warmup
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=final / peak),
        "warmup_stable_decay": lambda: optax.linear_schedule(
            peak, final, config.decay_steps, transition_begin=rest - config.decay_steps
        ),
    }[config.schedule]()
    return (
        optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
    )
