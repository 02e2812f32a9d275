"""Reading of a run's newest weights part by part, with less memory than they need.

The name of a weight is its keys in the variables of `Zaya.apply`, joined with dots.
"""

import functools
import pathlib
from typing import Any

from zaya_jax.checkpoint.format.layout import EMA, METADATA, NUM_UPDATES, WEIGHTS, WeightsKind
from zaya_jax.checkpoint.newest import SavedStep, require_average, require_step
from zaya_jax.checkpoint.stored_arrays import StoredArrays, check_type


class StoredWeights(StoredArrays):
    """The weights of a verified checkpoint; for an average, weights that do not train are as they are.

    Attributes:
      step: step of the checkpoint.
    """

    def __init__(
        self,
        run_folder: str | pathlib.Path,
        weights: WeightsKind = "raw",
        *,
        step: int | None = None,
        interleaved: bool = True,
    ):
        """Opens a checkpoint of a run.

        Args:
          run_folder: folder of the run.
          weights: the weights to read, "raw" or their average, "ema".
          step: step of a verified checkpoint; None verifies and opens the newest.
          interleaved: whether parts of several weights are read alternately, as for `StoredArrays`.

        Raises:
          UserError: if there is none, or no average; or a weight cannot be opened or lacks a chunk.
        """
        newest = functools.partial(require_step, run_folder, weights_only=True, weights=weights)
        self.step = newest() if step is None else step
        saved = SavedStep(str(run_folder), self.step)
        # Other layouts order layers and weights differently, so parts of several weights alternate there.
        super().__init__(saved, WEIGHTS, interleaved=interleaved)
        if weights == EMA:
            require_average(run_folder, self.step)
            # The average replaces the weights that it contains; an adapter's run averages the adapters alone.
            average = StoredArrays(saved, EMA, interleaved=interleaved)
            replaced = {name: array for name, array in average._arrays.items() if name != NUM_UPDATES}
            # The rest, weights that do not train, stays that of the item of the weights.
            self._arrays |= replaced
            self.shapes |= {name: average.shapes[name] for name in replaced}
            self.folder = average.folder
        for name, array in self._arrays.items():
            check_type(self.folder, name, array)

    def identity(self) -> list[Any]:
        """JSON-compatible values that change when the checkpoint does."""
        # The metadata is rewritten whenever a checkpoint is.
        status = (self.folder / METADATA).stat()
        return [str(self.folder), status.st_size, status.st_mtime_ns]
