"""Time, bytes of text and attended keys of the steps between two logged steps."""

import time
from collections.abc import Sequence

import numpy as np

from zaya_jax.config import ModelConfig, StepRange
from zaya_jax.data.reading.batch import Batch
from zaya_jax.data.reading.mixture import MixturePosition
from zaya_jax.model.flops import mean_keys
from zaya_jax.parallel.processes import hosts
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.step.step_metrics import peak_of, train_values
from zaya_jax.train.step.train_step import Metrics


class StepClock:
    """Seconds per step, without evaluations and checkpoints.

    Args:
      step: number of completed steps.
    """

    def __init__(self, step: int):
        self.restart(step)

    def restart(self, step: int) -> None:
        """Starts the measurement again after a step."""
        # Monotonic: the wall clock may jump.
        self._step, self._time = step, time.monotonic()

    def lap(self, step: int) -> float:
        """Returns the mean seconds per step since the last restart or lap, and restarts."""
        seconds = (time.monotonic() - self._time) / (step - self._step)
        self.restart(step)
        return seconds


class AttendedKeys:
    """Mean number of keys that a token attends to, counted on the host.

    Args:
      config: network config.
      is_needed: whether keys are counted at all; the same in all processes.
    """

    def __init__(self, config: ModelConfig, *, is_needed: bool):
        self._config, self._is_needed = config, is_needed
        self._by_step: list[dict[str, float]] = []

    def add(self, positions_BT: np.ndarray) -> None:
        """Counts the keys of one step in this process's share of the batch."""
        if self._is_needed:
            # From the host's copy of the batch: reading the device's copy would wait for the step.
            self._by_step.append(mean_keys(self._config, positions_BT))

    def take(self) -> dict[str, float] | None:
        """Returns the means of all processes since the last call, by layer type; None if not needed."""
        if not self._is_needed:
            return None
        counts, self._by_step = hosts.gather("attended keys", self._by_step), []
        # A plain mean is right: all processes read equally many tokens in each step.
        means = [mean for of_process in counts for mean in of_process]
        return {kind: sum(mean[kind] for mean in means) / len(means) for kind in means[0]}


class StepMeter:
    """Collects what a step's values need from its batches. One meter serves the steps of one range.

    Args:
      run: the run.
      step_range: steps that are measured.
      position: position in the data mixture at the start of the range.
      clock: clock of the loop.
    """

    def __init__(self, run: PreparedRun, step_range: StepRange, position: MixturePosition, clock: StepClock):
        self._run, self._range, self._position, self._clock = run, step_range, position, clock
        self._keys = AttendedKeys(run.config.model, is_needed=peak_of(run) is not None)
        self._text_bytes: list[float] = []

    def add(self, batch: Batch) -> None:
        """Counts the text and keys of one step's batch."""
        self._text_bytes.append(self._run.text_bytes(batch))
        self._keys.add(np.asarray(batch.positions_BT))

    def measure(self, step: int, metrics: Metrics) -> tuple[dict[str, float], Sequence[float]]:
        """Returns a step's values, and the bytes of text of each step since the last call.

        All processes must call it at the same steps: it sums over them.

        Args:
          step: number of the step, which is complete.
          metrics: metrics of the step, on the host.
        """
        # Each process counts its share of the batch.
        text_bytes, self._text_bytes = hosts.reduce("text bytes", self._text_bytes, _sum_by_step), []
        seconds, keys = self._clock.lap(step), self._keys.take()
        values = train_values(self._run, self._range, step, metrics, text_bytes[-1], seconds, keys=keys)
        position = self._position.after((step - self._range.first_step) * self._range.batch_size)
        epochs = {f"epochs/{folder}": count for folder, count in position.epochs().items()}
        return values | epochs, text_bytes


def _sum_by_step(counts: list[list[int]]) -> list[int]:
    """Adds the lists of processes, which have an element per step."""
    return [sum(of_step) for of_step in zip(*counts, strict=True)]
