"""Reads files of lines that other processes append to: only new lines, or only the end."""

import collections
import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from zaya_jax.run_folder.events import parse_event, parse_row
from zaya_jax.run_folder.names import AT, EVENTS_FILE, METRICS_FILE, TRAIN, VALIDATION

TAIL_BYTES = 4 << 20
"""Bytes at the end of a file that are searched for the newest row of each kind: several thousand rows."""


class TailedFile:
    """A file of lines, each of which is returned once.

    Args:
      path: path of the file, which may not exist yet.

    Attributes:
      num_starts: how often the file was read from its start: once, and again for each file that replaced it.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._offset, self._file = 0, (0, 0)
        self.num_starts = 0

    def new_lines(self) -> Iterator[bytes]:
        """Yields the complete lines that were appended since the last call; none if there is no file.

        Raises:
          OSError: if the file cannot be read.
        """
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            self._check_file(os.fstat(file.fileno()))
            file.seek(self._offset)
            for line in file:
                # Without a newline the line is still being written: it is returned by a later call.
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line

    def _check_file(self, status: os.stat_result) -> None:
        # A file that replaced another one has another inode; a truncated file is shorter than the offset.
        file = status.st_dev, status.st_ino
        if file != self._file or status.st_size < self._offset:
            self._file, self._offset = file, 0
            self.num_starts += 1


class TailedEvents:
    """The events of a running run that its goodput and its counts need.

    A run reports its position thousands of times a day: only the newest such event of an attempt is kept.

    Args:
      run_folder: folder of the run.

    Attributes:
      counts: number of all events by kind.
    """

    def __init__(self, run_folder: pathlib.Path):
        self._tail = TailedFile(run_folder / EVENTS_FILE)
        self._num_starts = 0
        self._kept: list[dict[str, Any]] = []
        self.counts = collections.Counter[str]()

    def read(self) -> list[dict[str, Any]]:
        """Reads new events and returns all that are kept.

        Raises:
          OSError: if the file cannot be read.
        """
        for line in self._tail.new_lines():
            # The file was replaced: the events kept so far belong to another run.
            if self._tail.num_starts != self._num_starts:
                self._num_starts = self._tail.num_starts
                self._kept, self.counts = [], collections.Counter()
            if (event := parse_event(line)) is not None:
                self._keep(event)
        return self._kept

    def _keep(self, event: dict[str, Any]) -> None:
        self.counts[event["event"]] += 1
        # The event that starts an attempt is of another kind, and stays.
        if event["event"] == AT and self._kept and self._kept[-1]["event"] == AT:
            self._kept.pop()
        self._kept.append(event)


def newest_rows(run_folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the newest row of a run's metrics by kind, "train" or "validation", from the end of the file.

    Raises:
      OSError: if the file cannot be read.
    """
    newest: dict[str, dict[str, Any]] = {}
    # From the end, because a long run has hundreds of thousands of rows.
    for line in reversed(_last_lines(run_folder / METRICS_FILE)):
        row = parse_row(line)
        if row is not None and row["kind"] in (TRAIN, VALIDATION):
            newest.setdefault(row["kind"], row)
        if len(newest) == 2:
            break
    return newest


def _last_lines(path: pathlib.Path) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        start = max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0)
        file.seek(start)
        # A fixed number of bytes: a writer may append faster than this reads.
        lines = file.read(TAIL_BYTES).split(b"\n")
        # The first piece may be the end of a longer line, the last one is empty or incomplete.
        return lines[1 if start else 0 : -1]
    return []
