"""Steps that were skipped because of a NaN or an infinity: counted in a row, without waiting for any.

A skipped step changes nothing but counters, so that a run survives one. A run that skips step after step
learns nothing, and somebody pays for it.
"""

import dataclasses
import math

import jax

from zaya_jax.train.step import Metrics


@dataclasses.dataclass(frozen=True)
class Streak:
    """Steps in a row that were skipped.

    Attributes:
      first: of the steps.
      last: of the steps that were allowed.
      not_finite: what was NaN or infinite in the last one, in words.
    """

    first: int
    last: int
    not_finite: str

    def describe(self, run_folder: str, *, newest_step: int | None) -> str:
        """Why the run ends, where it can go on, and what to try.

        Args:
          run_folder: of the run.
          newest_step: of its newest checkpoint; None without one.
        """
        number = self.last - self.first + 1
        skipped = (
            f"steps {self.first} to {self.last}, {number} in a row, were skipped, the last because "
            f"{self.not_finite} NaN or infinite"
        )
        otherwise = "a smaller optimizer.learning_rate, another data.seed or another train.seed"
        if newest_step is None:
            return f"{skipped}; there is no checkpoint yet: begin again, --overwrite, with {otherwise}"
        # The same command would read the same batches, and a run keeps its learning rate to its end.
        return (
            f"{skipped}; the newest checkpoint is of step {newest_step}: start a run from its weights, "
            f"--config.train.init_from={run_folder} --config.run_folder=ANOTHER, with {otherwise}, or let "
            "this one go on with a larger --config.train.stop_after_skips"
        )


class SkipCounter:
    """Finds so many skipped steps in a row that a run must end, also between two looks.

    Counted from where the process begins: no checkpoint holds the streak that it lies in.

    Args:
      limit: steps in a row that end a run.
      skipped_steps: of the run, before the next step.
    """

    def __init__(self, limit: int, skipped_steps: int):
        self._limit, self._in_a_row = limit, 0
        self.skipped_steps = skipped_steps
        """Of the run, until the newest step."""

    def add(
        self, step: int, metrics: Metrics, skipped_steps: int, *, is_ordered: bool = False
    ) -> Streak | None:
        """Takes the next step; the streak of the limit's length that it completes, if it does.

        Args:
          step: its number.
          metrics: of it, as they lie on their devices.
          skipped_steps: of the run, this one included.
          is_ordered: whether the run passes it over, which says nothing of what it learns.
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
    found = [] if math.isfinite(loss) else ["the loss"]
    groups = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if groups:
        found.append(f"the gradient of {', '.join(groups)}")
    # Groups that are finite may have squares whose sum is not.
    return f"{' and '.join(found or ['the norm of all gradients'])} {'was' if len(found) < 2 else 'were'}"
