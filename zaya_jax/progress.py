"""What a person sees of bytes that are worked through: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_S = 10.0


class ByteProgress:
    """Counts bytes before the eyes of a person. Use it as a context.

    Args:
      what: is being done.
      size: bytes in all.
      console: where to write; standard output by default.
    """

    def __init__(self, what: str, size: int, console: Console | None = None):
        self._console = console or Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._what, self._size, self._done = what, size, 0
        self._last = time.monotonic()
        self._bar = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
                       TransferSpeedColumn(), TimeRemainingColumn())  # fmt: skip
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(what, total=size)

    def __enter__(self) -> "ByteProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, size: int) -> None:
        """So many more bytes are done."""
        self._done += size
        if self._bar:
            self._bar.advance(self._task, size)
        elif time.monotonic() - self._last > LINE_EVERY_S:
            self._last = time.monotonic()
            self._console.print(f"{self._what}: {self._done / 1e9:.1f} of {self._size / 1e9:.1f} GB")
