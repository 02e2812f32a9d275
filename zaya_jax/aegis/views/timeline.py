"""Data of a run's timeline: marks, slices of time, steps, and losses."""

import bisect
import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.aegis.views.goodput import (
    DOWN,
    HANG,
    OTHER,
    AttemptRecord,
    ProgressReport,
    buckets_of,
    find_attempts,
)
from zaya_jax.run_folder.events import describe_event, is_finite, lines_of, parse_row
from zaya_jax.run_folder.names import AT, DECIDED, METRICS_FILE

EVENTS, DECISIONS, SIGHTINGS = "events", "decisions", "sightings"
MAX_SLICES = 1500
"""Maximum number of slices of a run: more would be narrower than a pixel on any screen."""
MAX_POINTS = 3000
"""Maximum number of points of all curves of a quantity."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened at one moment of a run.

    Attributes:
      time: Unix time in seconds.
      lane: one of `EVENTS`, `DECISIONS` and `SIGHTINGS`.
      kind: kind of the event, or class of the sighting.
      step: step of the run; None if unknown.
      text: description, as it was recorded.
    """

    time: float
    lane: str
    kind: str
    step: int | None
    text: str


@dataclasses.dataclass(frozen=True)
class Slice:
    """A stretch of a run's time.

    Attributes:
      start: Unix time of the start in seconds.
      end: Unix time of the end in seconds.
      seconds: time in seconds by bucket; the order within the slice is unknown.
    """

    start: float
    end: float
    seconds: Mapping[str, float]


def marks_of(events: Iterable[Mapping[str, Any]], sightings: Iterable[Sighting]) -> list[Mark]:
    """Returns all events, except progress reports, and all sightings, sorted by time."""
    marks = [_mark(event) for event in events if event["event"] != AT]
    marks += [
        Mark(each.time, SIGHTINGS, each.name, None, f"{each.host}, {each.action}: {each.evidence}")
        for each in sightings
        if is_finite(each.time)
    ]
    return sorted(marks, key=lambda mark: mark.time)


def _mark(event: Mapping[str, Any]) -> Mark:
    step = event.get("step")
    return Mark(
        time=float(event["time"]),
        lane=DECISIONS if event["event"] == DECIDED else EVENTS,
        kind=event["event"],
        step=step if isinstance(step, int) else None,
        text=describe_event(event),
    )


def slices_of(events: Sequence[Mapping[str, Any]]) -> list[Slice]:
    """Divides the time of a run into slices.

    A slice is the time between two progress reports, or between several reports in a run with very many.
    """
    attempts = find_attempts(events)
    if not attempts:
        return []
    width = (attempts[-1].ended - attempts[0].began) / MAX_SLICES
    slices: list[Slice] = []
    for attempt, following in itertools.zip_longest(attempts, attempts[1:]):
        slices += _attempt_slices(attempt, None if following is None else following.first_step, width)
        # The clocks of two hosts may differ, so that an attempt can seem to begin before the previous one has
        # ended.
        if following is not None and following.began > attempt.ended:
            slices.append(Slice(attempt.ended, following.began, {DOWN: following.began - attempt.ended}))
    return slices


def _attempt_slices(attempt: AttemptRecord, kept: int | None, width: float) -> Iterator[Slice]:
    """Yields the slices of an attempt.

    Args:
      attempt: the attempt.
      kept: last step that was not repeated later; None if all steps were kept.
      width: minimum length of a slice in seconds.
    """
    previous = ProgressReport(attempt.began, attempt.first_step, {})
    for report in _spaced(attempt.reports, attempt.began, width):
        # Reports are cumulative, so that their differences are the times of the slice.
        seconds = {name: value - previous.seconds.get(name, 0.0) for name, value in report.seconds.items()}
        hang = {}
        # A stall ends its attempt, so that its time is part of the last slice.
        if report is attempt.reports[-1] and attempt.hang:
            hang = {HANG: sum(attempt.hang.values())}
            seconds = {name: value - attempt.hang.get(name, 0.0) for name, value in seconds.items()}
        buckets = buckets_of(seconds, lost_share=_lost_share(previous.step, report.step, kept)) | hang
        buckets = {name: value for name, value in buckets.items() if value > 0}
        other = report.time - previous.time - sum(buckets.values())
        yield Slice(previous.time, report.time, buckets | ({OTHER: other} if other > 0 else {}))
        previous = report


def _spaced(reports: Sequence[ProgressReport], start: float, width: float) -> Iterator[ProgressReport]:
    """Yields reports at least `width` seconds apart, and the last one."""
    time = start
    for report in reports:
        if report.time - time >= width or report is reports[-1]:
            time = report.time
            yield report


def _lost_share(first: int, last: int, kept: int | None) -> float:
    if kept is None or last <= first:
        return 0.0
    # Steps after the one from which the next attempt resumed are made again.
    return min(max((last - max(first, kept)) / (last - first), 0.0), 1.0)


def steps_of(attempts: Iterable[AttemptRecord]) -> list[list[tuple[float, int]]]:
    """Returns times and steps of the reports of each attempt."""
    return [[(report.time, report.step) for report in _thinned(attempt.reports)] for attempt in attempts]


def _thinned(reports: Sequence[ProgressReport]) -> Sequence[ProgressReport]:
    size = -(-len(reports) // MAX_POINTS)
    # The last report is kept as well, because the curve ends there.
    return reports if size == 1 else [*reports[::size], reports[-1]]


def losses_of(run_folder: pathlib.Path, attempts: Sequence[AttemptRecord]) -> list[list[tuple[float, float]]]:
    """Returns times and losses of the training steps, by the attempt that made them last.

    A row of metrics has a step but no time; its time is interpolated between progress reports. In long runs
    each group of steps is represented by its minimum and its maximum.
    """
    points: list[list[tuple[float, float]]] = [[] for _ in attempts]
    for row in map(parse_row, lines_of(run_folder / METRICS_FILE)):
        if row is not None and row["kind"] == "train" and is_finite(row.get("loss")):
            number = _attempt_of(row["step"], attempts)
            if number is not None:
                points[number].append((_time_of(row["step"], attempts[number]), float(row["loss"])))
    # Half of the points, because a group leaves two of them.
    size = -(-sum(map(len, points)) // (MAX_POINTS // 2))
    return [_extremes(each, size) for each in points]


def _attempt_of(step: int, attempts: Sequence[AttemptRecord]) -> int | None:
    """Returns the index of the last attempt that made a step."""
    numbers = range(len(attempts) - 1, -1, -1)
    return next((n for n in numbers if attempts[n].first_step < step <= attempts[n].last_step), None)


def _time_of(step: int, attempt: AttemptRecord) -> float:
    """Interpolates the time at which an attempt made a step between its reports."""
    # From the second report on: interpolation needs one before it.
    index = bisect.bisect_left(attempt.reports, step, lo=1, key=lambda report: report.step)
    before, after = attempt.reports[index - 1], attempt.reports[index]
    # Never a division by zero: the report before has made fewer steps than this one, and the report after has
    # not.
    share = (step - before.step) / (after.step - before.step)
    return before.time + share * (after.time - before.time)


def _extremes(points: Sequence[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    if size <= 2:
        return list(points)
    extremes = []
    for first in range(0, len(points), size):
        group = points[first : first + size]
        # A set, because minimum and maximum may be the same point.
        extremes += sorted({min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])})
    return extremes
