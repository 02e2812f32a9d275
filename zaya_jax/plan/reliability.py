"""The productive share of a cluster's time under random failures: a model, and its parameters from a run.

Failures are equally likely at any time of work. Each costs the work since the last checkpoint and the time to
restart, which counts as a whole even if the restart itself fails. This is the model of Daly (Future
Generation Computer Systems 22, 2006, page 303), for one interval.
"""

import dataclasses
import math

from zaya_jax.aegis.views.goodput import DOWN, HANG, LOST, PRODUCTIVE, Goodput
from zaya_jax.errors import UserError
from zaya_jax.train.heartbeats import COMPILE, RESTORE, SAVE, START

GPU_HOURS = {
    "Meta's research clusters, at 1,024 GPUs": 7.9 * 1024,
    "Llama 3 405B, 466 interruptions in 54 days on 16,384 GPUs": 54 * 24 / 466 * 16384,
}
"""GPU hours of work between two failures of a run ([Reliability], [Llama-3] section 3.3.4)."""


@dataclasses.dataclass(frozen=True)
class Failures:
    """Parameters of the model in seconds.

    Attributes:
      mean_seconds: mean work between two failures of the whole cluster.
      interval: time of steps between two checkpoints.
      stall: time that steps wait for each checkpoint.
      restart: time from a failure to the first new step.
    """

    mean_seconds: float
    interval: float
    stall: float
    restart: float


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected shares of a run's time.

    Attributes:
      productive: steps that remain part of the run.
      stall: waiting for checkpoints.
      lost: steps that are repeated.
      restart: from failures to the first new steps.
    """

    productive: float
    stall: float
    lost: float
    restart: float


def mean_seconds_between_failures(num_gpus: int) -> float:
    """Returns the mean time between failures of a cluster, from the worse of the published rates.

    Args:
      num_gpus: GPUs of the cluster, which fail independently.
    """
    return 3600 * min(GPU_HOURS.values()) / num_gpus


def expect(failures: Failures) -> Expected:
    """Returns the expected shares of a run's time, for a run much longer than an interval."""
    mean = failures.mean_seconds
    # Expected failures per completed interval (Daly's equation): most attempts at a long interval fail.
    num_failures = math.expm1((failures.interval + failures.stall) / mean)
    working = mean * num_failures
    restarting = num_failures * failures.restart
    total = working + restarting
    return Expected(
        productive=failures.interval / total,
        stall=failures.stall / total,
        lost=(working - failures.interval - failures.stall) / total,
        restart=restarting / total,
    )


def best_interval(failures: Failures) -> float:
    """Returns the interval in seconds with the largest productive share; the interval of `failures` is
    ignored.

    A shorter interval waits longer for checkpoints, a longer one loses more work. The well-known first guess
    is sqrt(2 x stall x mean); this searches the model itself, which has a single maximum.
    """
    from scipy.optimize import minimize_scalar  # takes a third of a second to import

    def unproductive(logarithm: float) -> float:
        return -expect(dataclasses.replace(failures, interval=math.exp(logarithm))).productive

    # Of the logarithm, because the range spans many orders of magnitude.
    bounds = math.log(1e-3 * failures.stall), math.log(4 * failures.mean_seconds + failures.stall)
    return math.exp(minimize_scalar(unproductive, bounds=bounds, options={"xatol": 1e-9}).x)


def failures_of_run(goodput: Goodput, *, checkpoint_every: int) -> Failures:
    """Returns the model's parameters as measured in a run.

    Args:
      goodput: time accounting of a run that has started at least twice.
      checkpoint_every: steps between two checkpoints.

    Raises:
      UserError: if the run has not failed yet, or has made no step.
    """
    # Every start after the first one counts as the consequence of a failure.
    num_failures, steps = goodput.attempts - 1, goodput.steps + goodput.lost_steps
    if num_failures < 1 or steps < 1:
        raise UserError(
            f"the run has started {goodput.attempts} times and made {steps:,} steps; measuring the cost of "
            "failures needs at least one failure and one step"
        )
    seconds = goodput.seconds
    # Lost steps took as long as productive ones: both count as work between failures.
    making = seconds[PRODUCTIVE] + seconds[LOST]
    return Failures(
        # In the model a failure can also occur while steps wait for a checkpoint.
        mean_seconds=(making + seconds[SAVE]) / num_failures,
        interval=checkpoint_every * making / steps,
        stall=checkpoint_every * seconds[SAVE] / steps,
        # The first start stands for one of the restarts, because it takes equally long.
        restart=sum(seconds[name] for name in (HANG, DOWN, START, RESTORE, COMPILE)) / num_failures,
    )
