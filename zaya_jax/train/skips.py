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


class SkipWatch:
    """Finds so many skipped steps in a row that a run must end, also between two looks.

    Counted from where the process begins: no checkpoint holds the streak that it lies in.

    Args:
      limit: steps in a row that end a run.
      skipped_steps: of the run, before the next step.
    """

    def __init__(self, limit: int, skipped_steps: int):
        self._limit, self._skipped, self._in_a_row = limit, skipped_steps, 0
        self._steps: list[tuple[int, Metrics]] = []

    def add(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step, as they lie on their devices."""
        self._steps.append((step, metrics))

    def look(self) -> Streak | None:
        """Waits for the steps since the last look: the first streak of the limit's length, or None."""
        steps, self._steps = self._steps, []
        # One transfer, of one number a step.
        counts = jax.device_get([metrics.skipped_steps for _, metrics in steps])
        for (step, metrics), count in zip(steps, counts, strict=True):
            self._in_a_row = self._in_a_row + 1 if count > self._skipped else 0
            self._skipped = count
            # Also if later steps were not skipped: whether a run ends must not depend on when it looks.
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
