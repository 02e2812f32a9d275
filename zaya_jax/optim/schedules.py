"""The learning rate as a function of the steps that a run has done, over all its phases."""

import functools

import optax

from zaya_jax.config import Config, OptimizerConfig


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """The learning rate over the steps of a whole run: its phases' schedules, one after the other.

    One schedule for all phases: the run's count of steps goes on from phase to phase.
    """
    phases = config.resolved_phases
    return _joined(
        tuple((phase.config.optimizer, phase.config.train.num_steps) for phase in phases),
        tuple(phase.first_step for phase in phases[1:]),
    )


# The same function for the same schedule: it is part of what a compiled step is found by.
@functools.lru_cache
def _joined(phases: tuple[tuple[OptimizerConfig, int], ...], borders: tuple[int, ...]) -> optax.Schedule:
    # Each phase's schedule counts from 0; joined, it is given the run's count less the phase's first step.
    return optax.join_schedules([phase_schedule(config, steps) for config, steps in phases], list(borders))


def phase_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up, then what `config.schedule` names, to the last step of a phase.

    A function of the steps done before. The first step of a warm-up of W has a W-th of the rate, for with
    none it would read a whole batch and learn nothing; step W has all of it, and so has the first without a
    warm-up. The last step has the final rate.

    Args:
      config: names the schedule and its values.
      num_steps: of the phase, the warm-up included.
    """
    peak, final, warmup = config.learning_rate, config.final_learning_rate, config.warmup_steps
    at_peak = max(warmup, 1) - 1  # steps done before the first at the full rate
    # The last step has `num_steps - 1` before it, and the final rate must be its own, not the next one's.
    rest = max(num_steps - 1 - at_peak, 1)
    # A phase too short for its decay decays from its peak on.
    decay = min(config.decay_steps, rest)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=final / peak),
        "warmup_stable_decay": lambda: optax.linear_schedule(
            peak, final, decay, transition_begin=rest - decay
        ),
    }[config.schedule]()
    if not at_peak:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, at_peak), after], [at_peak])
