"""Steps of a run whose batches it passes over, because its loss jumped up at them: a file in its folder.

Such a step is one that is skipped, as if its loss were not finite: its batch is read, the schedule goes on
and nothing else moves. So every other step reads the batch that it always would have, whoever goes on.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import numpy as np

from zaya_jax import durable
from zaya_jax.data.batch import Batch
from zaya_jax.json_files import read_json

PASSED_OVER_FILE = "passed_over.json"


@dataclasses.dataclass(frozen=True)
class PassedOver:
    """Ranges of steps, the first and the last of each, in the order in which they were found."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.ranges)

    def and_also(self, first: int, last: int) -> "PassedOver":
        """These, and one range more."""
        return PassedOver((*self.ranges, (first, last)))

    def out_of(self, batches: Iterator[Batch], *, first_step: int) -> Iterator[Batch]:
        """The batches of the steps from a first one on, of which those passed over teach nothing."""
        if not self.ranges:
            return batches
        return (
            spoilt(batch) if step in self else batch for step, batch in enumerate(batches, start=first_step)
        )


NOTHING_PASSED_OVER = PassedOver()


def spoilt(batch: Batch) -> Batch:
    """A batch whose loss is no number, so that its step changes nothing but counters."""
    # Not weights of 0: decay and momentum would move all weights by a batch that is not there.
    return dataclasses.replace(batch, weights_BT=np.full_like(batch.weights_BT, np.nan))


def read_passed_over(run_folder: str | pathlib.Path) -> PassedOver:
    """The steps that a run passes over.

    Raises:
      ValueError: for a file that `write_passed_over` did not write.
    """
    path = pathlib.Path(run_folder) / PASSED_OVER_FILE
    if not path.exists():
        return NOTHING_PASSED_OVER
    ranges = read_json(path).get("steps")
    if not isinstance(ranges, list) or not all(map(_is_range, ranges)):
        raise ValueError(f'{path} must have "steps": a list of [first, last], such as [[120, 131]]')
    return PassedOver(tuple((first, last) for first, last in ranges))


def _is_range(found: object) -> bool:
    return (
        isinstance(found, list)
        and len(found) == 2
        and all(isinstance(step, int) and not isinstance(step, bool) for step in found)
        and 1 <= found[0] <= found[1]
    )


def write_passed_over(run_folder: str | pathlib.Path, passed_over: PassedOver) -> None:
    """Writes them down; whoever is killed meanwhile has done so or not."""
    text = json.dumps({"steps": [list(each) for each in passed_over.ranges]})
    durable.write(pathlib.Path(run_folder) / PASSED_OVER_FILE, text + "\n")
