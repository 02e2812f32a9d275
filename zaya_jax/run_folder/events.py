"""The run history: `events.jsonl` in the run folder, one JSON line per event, and rows of metrics.

The first process of a run writes it. Unlike metrics, events are never removed: steps that were lost and
attempts that ended stay in it.
"""

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.files.json_files import dump_json, may_have_number_strings, restore_numbers
from zaya_jax.run_folder.names import BEGAN, DECIDED, EVENTS_FILE


def write_event(run_folder: str | pathlib.Path, kind: str, **values: Any) -> None:
    """Appends an event. A disk error is ignored: it is no reason to end a run."""
    event = {"time": round(time.time(), 3), "event": kind} | values
    append_line(pathlib.Path(run_folder) / EVENTS_FILE, event, make_folder=False)


def append_line(path: pathlib.Path, values: Mapping[str, Any], *, make_folder: bool = True) -> None:
    """Appends a line of JSON with one write; disk errors are ignored."""
    line = dump_json(values) + "\n"
    with contextlib.suppress(OSError):
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        # Appending is atomic, so that lines of two processes do not mix. The file is also readable, because
        # its last byte is looked at.
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (b"\n" if _ends_within_a_line(file) else b"") + line.encode())
        finally:
            os.close(file)


def _ends_within_a_line(file: int) -> bool:
    """Returns whether the file ends within a line of a killed process, which must not join the next one."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def read_events(run_folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """Returns all events of a run in the order of writing, without incomplete lines.

    Raises:
      UserError: if the folder has no events file, or the file no events.
    """
    path = pathlib.Path(run_folder) / EVENTS_FILE
    if not path.is_file():
        raise UserError(f"{run_folder} has no {EVENTS_FILE}; it must be the folder of a run that was started")
    events = events_of(run_folder)
    if not events:
        raise UserError(f"{path} contains no event; it must be a file that a run has written")
    return events


def events_of(run_folder: str | pathlib.Path, *, since: float = 0.0) -> list[dict[str, Any]]:
    """Returns the events of a run from a time on; none for a run that has not started.

    Args:
      run_folder: folder of the run.
      since: Unix time in seconds.
    """
    events = map(parse_event, lines_of(pathlib.Path(run_folder) / EVENTS_FILE))
    return [event for event in events if event is not None and event["time"] >= since]


def describe_event(event: Mapping[str, Any]) -> str:
    """Describes an event in one line, without its time, kind and step."""
    if event["event"] == BEGAN:
        return f"{event.get('processes')} processes, {event.get('devices')} devices"
    if event["event"] == DECIDED:
        return f"{event.get('action')}: {event.get('reason')}"
    return "; ".join(str(event[name]) for name in ("reason", "late") if name in event)


def lines_of(path: pathlib.Path) -> list[bytes]:
    """Returns the lines of a file; none if it does not exist."""
    return path.read_bytes().splitlines() if path.is_file() else []


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Parses an event; returns None for an invalid line, such as one that a kill has truncated."""
    event = parse_line(line)
    is_event = is_finite(event.get("time")) and isinstance(event.get("event"), str)
    return event if is_event else None


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parses a row of metrics; returns None for an invalid line."""
    return _as_row(parse_line(line), has_strings=may_have_number_strings(line))


def parse_rows(lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """Parses many rows, faster than `parse_row`: a long run has hundreds of thousands.

    Returns:
      One row per line; None for invalid lines.
    """
    # As one JSON list: the parser then shares the strings of the keys between rows.
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):  # at least one line is invalid, so each is parsed separately
        values = []
    if len(values) != len(lines):
        return list(map(parse_row, lines))
    strings = map(may_have_number_strings, lines)
    return [_as_row(row, has_strings=each) for row, each in zip(values, strings, strict=True)]


def _as_row(values: Any, *, has_strings: bool) -> dict[str, Any] | None:
    is_row = isinstance(values, dict) and isinstance(values.get("step"), int)
    if not is_row or not isinstance(values.get("kind"), str):
        return None
    # The name of a phase stays a string, even if it is "NaN".
    return restore_numbers(values) | _names_of(values) if has_strings else values


def _names_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("kind", "phase") if name in values}


def parse_line(line: bytes) -> dict[str, Any]:
    """Parses a JSON object; returns an empty one for an invalid line."""
    try:
        values = json.loads(line.strip(b"\0"))  # a page that a disk has lost reads as zeros
    except (ValueError, RecursionError):  # the latter for a line of a hundred thousand brackets
        return {}
    return values if isinstance(values, dict) else {}


def is_finite(value: Any) -> bool:
    """Returns whether a JSON value is a finite number in the range of floats."""
    # Compared instead of converted: an integer of hundreds of digits would raise an error.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max
