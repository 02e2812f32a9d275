"""Ranges of steps whose batches are skipped since a rollback, stored in the run folder.

Such a step is treated as if its loss were not finite: its batch is read and the schedule advances, but
nothing else changes. So every other step reads the same batch as without the rollback.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import numpy as np

from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import read_json
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import SKIPPED_RANGES_FILE


@dataclasses.dataclass(frozen=True)
class SkippedRanges:
    """Skipped ranges.

    Attributes:
      ranges: first and last step of each range, in the order of the rollbacks.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.ranges)

    def with_range(self, first: int, last: int) -> "SkippedRanges":
        """Returns these ranges and one more."""
        return SkippedRanges((*self.ranges, (first, last)))

    def mask(self, batches: Iterator[Batch], *, first_step: int) -> Iterator[Batch]:
        """Returns the batches of the steps from `first_step` on; those of skipped steps have NaN weights."""
        # Nearly all runs have none; their batches pass without a test of each.
        if not self.ranges:
            return batches
        return (
            masked_with_nan(batch) if step in self else batch
            for step, batch in enumerate(batches, start=first_step)
        )


NO_SKIPPED_RANGES = SkippedRanges()


def masked_with_nan(batch: Batch) -> Batch:
    """Returns a batch whose loss is NaN, so that its step changes nothing but counters."""
    # Not weights of 0, with which decay and momentum would still change the weights.
    return dataclasses.replace(batch, weights_BT=np.full_like(batch.weights_BT, np.nan))


def shared_skipped_ranges(run_folder: str) -> SkippedRanges:
    """Reads the skipped ranges of a run in one process, for all of them.

    A step that only some processes skip would make them diverge for good.
    """
    ranges = hosts.run_on_first("skipped ranges", lambda: read_skipped_ranges(run_folder).ranges)
    return SkippedRanges(tuple(map(tuple, hosts.broadcast_from_first("skipped ranges", ranges))))


def read_skipped_ranges(run_folder: str | pathlib.Path) -> SkippedRanges:
    """Reads the skipped ranges of a run.

    Raises:
      UserError: for a file with invalid ranges.
    """
    path = pathlib.Path(run_folder) / SKIPPED_RANGES_FILE
    if not path.exists():
        return NO_SKIPPED_RANGES
    ranges = read_json(path).get("steps")
    if not isinstance(ranges, list) or not all(map(_is_range, ranges)):
        raise UserError(f'{path} must have "steps": a list of [first, last], such as [[120, 131]]')
    return SkippedRanges(tuple((first, last) for first, last in ranges))


def _is_range(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(step, int) and not isinstance(step, bool) for step in value)
        and 1 <= value[0] <= value[1]
    )


def write_skipped_ranges(run_folder: str | pathlib.Path, skipped_ranges: SkippedRanges) -> None:
    """Writes the skipped ranges of a run atomically."""
    text = json.dumps({"steps": [list(each) for each in skipped_ranges.ranges]})
    durable.write(pathlib.Path(run_folder) / SKIPPED_RANGES_FILE, text + "\n")
