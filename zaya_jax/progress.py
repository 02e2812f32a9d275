"""Progress of long work: a bar on a terminal, and occasional lines elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_S = 10.0
QUIET_SECONDS = 15.0
"""Interval of the lines about work of unknown length, without a terminal. Shorter work prints none."""


def new_console() -> Console:
    """Returns a console for progress on standard output.

    Without a terminal, lines are neither wrapped nor colored, even if FORCE_COLOR is set, as in CI systems.
    """
    return Console(file=sys.stdout, force_terminal=sys.stdout.isatty(), soft_wrap=True, highlight=False)


def is_live(console: Console) -> bool:
    """Whether a console can overwrite its lines, as a bar requires."""
    return console.is_terminal and not console.is_dumb_terminal


@contextlib.contextmanager
def working(what: str, console: Console | None = None) -> Iterator[None]:
    """Shows progress of work of unknown length: a spinner with the elapsed time on a terminal.

    Without a terminal it prints a line every `QUIET_SECONDS`.

    Args:
      what: description of the work, such as "compiling the step".
      console: console to write to; standard output by default.
    """
    console = console or new_console()
    if is_live(console):
        columns = SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            bar.add_task(what, total=None)
            yield
        return
    start = time.monotonic()

    def report() -> None:
        console.print(f"{what}: {time.monotonic() - start:.0f} s", markup=False)

    # The work runs in this thread, so that a second one must report.
    with every(QUIET_SECONDS, report):
        yield


@contextlib.contextmanager
def every(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Calls a function in a thread at a fixed interval while the context lasts, first after one interval."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(seconds):
            function()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class CountProgress:
    """A context manager that shows how many items are done.

    Args:
      what: description of the work.
      size: total number of items.
      console: console to write to; standard output by default.
    """

    def __init__(self, what: str, size: int, console: Console | None = None):
        self._console = console or new_console()
        self._what, self._size, self._done = what, size, 0
        self._last = time.monotonic()
        self._bar = None
        if is_live(self._console):
            columns = TextColumn("{task.description}"), BarColumn(), *self._counts(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(what, total=size)

    def _counts(self) -> tuple[ProgressColumn, ...]:
        """Returns the columns next to the bar."""
        return (MofNCompleteColumn(),)

    def _line(self) -> str:
        """Returns the progress as text, for a line without a bar."""
        return f"{self._done:,} of {self._size:,}"

    def __enter__(self) -> "CountProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, size: int) -> None:
        """Counts more items as done."""
        self._done += size
        if self._bar:
            self._bar.advance(self._task, size)
        # A log file needs a line now and then, not one per item.
        elif time.monotonic() - self._last > LINE_EVERY_S:
            self._last = time.monotonic()
            self._console.print(f"{self._what}: {self._line()}")


class ByteProgress(CountProgress):
    """A context manager that shows how many bytes are done, and the speed."""

    def _counts(self) -> tuple[ProgressColumn, ...]:
        return DownloadColumn(), TransferSpeedColumn()

    def _line(self) -> str:
        return f"{self._done / 1e9:.1f} of {self._size / 1e9:.1f} GB"
