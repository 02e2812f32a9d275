"""Detectors of anomalies in a run's metrics: loss spikes, unused experts and collapsed routers.

They have no side effects. All processes of a run have the same metrics, so they detect the same anomalies at
the same step.

Letters: L layers, E experts, X router classes.
"""

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable

import numpy as np

from zaya_jax.config import WatchConfig

MAD_TO_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""
LEVEL_WINDOW = 32
"""Number of newest losses whose median is the level: the loss falls, so older ones say nothing of a spike."""
MIN_DEVIATION = 0.01
"""Minimum deviation relative to the median, so that a nearly constant loss has no spikes."""


@dataclasses.dataclass(frozen=True)
class LossSpike:
    """Consecutive steps whose losses were far above the preceding ones.

    Attributes:
      first: first step of the spike.
      last: last observed step of the spike.
      loss: mean loss of these steps, in nats.
      median: median of the losses before them, in nats.
      deviations: robust deviations of the lowest of these losses above the median.
    """

    first: int
    last: int
    loss: float
    median: float
    deviations: float

    def __str__(self) -> str:
        return (
            f"steps {self.first} to {self.last} have a mean loss of {self.loss:.4f}, where {self.median:.4f} "
            f"was the median before them: at least {self.deviations:.0f} robust deviations above it"
        )


class LossSpikeDetector:
    """Detects losses that stay far above the preceding ones.

    It uses medians, which a few outliers do not affect, and requires several steps in a row, because a single
    bad batch is handled by clipping. The spread is that of differences of consecutive losses, so that a loss
    that falls quickly does not count as noisy.

    Args:
      config: threshold, number of steps and window.
      losses: known losses of earlier steps.
    """

    def __init__(self, config: WatchConfig, losses: Iterable[float] = ()):
        self._config = config
        known = filter(math.isfinite, losses)
        self._losses = collections.deque[float](known, maxlen=config.spike_window)
        self._above: list[tuple[int, float, float]] = []

    def add(self, step: int, loss: float) -> LossSpike | None:
        """Adds the loss of the next step, and returns the spike that it completes, if any.

        Args:
          step: number of the step.
          loss: loss in nats; a non-finite loss is ignored.
        """
        if not math.isfinite(loss):
            return None
        deviations = self._deviations(loss)
        if deviations is None or deviations < self._config.spike_deviations:
            # A high loss that returned by itself belongs to the normal variation of the run.
            self._losses.extend(above for _, above, _ in self._above)
            self._above = []
            self._losses.append(loss)
            return None
        self._above.append((step, loss, deviations))
        if len(self._above) < self._config.spike_steps:
            return None
        steps, losses, deviations = zip(*self._above, strict=True)
        self._above = []
        median = statistics.median(self._level())
        return LossSpike(steps[0], step, statistics.fmean(losses), median, min(deviations))

    def _deviations(self, loss: float) -> float | None:
        if len(self._losses) < min(LEVEL_WINDOW, self._config.spike_window):
            return None
        median = statistics.median(self._level())
        # The difference of two losses has twice the variance of one.
        differences = (abs(b - a) for a, b in itertools.pairwise(self._losses))
        spread = MAD_TO_DEVIATION * statistics.median(differences) / math.sqrt(2)
        return (loss - median) / max(spread, MIN_DEVIATION * abs(median), 1e-12)

    def _level(self) -> list[float]:
        return list(self._losses)[-LEVEL_WINDOW:]


@dataclasses.dataclass(frozen=True)
class ExpertLoadAlert:
    """An expert that had no tokens, or nearly all of them, in many consecutive log lines.

    Attributes:
      layer: index of the layer.
      expert: index of the expert.
      share: share of the layer's tokens in the last line.
    """

    layer: int
    expert: int
    share: float

    @property
    def is_dead(self) -> bool:
        """Whether the expert had no tokens; otherwise it had nearly all."""
        return self.share == 0

    def __str__(self) -> str:
        had = "no token" if self.is_dead else f"{self.share:.0%} of the tokens"
        return f"expert {self.expert} of layer {self.layer} had {had}"


class ExpertLoadMonitor:
    """Detects experts without tokens, and routers that have collapsed to one expert.

    Args:
      config: number of consecutive lines, and the share that counts as nearly all.
    """

    def __init__(self, config: WatchConfig):
        self._config = config
        self._dead_LE: np.ndarray | None = None
        self._greedy_LE: np.ndarray | None = None

    def add(self, counts_LX: np.ndarray) -> list[ExpertLoadAlert]:
        """Adds the counts of a log line, and returns experts that reach the limit with it.

        Each is reported once, and again if it had recovered in between.

        Args:
          counts_LX: number of tokens by layer and router class, shape [L, X]; the last class is "skip".
        """
        counts_LE = np.asarray(counts_LX)[:, :-1]
        shares_LE = counts_LE / np.maximum(np.sum(counts_LX, axis=1, keepdims=True), 1)
        self._dead_LE = _in_a_row(self._dead_LE, counts_LE == 0)
        self._greedy_LE = _in_a_row(self._greedy_LE, shares_LE > self._config.collapse_share)
        lines = self._config.expert_alert_lines
        places = np.argwhere((self._dead_LE == lines) | (self._greedy_LE == lines))
        return [ExpertLoadAlert(int(layer), int(e), float(shares_LE[layer, e])) for layer, e in places]


def _in_a_row(before: np.ndarray | None, is_so: np.ndarray) -> np.ndarray:
    """Returns the number of consecutive lines in which the condition held, by expert."""
    return is_so * (1 if before is None else before + 1)
