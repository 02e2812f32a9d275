"""What befell a run, a line of JSON an event, by the first of its processes: `events.jsonl` in its folder.

Other than metrics it is never taken back: steps that were lost, and runs that ended, stay in it.
"""

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

EVENTS_FILE = "events.jsonl"
SIGHTINGS_FOLDER = "sightings"
"""What agents saw of their nodes."""
LEFT_OUT_FILE = "left_out.txt"
"""Nodes that a run is not to use again, a line each, for whoever goes on with it."""
XLA_FOLDER = "xla"
"""Programs of a run as its compiler wrote them down, where that was asked for."""
BESIDE = EVENTS_FILE, SIGHTINGS_FOLDER, LEFT_OUT_FILE, XLA_FOLDER
"""What may lie in a run's folder before the run does: its supervisor and its compiler begin earlier."""
METRICS_FILE = "metrics.jsonl"
"""What a run tells of its steps, which `train/metrics.py` writes."""
TRAIN, VALIDATION, TASKS = "train", "validation", "tasks"
"""Kinds of its rows: values of a step, held-out ones, and figures of tasks."""
ROUTERS_FILE = "routers.jsonl"
"""What each layer's router did in some steps, of a kind of its own; `train/metrics.py` writes it too."""
ROUTER = "router"
SAMPLES_FILE = "samples.jsonl"
"""Texts that a run has made, with the steps that they are of; `train_command.py` writes it."""
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
SPIKED, STARVED, SKIPPED, DAMAGED, DECIDED = "spiked", "starved", "skipped", "damaged", "decided"
"""What is seen on the way: a loss that jumped up, experts without tokens, a step that was not finite, a
checkpoint that is damaged; and what a supervisor decided."""


def write_event(run_folder: str | pathlib.Path, kind: str, **values: Any) -> None:
    """Appends an event. A disk that takes none is no reason to end a run."""
    event = {"time": round(time.time(), 3), "event": kind} | values
    append_line(pathlib.Path(run_folder) / EVENTS_FILE, event, make_folder=False)


def append_line(path: pathlib.Path, values: Mapping[str, Any], *, make_folder: bool = True) -> None:
    """Appends a line of JSON in one piece, as far as the disk takes it."""
    line = json.dumps(values) + "\n"
    with contextlib.suppress(OSError):
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
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
    found = events_of(run_folder)
    if not found:
        raise ValueError(f"{path} holds no event; it must be what a run has written")
    return found


def events_of(run_folder: str | pathlib.Path, *, since: float = 0.0) -> list[dict[str, Any]]:
    """The events of a run from a time on; none of one that has not begun.

    Args:
      run_folder: of the run.
      since: Unix time.
    """
    found = map(parse_event, lines_of(pathlib.Path(run_folder) / EVENTS_FILE))
    return [event for event in found if event is not None and event["time"] >= since]


def describe_event(event: Mapping[str, Any]) -> str:
    """What an event tells beside its time, its kind and its step, in a line."""
    if event["event"] == BEGAN:
        return f"{event.get('processes')} processes, {event.get('devices')} devices"
    if event["event"] == DECIDED:
        return f"{event.get('action')}: {event.get('reason')}"
    return "; ".join(str(event[name]) for name in ("reason", "late") if name in event)


def lines_of(path: pathlib.Path) -> list[bytes]:
    """The lines of a file; none of one that is not there."""
    return path.read_bytes().splitlines() if path.is_file() else []


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event that a line is; None if it is none, as one that a kill cut short."""
    event = parse_line(line)
    is_event = is_finite(event.get("time")) and isinstance(event.get("event"), str)
    return event if is_event else None


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row of metrics that a line is; None if it is none."""
    return _as_row(parse_line(line))


def parse_rows(lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """What `parse_row` makes of each line, faster: a long run has hundreds of thousands."""
    # As one list: its objects share their names, which a call for each line would make anew.
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):  # of one of them: which, each tells by itself
        found = []
    return list(map(_as_row, found)) if len(found) == len(lines) else list(map(parse_row, lines))


def _as_row(values: Any) -> dict[str, Any] | None:
    is_row = isinstance(values, dict) and isinstance(values.get("step"), int)
    return values if is_row and isinstance(values.get("kind"), str) else None


def parse_line(line: bytes) -> dict[str, Any]:
    """The object that a line of JSON is; an empty one of a line that is none."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # the second of a line of a hundred thousand brackets
        return {}
    return values if isinstance(values, dict) else {}


def is_finite(value: Any) -> bool:
    """Whether a value of JSON is a number that one can reckon with."""
    # Compared, not converted: an integer of hundreds of digits is none, and no error either.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max
