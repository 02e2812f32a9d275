"""What befell a run, a line of JSON an event, by the first of its processes: `events.jsonl` in its folder.

Other than metrics it is never taken back: steps that were lost, and runs that ended, stay in it.
"""

import contextlib
import json
import math
import os
import pathlib
import time
from typing import Any

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"
"""What a run tells of its steps, which `train/metrics.py` writes."""
BEGAN, AT = "began", "at"
"""Kinds: a run begins or goes on; where it is now and then."""
FINISHED, STOPPED, STALLED, FAILED, DIVERGED, WENT_BACK = (
    "finished",
    "stopped",
    "stalled",
    "failed",
    "diverged",
    "went back",
)
ENDS = FINISHED, STOPPED, STALLED, FAILED, DIVERGED, WENT_BACK
"""The ways in which a life of its processes ends; behind the last one a new life begins in the same ones."""
SPIKED, STARVED, DAMAGED = "spiked", "starved", "damaged"
"""What is seen on the way: a loss that jumped up, experts without tokens, a checkpoint that is damaged."""


def write_event(run_folder: str | pathlib.Path, kind: str, **values: Any) -> None:
    """Appends an event. A disk that takes none is no reason to end a run."""
    line = json.dumps({"time": round(time.time(), 3), "event": kind} | values) + "\n"
    with contextlib.suppress(OSError):
        file = os.open(pathlib.Path(run_folder) / EVENTS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (b"\n" if _ends_within_a_line(file) else b"") + line.encode())
        finally:
            os.close(file)


def _ends_within_a_line(file: int) -> bool:
    """Whether a process was killed while it wrote: its half line must not swallow this one."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def read_events(run_folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """All events of a run in the order of their writing; half lines are left out.

    Raises:
      ValueError: if the folder has no such file, or the file no event.
    """
    path = pathlib.Path(run_folder) / EVENTS_FILE
    if not path.is_file():
        raise ValueError(f"{run_folder} has no {EVENTS_FILE}; it must be the folder of a run that was begun")
    found = [event for line in path.read_bytes().splitlines() if (event := parse_event(line)) is not None]
    if not found:
        raise ValueError(f"{path} holds no event; it must be what a run has written")
    return found


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event that a line is; None if it is none, as one that a kill cut short."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # the second of a line of a hundred thousand brackets
        return None
    is_event = (
        isinstance(event, dict) and is_finite(event.get("time")) and isinstance(event.get("event"), str)
    )
    return event if is_event else None


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row of metrics that a line is; None if it is none, as the last one that a kill cut short."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("kind"), str)
    return row if is_row else None


def is_finite(value: Any) -> bool:
    """Whether a value of JSON is a number that one can reckon with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
