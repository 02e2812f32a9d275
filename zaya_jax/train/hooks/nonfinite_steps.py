"""Counts consecutive steps that were skipped because of a NaN or an infinity.

A skipped step changes nothing but counters, so a run survives one. A run that skips every step learns nothing
and wastes its devices, so it ends.
"""

import dataclasses
import math

import jax

from zaya_jax.train.step.train_step import Metrics


@dataclasses.dataclass(frozen=True)
class Streak:
    """Consecutive skipped steps.

    Attributes:
      first: first skipped step.
      last: step at which the limit was reached.
      not_finite: names of the values that were NaN or infinite in the last step.
    """

    first: int
    last: int
    not_finite: str

    def describe(self, run_folder: str, *, newest_step: int | None) -> str:
        """Describes why the run ends, where it can be resumed, and what to try.

        Args:
          run_folder: folder of the run.
          newest_step: step of its newest checkpoint; None without one.
        """
        number = self.last - self.first + 1
        skipped = (
            f"steps {self.first} to {self.last}, {number} in a row, were skipped, the last because "
            f"{self.not_finite} NaN or infinite"
        )
        otherwise = "a smaller optimizer.learning_rate, another data.seed or another train.seed"
        if newest_step is None:
            return (
                f"{skipped}; the run has no checkpoint yet: start from scratch (--overwrite) with {otherwise}"
            )
        # The same command would read the same batches, and a run keeps its learning rate.
        return (
            f"{skipped}; the newest checkpoint is of step {newest_step}: start a run from its weights, "
            f"--config.train.init_from={run_folder} --config.run_folder=ANOTHER, with {otherwise}, or "
            "resume this one with a larger --config.train.max_consecutive_skips"
        )


class SkipCounter:
    """Detects too many consecutive skipped steps, also in the middle of the steps of one check.

    It counts from the start of the process, because checkpoints do not store the current streak.

    Args:
      limit: number of consecutive skipped steps that ends a run.
      skipped_steps: number of skipped steps of the run before the next step.
    """

    def __init__(self, limit: int, skipped_steps: int):
        self._limit, self._in_a_row = limit, 0
        self.skipped_steps = skipped_steps
        """Number of skipped steps of the run up to the newest step."""

    def add(
        self, step: int, metrics: Metrics, skipped_steps: int, *, is_ordered: bool = False
    ) -> Streak | None:
        """Counts the next step, and returns the streak if it reaches the limit.

        Args:
          step: number of the step.
          metrics: metrics of the step, on the devices.
          skipped_steps: number of skipped steps of the run, including this one.
          is_ordered: whether a rollback skips this step, which then does not count.
        """
        was_skipped, self.skipped_steps = skipped_steps > self.skipped_steps, skipped_steps
        if is_ordered:
            return None
        self._in_a_row = self._in_a_row + 1 if was_skipped else 0
        if self._in_a_row == self._limit:
            return Streak(step - self._limit + 1, step, _not_finite(metrics))
        return None


def _not_finite(metrics: Metrics) -> str:
    loss, norms = jax.device_get((metrics.loss, metrics.gradient_norms))
    names = [] if math.isfinite(loss) else ["the loss"]
    groups = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if groups:
        names.append(f"the gradient of {', '.join(groups)}")
    # The sum of squares may overflow although all groups are finite.
    return f"{' and '.join(names or ['the norm of all gradients'])} {'was' if len(names) < 2 else 'were'}"
