"""What a picture of a run shows: lives, what their time went into, steps, losses, and what befell it."""

import bisect
import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.aegis.goodput import DOWN, HANG, OTHER, Life, Word, buckets_of, find_attempts
from zaya_jax.aegis.journal import (
    AT,
    DECIDED,
    METRICS_FILE,
    describe_event,
    is_finite,
    lines_of,
    parse_row,
)
from zaya_jax.aegis.sightings import Sighting

EVENTS, DECISIONS, SIGHTINGS = "events", "decisions", "sightings"
MOST_SLICES = 1500
"""Of a run's whole time: more are narrower than a line on any screen."""
MOST_POINTS = 3000
"""Of a curve."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something at a moment of a run.

    Attributes:
      time: Unix time.
      lane: one of `EVENTS`, `DECISIONS` and `SIGHTINGS`.
      kind: of the event, or class of the sighting.
      step: of the run; None where nobody said.
      text: what was said, as it was said.
    """

    time: float
    lane: str
    kind: str
    step: int | None
    text: str


@dataclasses.dataclass(frozen=True)
class Slice:
    """What a stretch of a run's time went into.

    Attributes:
      start: Unix time.
      end: Unix time.
      seconds: by bucket; their order within the stretch nobody knows.
    """

    start: float
    end: float
    seconds: Mapping[str, float]


def marks_of(events: Iterable[Mapping[str, Any]], sightings: Iterable[Sighting]) -> list[Mark]:
    """All that is no word on where a run is, in the order of time."""
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
    """What the time of a run went into, from stretch to stretch.

    A stretch is what lies between two words, or several where those come closer than one could see.
    """
    lives = find_attempts(events)
    if not lives:
        return []
    width = (lives[-1].ended - lives[0].began) / MOST_SLICES
    found: list[Slice] = []
    for life, following in itertools.zip_longest(lives, lives[1:]):
        found += _of_life(life, None if following is None else following.first_step, width)
        if following is not None and following.began > life.ended:
            found.append(Slice(life.ended, following.began, {DOWN: following.began - life.ended}))
    return found


def _of_life(life: Life, kept: int | None, width: float) -> Iterator[Slice]:
    """Those of a life, of whose steps `kept` were not made again; all of them where it is None."""
    before = Word(life.began, life.first_step, {})
    for word in _apart(life.words, life.began, width):
        seconds = {name: value - before.seconds.get(name, 0.0) for name, value in word.seconds.items()}
        hang = {}
        if word is life.words[-1] and life.hang:
            hang = {HANG: sum(life.hang.values())}
            seconds = {name: value - life.hang.get(name, 0.0) for name, value in seconds.items()}
        buckets = buckets_of(seconds, lost_share=_lost_share(before.step, word.step, kept)) | hang
        buckets = {name: value for name, value in buckets.items() if value > 0}
        other = word.time - before.time - sum(buckets.values())
        yield Slice(before.time, word.time, buckets | ({OTHER: other} if other > 0 else {}))
        before = word


def _apart(words: Sequence[Word], begin: float, width: float) -> Iterator[Word]:
    """Words no closer to each other than `width` seconds, and the last one."""
    time = begin
    for word in words:
        if word.time - time >= width or word is words[-1]:
            time = word.time
            yield word


def _lost_share(first: int, last: int, kept: int | None) -> float:
    if kept is None or last <= first:
        return 0.0
    return min(max((last - max(first, kept)) / (last - first), 0.0), 1.0)


def steps_of(lives: Iterable[Life]) -> list[list[tuple[float, int]]]:
    """Times and steps of each life."""
    return [[(word.time, word.step) for word in _thinned(life.words)] for life in lives]


def _thinned(words: Sequence[Word]) -> Sequence[Word]:
    size = -(-len(words) // MOST_POINTS)
    return words if size == 1 else [*words[::size], words[-1]]


def losses_of(run_folder: pathlib.Path, lives: Sequence[Life]) -> list[list[tuple[float, float]]]:
    """Times and losses of each life's steps, as far as they are part of the run.

    A row of metrics has a step and no time: that of its step in the last life that made it. Of stretches with
    many steps the least and the most are there.
    """
    points: list[list[tuple[float, float]]] = [[] for _ in lives]
    for row in map(parse_row, lines_of(run_folder / METRICS_FILE)):
        if row is not None and row["kind"] == "train" and is_finite(row.get("loss")):
            number = _life_of(row["step"], lives)
            if number is not None:
                points[number].append((_time_of(row["step"], lives[number]), float(row["loss"])))
    size = -(-sum(map(len, points)) // (MOST_POINTS // 2))
    return [_extremes(each, size) for each in points]


def _life_of(step: int, lives: Sequence[Life]) -> int | None:
    """The number of the last life that made a step."""
    numbers = range(len(lives) - 1, -1, -1)
    return next((n for n in numbers if lives[n].first_step < step <= lives[n].last_step), None)


def _time_of(step: int, life: Life) -> float:
    """When a life made a step, between its words."""
    place = bisect.bisect_left(life.words, step, lo=1, key=lambda word: word.step)
    before, after = life.words[place - 1], life.words[place]
    share = (step - before.step) / (after.step - before.step)
    return before.time + share * (after.time - before.time)


def _extremes(points: Sequence[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    if size <= 2:
        return list(points)
    found = []
    for first in range(0, len(points), size):
        part = points[first : first + size]
        found += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return found
