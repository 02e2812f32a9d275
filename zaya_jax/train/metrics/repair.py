"""Repair of a metrics file when a run is resumed: intact rows stay, damaged ones are reported and dropped."""

import dataclasses
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from zaya_jax.files import durable
from zaya_jax.run_folder.events import parse_row

_PIECE = re.compile(rb"[^\0\r\n]+")
"""A candidate for a row. A page that a disk has lost reads as zeros, which JSON does not contain."""


@dataclasses.dataclass(frozen=True)
class _Row:
    start: int
    end: int
    step: int


def repair_rows(path: pathlib.Path, *, until: int) -> None:
    """Keeps the intact rows up to a step, and logs a warning about damage.

    An incomplete last line is not reported: a kill has truncated it, and its step runs again.

    Args:
      path: path of the file, which need not exist.
      until: step from which the run is resumed.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    rows = list(_rows_in(data))
    for start, end, before, after in _gaps(data, rows):
        logging.getLogger(__name__).warning(
            "%s is damaged: bytes %d to %d, %s, are not rows of metrics and are dropped; the %d whole rows "
            "around them stay",
            path, start, end - 1, _place(before, after), len(rows),
        )  # fmt: skip
    # Steps after the checkpoint run again, and their rows are written again.
    kept = b"".join(data[row.start : row.end] + b"\n" for row in rows if row.step <= until)
    # An intact file is not rewritten, which would fail on a full disk.
    if kept != data:
        durable.write(path, kept)


def _rows_in(data: bytes) -> Iterator[_Row]:
    for piece in _PIECE.finditer(data):
        # Each piece separately: an intact row next to lost bytes is still valid.
        row: dict[str, Any] | None = parse_row(piece[0])
        if row is not None:
            yield _Row(piece.start(), piece.end(), row["step"])


def _gaps(data: bytes, rows: list[_Row]) -> Iterator[tuple[int, int, int | None, int | None]]:
    """Yields begin and end of damaged bytes between rows, and the steps of the rows around them."""
    before, begin = None, 0
    for row in rows:
        if gap := _without_line_ends(data, begin, row.start):
            yield *gap, before, row.step
        before, begin = row.step, row.end
    # A kill leaves a part of one line; zeros or more lines are damage of a disk.
    rest = data[begin:].lstrip(b"\r\n")
    if (b"\0" in rest or b"\n" in rest) and (gap := _without_line_ends(data, begin, len(data))):
        yield *gap, before, None


def _without_line_ends(data: bytes, begin: int, end: int) -> tuple[int, int] | None:
    between = data[begin:end]
    left = len(between) - len(between.lstrip(b"\r\n"))
    right = len(between.rstrip(b"\r\n"))
    return (begin + left, begin + right) if left < right else None


def _place(before: int | None, after: int | None) -> str:
    if before is None:
        return "before all rows" if after is not None else "all of it"
    return f"after step {before}" if after is None else f"between steps {before} and {after}"
