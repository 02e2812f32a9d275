"""Reading of a run's newest weights part by part, with less memory than they need.

The name of a weight is its keys in the variables of `Zaya.apply`, joined with dots.
"""

import pathlib
from typing import Any

from zaya_jax.checkpoint.format.layout import METADATA, WEIGHTS
from zaya_jax.checkpoint.newest import SavedStep, require_step
from zaya_jax.checkpoint.stored_arrays import StoredArrays, check_type


class StoredWeights(StoredArrays):
    """The weights of a run's newest intact checkpoint.

    Attributes:
      step: step of the checkpoint.
    """

    def __init__(self, run_folder: str | pathlib.Path):
        """Opens the newest checkpoint of a run.

        Raises:
          UserError: if there is none, or a weight cannot be opened or lacks a chunk.
        """
        self.step = require_step(run_folder, weights_only=True)
        # Other layouts order layers and weights differently, so parts of several weights alternate.
        super().__init__(SavedStep(str(run_folder), self.step), WEIGHTS, interleaved=True)
        for name, array in self._arrays.items():
            check_type(self.folder, name, array)

    def identity(self) -> list[Any]:
        """JSON-compatible values that change when the checkpoint does."""
        # The metadata is rewritten whenever a checkpoint is.
        status = (self.folder / METADATA).stat()
        return [str(self.folder), status.st_size, status.st_mtime_ns]
