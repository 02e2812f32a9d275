"""A run that writes down what each step reads, and dies at a step as if it were killed.

`recorded_run.py CONFIG RECORD STEP`: the config as JSON; lines of RECORD are a step and its tokens; at STEP,
if it is not 0, the process ends without a word.
"""

import json
import os
import pathlib
import sys

from zaya_jax.config import Config
from zaya_jax.train import batches, loop


def main(config: str, record: str, last: str) -> None:
    given_readings, given_batches = loop.readings, batches.training_batches
    begun = []

    def readings(*arguments, **values):
        for step_range, reading in given_readings(*arguments, **values):
            begun.append(step_range.first_step)
            yield step_range, reading

    def training_batches(*arguments, **values):
        for step, batch in enumerate(given_batches(*arguments, **values), start=begun[-1] + 1):
            with pathlib.Path(record).open("a") as lines:
                lines.write(json.dumps([step, batch.tokens_BT.tolist()]) + "\n")
            if step == int(last):
                os._exit(9)
            yield batch

    loop.readings, batches.training_batches = readings, training_batches
    loop.train(Config.from_text(pathlib.Path(config).read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
