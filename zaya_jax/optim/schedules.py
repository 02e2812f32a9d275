"""Learning-rate schedules over all phases of a run."""

import functools

import optax

from zaya_jax.config import Config, OptimizerConfig


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """The learning rate of a whole run: the schedules of its phases, concatenated.

    Phases share one schedule, because steps are counted over the whole run.
    """
    phases = config.resolved_phases
    return _joined(
        tuple((phase.config.optimizer, phase.config.train.num_steps) for phase in phases),
        tuple(phase.first_step for phase in phases[1:]),
    )


# Cached, because the schedule is part of the key of a compiled step.
@functools.lru_cache
def _joined(phases: tuple[tuple[OptimizerConfig, int], ...], borders: tuple[int, ...]) -> optax.Schedule:
    # join_schedules passes each schedule the step minus its boundary, so each phase counts from 0.
    return optax.join_schedules([phase_schedule(config, steps) for config, steps in phases], list(borders))


def phase_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up followed by `config.schedule`, for one phase.

    The schedule is a function of the number of preceding steps. The first of W warm-up steps has 1/W of the
    peak rate (with rate 0 it would not learn), and step W has the peak rate, as has the first step without a
    warm-up. The last step has the final rate.

    Args:
      config: schedule and rates.
      num_steps: number of steps of the phase, warm-up included.
    """
    peak, final, warmup = config.learning_rate, config.final_learning_rate, config.warmup_steps
    at_peak = max(warmup, 1) - 1  # number of steps before the first one with the peak rate
    # num_steps - 1 steps precede the last one, which must have the final rate.
    rest = max(num_steps - 1 - at_peak, 1)
    # A phase that is shorter than its decay starts to decay at once.
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
