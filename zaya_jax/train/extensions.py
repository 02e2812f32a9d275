"""What one's own program adds to a run that `zaya_jax.train` makes: the same loop, with other parts.

An example stands in the README.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import optax

from zaya_jax.data.batch import Batch
from zaya_jax.model.zaya import Zaya
from zaya_jax.train.state import TrainState

TasksFunction = Callable[[int, Zaya, Mapping], Mapping[str, float]]
"""From a step, the network and its weights to figures by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extensions:
    """Parts of a run that are not in its config. A run that goes on must be given the same ones again.

    Attributes:
      optimizer: makes the optimiser of a phase, in place of the config's, from the learning rate as a
        function of the steps done. It moves the buckets that a device owns: those of matrices [matrices,
        rows, columns] and flat ones, padded with zeros; so each element, or each matrix, must be moved by
        itself, and what it keeps must have the shape of a bucket or be a scalar.
      batch: from what was read to what is learned from, on the host, of training and held-out batches alike;
        for example with other weights of targets, float32 [B, T]. Shapes and types stay. Of several
        processes each is given what it has read (`zaya_jax.data.loader.Share`).
      logger: takes the step, "train", "validation" or "tasks", and the values that metrics.jsonl has of it;
        called in the first process.
      after_step: takes the number of a step that was made and the state behind it, in all processes. The next
        step takes the state's memory: what is to be kept must be copied.
      tasks: takes a step, the network, and all its weights on every device, in all processes; gives figures
        by name, the same in all. It is asked every `tasks.every` steps and at the end of a phase. A
        ValueError or an OSError, raised in all processes, is told, and the run goes on.
    """

    optimizer: Callable[[optax.Schedule], optax.GradientTransformation] | None = None
    batch: Callable[[Batch], Batch] | None = None
    logger: Callable[[int, str, dict[str, float]], None] | None = None
    after_step: Callable[[int, TrainState], None] | None = None
    tasks: TasksFunction | None = None

    def of_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Batches as they are learned from.

        Raises:
          ValueError: if the shape or type of an array has become another.
        """
        return batches if self.batch is None else (self._of_batch(self.batch, batch) for batch in batches)

    def _of_batch(self, function: Callable[[Batch], Batch], read: Batch) -> Batch:
        batch = function(read)
        for field in dataclasses.fields(Batch):
            ours, theirs = (np.asarray(getattr(each, field.name)) for each in (batch, read))
            # Another one would be another program, which is compiled anew at each step.
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                raise ValueError(
                    f"extensions.batch gives {field.name} as {ours.dtype} {ours.shape}; it must stay "
                    f"{theirs.dtype} {theirs.shape}"
                )
        return batch


NONE = Extensions()
"""A run as its config has it."""
