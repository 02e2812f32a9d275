"""Files of lines that others append to while they are read: only what is new is read, or only the end."""

import collections
import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from zaya_jax.aegis.journal import (
    AT,
    EVENTS_FILE,
    METRICS_FILE,
    TRAIN,
    VALIDATION,
    parse_event,
    parse_row,
)

TAIL_BYTES = 4 << 20
"""Of a file's end, in which the newest row of each kind is looked for: some thousand rows."""


class Followed:
    """A file of lines, each of which is read once.

    Args:
      path: of the file, which need not be there yet.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._place, self._file = 0, (0, 0)
        self.beginnings = 0
        """How often it was read from its first byte: once, and for each other file that took its place."""

    def new_lines(self) -> Iterator[bytes]:
        """Whole lines that were not read before; none where there is no file.

        Raises:
          OSError: for a file that cannot be read.
        """
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            self._begin(os.fstat(file.fileno()))
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._place += len(line)
                yield line

    def _begin(self, status: os.stat_result) -> None:
        found = status.st_dev, status.st_ino
        if found != self._file or status.st_size < self._place:
            self._file, self._place = found, 0
            self.beginnings += 1


class FollowedEvents:
    """The events of a run that goes on, as far as its goodput and its counts ask for them.

    Where it is now and then, a run says some thousand times a day: of these words only the newest of a life
    is kept.

    Args:
      run_folder: of the run.
    """

    def __init__(self, run_folder: pathlib.Path):
        self._followed = Followed(run_folder / EVENTS_FILE)
        self._beginnings = 0
        self._kept: list[dict[str, Any]] = []
        self.counts = collections.Counter[str]()
        """Of all events, by kind."""

    def look(self) -> list[dict[str, Any]]:
        """All that is kept, what is new included.

        Raises:
          OSError: for a file that cannot be read.
        """
        for line in self._followed.new_lines():
            if self._followed.beginnings != self._beginnings:
                self._beginnings = self._followed.beginnings
                self._kept, self.counts = [], collections.Counter()
            if (event := parse_event(line)) is not None:
                self._keep(event)
        return self._kept

    def _keep(self, event: dict[str, Any]) -> None:
        self.counts[event["event"]] += 1
        # Behind the word with which a life begins, which is another kind and stays.
        if event["event"] == AT and self._kept and self._kept[-1]["event"] == AT:
            self._kept.pop()
        self._kept.append(event)


def newest_rows(run_folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The newest row of a run's metrics by its kind, "train" or "validation", from the end of the file.

    Raises:
      OSError: for a file that cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in reversed(_last_lines(run_folder / METRICS_FILE)):
        row = parse_row(line)
        if row is not None and row["kind"] in (TRAIN, VALIDATION):
            found.setdefault(row["kind"], row)
        if len(found) == 2:
            break
    return found


def _last_lines(path: pathlib.Path) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        start = max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0)
        file.seek(start)
        # Not to the end of what has come since, which may be without end.
        lines = file.read(TAIL_BYTES).split(b"\n")
        # Before the first one's begin, and behind the last newline, there is more or nothing.
        return lines[1 if start else 0 : -1]
    return []
