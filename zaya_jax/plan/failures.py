"""How much of a cluster's time a run has, when its nodes fail now and then: a model, and what a run saw.

Failures come at random, as likely at any moment of work, and each costs the time back to the last checkpoint
and the time to begin anew, which is told as a whole however often it fails itself. That is the model of Daly
(Future Generation Computer Systems 22, 2006, page 303), for one interval.
"""

import dataclasses
import math
from collections.abc import Mapping

from zaya_jax.aegis.goodput import COMPILE, DOWN, HANG, LOST, PRODUCTIVE, RESTORE, SAVE, START, Goodput

GPU_HOURS = {
    "Meta's research clusters, at 1,024 GPUs": 7.9 * 1024,
    "Llama 3 405B, 466 interruptions in 54 days on 16,384 GPUs": 54 * 24 / 466 * 16384,
}
"""That a GPU works between two failures of its run ([Reliability], [Llama-3] section 3.3.4)."""
_DOUBLINGS = 60
"""Of the precision with which the best interval is found."""


@dataclasses.dataclass(frozen=True)
class Failures:
    """What a run's time goes by, in seconds.

    Attributes:
      mean_seconds: of work between two failures, of the whole cluster.
      interval: that steps take from one checkpoint to the next.
      stall: that steps wait for each.
      restart: from a failure to the first new step.
    """

    mean_seconds: float
    interval: float
    stall: float
    restart: float


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the time of a run goes into, as shares of all of it.

    Attributes:
      productive: steps that are part of the run.
      stall: waiting for checkpoints.
      lost: steps that are made again.
      restart: from failures to the first new steps.
    """

    productive: float
    stall: float
    lost: float
    restart: float


def mean_seconds_between_failures(num_gpus: int) -> float:
    """Of a cluster, by the worse of what others have told.

    Args:
      num_gpus: of the cluster; each fails by itself.
    """
    return 3600 * min(GPU_HOURS.values()) / num_gpus


def expect(given: Failures) -> Expected:
    """The shares of a run's time, on average over a run that is much longer than an interval."""
    mean = given.mean_seconds
    # For each interval that is done; of long ones most end before they are.
    failures = math.expm1((given.interval + given.stall) / mean)
    working = mean * failures
    restarting = failures * given.restart
    total = working + restarting
    return Expected(
        productive=given.interval / total,
        stall=given.stall / total,
        lost=(working - given.interval - given.stall) / total,
        restart=restarting / total,
    )


def best_interval(given: Failures) -> float:
    """The interval with the largest share of productive time, in seconds; that of `given` is not looked at.

    The shorter, the more is waited for checkpoints; the longer, the more is lost. The square root of 2 x
    stall x mean is known as a first guess; here the model itself is asked, which has one maximum.
    """
    low, high = 1e-3 * given.stall, 4 * given.mean_seconds + given.stall
    for _ in range(_DOUBLINGS):
        third = (high - low) / 3
        left, right = low + third, high - third
        if _productive(given, left) < _productive(given, right):
            low = left
        else:
            high = right
    return (low + high) / 2


def _productive(given: Failures, interval: float) -> float:
    return expect(dataclasses.replace(given, interval=interval)).productive


def seen(goodput: Goodput, *, checkpoint_every: int) -> Failures:
    """What a run went through, in the model's terms.

    Args:
      goodput: of the run, that has begun at least twice.
      checkpoint_every: steps from one checkpoint to the next.

    Raises:
      ValueError: if the run has not failed yet, or has made no step.
    """
    failures, steps = goodput.attempts - 1, goodput.steps + goodput.lost_steps
    if failures < 1 or steps < 1:
        raise ValueError(
            f"the run has begun {goodput.attempts} times and made {steps:,} steps; to say how it fares with "
            "failures it must have had one"
        )
    seconds = goodput.seconds
    making = seconds[PRODUCTIVE] + seconds[LOST]
    return Failures(
        mean_seconds=(making + seconds[SAVE]) / failures,
        interval=checkpoint_every * making / steps,
        stall=checkpoint_every * seconds[SAVE] / steps,
        restart=_restarts(seconds) / failures,
    )


def _restarts(seconds: Mapping[str, float]) -> float:
    """What its restarts took; the first start is one of them, for it took as long."""
    return sum(seconds[name] for name in (HANG, DOWN, START, RESTORE, COMPILE))
