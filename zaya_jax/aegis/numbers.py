"""Numbers of a run that say that it learns worse than it did: a loss that jumped up, experts that starve.

Pure: whoever holds a run's numbers asks, and does what is to be done. All processes of a run have the same
numbers, and so find the same at the same step.

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
"""A normal distribution's standard deviation by its median absolute deviation."""
LEVEL = 32
"""Newest losses whose median is the level: a loss falls, and what it was long ago says nothing of a jump."""
LEAST_DEVIATION = 0.01
"""Of the median: a loss that hardly moves would make a spike of each of its ripples."""


@dataclasses.dataclass(frozen=True)
class Spike:
    """Steps in a row whose losses lay far above those before them.

    Attributes:
      first: of the steps.
      last: of them that was seen.
      loss: their mean, in nats.
      median: of the losses before them, in nats.
      deviations: that the lowest of them lies above the median.
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


class SpikeFinder:
    """Finds losses that stay far above the ones before them.

    By medians, which a few outliers do not move, as they would a mean; and by several in a row, for one bad
    batch is what clipping is for. The spread is that of the differences from one loss to the next: a loss
    that falls quickly is no loss that scatters.

    Args:
      config: says how far, how long, and against how many.
      losses: of steps before, as far as they are known.
    """

    def __init__(self, config: WatchConfig, losses: Iterable[float] = ()):
        self._config = config
        known = filter(math.isfinite, losses)
        self._losses = collections.deque[float](known, maxlen=config.spike_window)
        self._above: list[tuple[int, float, float]] = []

    def add(self, step: int, loss: float) -> Spike | None:
        """Takes the loss of the next step; the spike that it completes, if it does.

        Args:
          step: its number.
          loss: in nats; one that is not finite is no spike, and left out.
        """
        if not math.isfinite(loss):
            return None
        deviations = self._deviations(loss)
        if deviations is None or deviations < self._config.spike_deviations:
            # What was above for a while and came back by itself is part of how this run jumps.
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
        return Spike(steps[0], step, statistics.fmean(losses), median, min(deviations))

    def _deviations(self, loss: float) -> float | None:
        if len(self._losses) < min(LEVEL, self._config.spike_window):
            return None
        median = statistics.median(self._level())
        # A difference of two has twice the variance of one.
        differences = (abs(b - a) for a, b in itertools.pairwise(self._losses))
        spread = MAD_TO_DEVIATION * statistics.median(differences) / math.sqrt(2)
        return (loss - median) / max(spread, LEAST_DEVIATION * abs(median), 1e-12)

    def _level(self) -> list[float]:
        return list(self._losses)[-LEVEL:]


@dataclasses.dataclass(frozen=True)
class Starved:
    """An expert that no token went to, or that took nearly all, for many lines in a row.

    Attributes:
      layer: of it.
      expert: of the layer.
      share: of the layer's tokens that it had in the last line.
    """

    layer: int
    expert: int
    share: float

    @property
    def is_dead(self) -> bool:
        """Whether it had none; else it had nearly all."""
        return self.share == 0

    def __str__(self) -> str:
        had = "no token" if self.is_dead else f"{self.share:.0%} of the tokens"
        return f"expert {self.expert} of layer {self.layer} had {had}"


class RouterWatch:
    """Finds experts that are dead, and routers that have collapsed to one expert.

    Args:
      config: says for how many lines in a row, and what "nearly all" is.
    """

    def __init__(self, config: WatchConfig):
        self._config = config
        self._dead_LE: np.ndarray | None = None
        self._greedy_LE: np.ndarray | None = None

    def add(self, counts_LX: np.ndarray) -> list[Starved]:
        """Takes the counts of a batch's tokens; what has lasted for so many lines with this one.

        Each is told once, and again when it was over meanwhile.

        Args:
          counts_LX: of tokens by layer and class, of which the last is to skip the experts.
        """
        counts_LE = np.asarray(counts_LX)[:, :-1]
        shares_LE = counts_LE / np.maximum(np.sum(counts_LX, axis=1, keepdims=True), 1)
        self._dead_LE = _in_a_row(self._dead_LE, counts_LE == 0)
        self._greedy_LE = _in_a_row(self._greedy_LE, shares_LE > self._config.collapse_share)
        lines = self._config.starved_lines
        found = np.argwhere((self._dead_LE == lines) | (self._greedy_LE == lines))
        return [Starved(int(layer), int(e), float(shares_LE[layer, e])) for layer, e in found]


def _in_a_row(before: np.ndarray | None, is_so: np.ndarray) -> np.ndarray:
    """How often it was so in a row, by place."""
    return is_so * (1 if before is None else before + 1)
