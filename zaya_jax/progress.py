"""What a person sees of work that goes on: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_S = 10.0


class CountProgress:
    """Counts what is done before the eyes of a person. Use it as a context.

    Args:
      what: is being done.
      size: of it in all.
      console: where to write; standard output by default.
    """

    def __init__(self, what: str, size: int, console: Console | None = None):
        self._console = console or Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._what, self._size, self._done = what, size, 0
        self._last = time.monotonic()
        self._bar = None
        if self._console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), *self._counts(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(what, total=size)

    def _counts(self) -> tuple[ProgressColumn, ...]:
        """What stands beside the bar."""
        return (MofNCompleteColumn(),)

    def _line(self) -> str:
        """What is said where there is no bar."""
        return f"{self._done:,} of {self._size:,}"

    def __enter__(self) -> "CountProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, size: int) -> None:
        """So much more of it is done."""
        self._done += size
        if self._bar:
            self._bar.advance(self._task, size)
        elif time.monotonic() - self._last > LINE_EVERY_S:
            self._last = time.monotonic()
            self._console.print(f"{self._what}: {self._line()}")


class ByteProgress(CountProgress):
    """Counts bytes before the eyes of a person, with their speed."""

    def _counts(self) -> tuple[ProgressColumn, ...]:
        return DownloadColumn(), TransferSpeedColumn()

    def _line(self) -> str:
        return f"{self._done / 1e9:.1f} of {self._size / 1e9:.1f} GB"
