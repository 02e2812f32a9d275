"""A run that records the batch of each step, and exits at a step as if it were killed.

`recorded_run.py CONFIG RECORD STEP`: CONFIG is a JSON file; each line of RECORD is a step and its tokens; at
STEP, unless it is 0, the process exits without cleaning up.
"""

import json
import os
import pathlib
import sys
from collections.abc import Iterator

from zaya_jax.config import Config
from zaya_jax.data.reading.batch import Batch
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.trainer import train


class BatchRecorder(Hook):
    """Appends the tokens of each batch to a file."""

    def __init__(self, record: pathlib.Path, last: int):
        self._record, self._last = record, last

    def wrap_batches(self, context: StepContext, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Returns the same batches, recorded as they are read."""
        for step, batch in enumerate(batches, start=context.range.first_step + 1):
            with self._record.open("a") as lines:
                lines.write(json.dumps([step, batch.tokens_BT.tolist()]) + "\n")
            if step == self._last:
                os._exit(9)
            yield batch


def main(config: str, record: str, last: str) -> None:
    recorder = BatchRecorder(pathlib.Path(record), int(last))
    train(Config.from_text(pathlib.Path(config).read_text()), hooks=[recorder])


if __name__ == "__main__":
    main(*sys.argv[1:])
