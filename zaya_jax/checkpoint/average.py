"""The average of the weights of several checkpoints of a run, as a new run folder.

The mean over the last checkpoints is stochastic weight averaging ([SWA]), or model soups of one run. It is
computed in float64, chunk by chunk, and rounded once.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from zaya_jax.checkpoint.format.layout import all_steps
from zaya_jax.checkpoint.newest import SavedStep, require_present, require_whole
from zaya_jax.checkpoint.reshape import check_vacant, publish_weights
from zaya_jax.checkpoint.run_config import read_config
from zaya_jax.checkpoint.stored_weights import StoredWeights
from zaya_jax.errors import UserError


class AveragedWeights(StoredWeights):
    """Weights of several checkpoints, read as their mean, part by part; types and chunks are of the first."""

    def __init__(self, saved: Sequence[SavedStep]):
        """Opens verified checkpoints.

        Raises:
          UserError: if two of them have different weights.
        """
        first, *others = saved
        super().__init__(first.run_folder, step=first.step, interleaved=False)
        self._others = [StoredWeights(each.run_folder, step=each.step, interleaved=False) for each in others]
        for stored in self._others:
            if stored.shapes != self.shapes:
                raise UserError(
                    f"{stored.folder} and {self.folder} have different weights by name or shape; "
                    "only checkpoints of one model have an average"
                )

    def read(self, name: str, index: tuple[int | slice, ...]) -> np.ndarray:
        """Returns the mean of a part of a weight, float64."""
        # A running sum: one part of one checkpoint is in memory next to it.
        total = super().read(name, index).astype(np.float64)
        for stored in self._others:
            total += stored.read(name, index)
        return total / (1 + len(self._others))


def average_steps(
    run_folder: str | pathlib.Path, folder: pathlib.Path, steps: Sequence[int], *, dtype: np.dtype | None
) -> None:
    """Writes the mean of the weights of checkpoints of a run as the only checkpoint of a new run folder.

    The new checkpoint has the number of the last step and no training state. Adapters and router biases are
    averaged like all other weights. Every checkpoint is verified first.

    Args:
      run_folder: folder of the run.
      folder: new run folder; it must not exist or must be empty.
      steps: steps of the checkpoints, at least two different ones.
      dtype: type that the mean is rounded to, to nearest even; None keeps the type of the checkpoints. Router
        biases stay float32.

    Raises:
      UserError: if a checkpoint does not exist or is damaged, or the folder cannot be used.
    """
    # A step that is named twice would count twice.
    steps = sorted(set(steps))
    if len(steps) < 2:
        raise UserError(f"an average needs at least 2 different steps, and {len(steps)} is given")
    require_present(run_folder, steps)
    # All of them before anything is written: damage in one would spoil the mean.
    saved = [require_whole(run_folder, step) for step in steps]
    check_vacant(saved[-1], folder)
    # The mean is a separate run: resuming the old one must not write to it.
    config = dataclasses.replace(read_config(run_folder), run_folder=str(folder))
    names = ", ".join(map(str, steps))
    publish_weights(
        AveragedWeights(saved), saved[-1], folder, config, dtype=dtype, origin=f"mean of steps {names}"
    )


def last_steps(run_folder: str | pathlib.Path, count: int) -> list[int]:
    """Returns the newest `count` steps of a run.

    Raises:
      UserError: if the run has fewer checkpoints.
    """
    existing = all_steps(run_folder)
    if len(existing) < count:
        listed = ", ".join(map(str, existing)) or "none"
        raise UserError(
            f"--last is {count}, and {run_folder} has {len(existing)} checkpoints: {listed}; keep more of "
            "them with --config.train.keep_checkpoints or --config.train.keep_every"
        )
    return existing[-count:]
