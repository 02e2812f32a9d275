"""Custom parts of a run: an optimizer, and a function that changes batches. The README has an example.

To observe a run or act on it, use hooks (`zaya_jax.train.hooks.hook.Hook`).
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import optax

from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extensions:
    """Parts of a run that its config does not describe. Pass the same ones when you resume the run.

    Attributes:
      optimizer: returns the optimizer of a phase, instead of the config's, from the learning rate as a
        function of completed steps. It updates the buckets that a device owns: matrices of shape [matrices,
        rows, columns], and flat vectors, padded with zeros. So it must update each element, or each matrix,
        independently of others, and its state must have the shape of a bucket or be a scalar.
      batch: changes a batch on the host before it is learned from or evaluated, for example its target
        weights, float32 [B, T]. Shapes and types must stay the same. In a run of several processes each
        process passes the share that it has read (`zaya_jax.data.reading.loader.Share`).
    """

    optimizer: Callable[[optax.Schedule], optax.GradientTransformation] | None = None
    batch: Callable[[Batch], Batch] | None = None

    def of_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Applies `batch` to batches.

        Raises:
          UserError: if it changes the shape or type of an array.
        """
        return batches if self.batch is None else (_changed(self.batch, batch) for batch in batches)


def _changed(function: Callable[[Batch], Batch], original: Batch) -> Batch:
    batch = function(original)
    for field in dataclasses.fields(Batch):
        new, old = (np.asarray(getattr(each, field.name)) for each in (batch, original))
        # Another shape would be another program, which is compiled again at each step.
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise UserError(
                f"extensions.batch returns {field.name} as {new.dtype} {new.shape}; it must stay "
                f"{old.dtype} {old.shape}"
            )
    return batch


NO_EXTENSIONS = Extensions()
