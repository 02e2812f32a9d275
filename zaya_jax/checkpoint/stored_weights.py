"""The newest weights of a run, read part by part: for whoever has less memory than they take.

Weights are named by the keys that lead to them in what `Zaya.apply` takes, joined with dots.
"""

import pathlib
from typing import Any

from zaya_jax.checkpoint.layout import METADATA, WEIGHTS
from zaya_jax.checkpoint.newest import SavedStep, require_step
from zaya_jax.checkpoint.stored_arrays import StoredArrays, check_type


class StoredWeights(StoredArrays):
    """Weights on the disk.

    Attributes:
      step: of the checkpoint.
    """

    def __init__(self, run_folder: str | pathlib.Path):
        """Opens the newest checkpoint of a run.

        Raises:
          ValueError: if there is none, or a weight cannot be opened, or lacks a part.
        """
        self.step = require_step(run_folder)
        # Parts of several weights are read in turn, as other layouts have them.
        super().__init__(SavedStep(str(run_folder), self.step), WEIGHTS, in_turn=True)
        for name, array in self._arrays.items():
            check_type(self.folder, name, array)

    def identity(self) -> list[Any]:
        """What changes when the checkpoint does, as JSON has it."""
        status = (self.folder / METADATA).stat()
        return [str(self.folder), status.st_size, status.st_mtime_ns]
