"""What the time of a run went into, from its events.

Goodput is the share of a run's time in which it made steps that are part of it still. What is left is told
by what it was lost to. Of a process that was killed nothing is known behind its last event, a few seconds
before; they count as time in which nothing ran.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.aegis.heartbeats import (
    COMPILE,
    DISPATCH,
    EVALUATE,
    READ,
    RESTORE,
    SAVE,
    SECTIONS,
    START,
    STEP,
    TASKS,
)
from zaya_jax.aegis.journal import AT, BEGAN, ENDS, STALLED, is_finite

PRODUCTIVE, DATA_WAIT, LOST, HANG, DOWN, OTHER = (
    "productive",
    "data wait",
    "lost progress",
    "hang",
    "down",
    "other",
)
BUCKETS: tuple[str, ...] = (
    PRODUCTIVE,
    START,
    COMPILE,
    DATA_WAIT,
    SAVE,
    RESTORE,
    EVALUATE,
    LOST,
    HANG,
    DOWN,
    OTHER,
)
_BUCKET_OF = {READ: DATA_WAIT, TASKS: EVALUATE} | {
    name: name for name in (START, COMPILE, SAVE, RESTORE, EVALUATE)
}
"""Where the time of a section goes, if it is not that of steps."""
MEANINGS = {
    PRODUCTIVE: "steps that are part of the run",
    START: "data opened, state made, and recorded steps repeated where that was asked for",
    COMPILE: "programs compiled, and their first steps",
    DATA_WAIT: "waiting for a batch",
    SAVE: "checkpoints, as far as steps wait for them",
    RESTORE: "a checkpoint verified, read and dealt out to the devices",
    EVALUATE: "held-out losses, and tasks",
    LOST: "steps that were made again later",
    HANG: "standing still, until it was noticed",
    DOWN: "no process ran, or none that came to its steps",
    OTHER: "between an end's last word and what the processes told before",
}
"""In the order of a table."""


@dataclasses.dataclass(frozen=True)
class Word:
    """What the processes of a run said of themselves.

    Attributes:
      time: Unix time.
      step: of the run, that was made.
      seconds: that they were in each section until then.
    """

    time: float
    step: int
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Life:
    """A life of a run's processes, from their begin to their end.

    Attributes:
      began: Unix time at which they began.
      words: what they said, at least when their steps began.
      hang: seconds in which they stood still, by section.
      end: how it ended, one of `ENDS`; None where it was killed, or goes on.
    """

    began: float
    words: tuple[Word, ...]
    hang: Mapping[str, float]
    end: str | None

    @property
    def ended(self) -> float:
        """Unix time of their last word."""
        return self.words[-1].time

    @property
    def first_step(self) -> int:
        """Steps that were there before it."""
        return self.words[0].step

    @property
    def last_step(self) -> int:
        """The last step that they made."""
        return self.words[-1].step

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long they were in each section."""
        return self.words[-1].seconds


@dataclasses.dataclass(frozen=True)
class Goodput:
    """What the time of a run went into.

    Attributes:
      seconds: by bucket; together they are the time from the run's begin to its last event.
      attempts: lives of its processes.
      steps: that are part of it.
      lost_steps: that were made again later.
    """

    seconds: Mapping[str, float]
    attempts: int
    steps: int
    lost_steps: int

    @property
    def total(self) -> float:
        """Seconds from the run's begin to its last event."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Goodput: productive time by all time."""
        return self.seconds[PRODUCTIVE] / self.total if self.total else 0.0


def find_attempts(events: Sequence[Mapping[str, Any]]) -> list[Life]:
    """The lives of a run's processes, in their order."""
    lives: list[list[Mapping[str, Any]]] = []
    for event in filter(_is_word, events):
        if event["event"] == BEGAN:
            lives.append([event])
        # What ended before it began has told its reason, and nothing of its time.
        elif lives and event["event"] in (AT, *ENDS) and lives[-1][-1]["event"] not in ENDS:
            lives[-1].append(event)
    return [_attempt(life) for life in lives]


def _is_word(event: Mapping[str, Any]) -> bool:
    """Whether an event says what a life's do: anyone may append to the file, and other versions did."""
    step, seconds = event.get("step"), event.get("seconds")
    return isinstance(step, int) and isinstance(seconds, dict) and all(map(is_finite, seconds.values()))


def _attempt(life: Sequence[Mapping[str, Any]]) -> Life:
    first, last = life[0], life[-1]
    words = tuple(Word(each["time"], each["step"], _known(each["seconds"])) for each in life)
    is_hang = last["event"] == STALLED and is_finite(last.get("still")) and last.get("section") in SECTIONS
    return Life(
        began=first["time"] - sum(words[0].seconds.values()),
        words=words,
        hang={last["section"]: float(last["still"])} if is_hang else {},
        end=last["event"] if last["event"] in ENDS else None,
    )


def _known(seconds: Mapping[str, Any]) -> dict[str, float]:
    # What only another version's sections knew is other time.
    return {name: float(value) for name, value in seconds.items() if name in SECTIONS}


def measure(events: Sequence[Mapping[str, Any]]) -> Goodput:
    """What the time of a run went into.

    Raises:
      ValueError: if the run has not begun its first step.
    """
    attempts = find_attempts(events)
    if not attempts:
        raise ValueError("no event says that the run began its steps; give it some minutes, or see its log")
    seconds: dict[str, float] = dict.fromkeys(BUCKETS, 0.0)
    lost_steps = 0
    for attempt, following in itertools.zip_longest(attempts, attempts[1:]):
        # Behind the step from which the next one went on.
        lost = 0 if following is None else max(attempt.last_step - following.first_step, 0)
        lost_steps += lost
        for bucket, value in _of_attempt(attempt, lost).items():
            seconds[bucket] += value
        if following is not None:
            seconds[DOWN] += max(following.began - attempt.ended, 0.0)
    steps = attempts[-1].last_step - attempts[0].first_step
    return Goodput(seconds, len(attempts), steps, lost_steps)


def redo_seconds(life: Life, newest_step: int) -> float:
    """What is lost of a life that has ended: its steps behind the newest checkpoint, and how long it hung."""
    lost = _of_attempt(life, max(life.last_step - max(newest_step, life.first_step), 0))
    return lost[LOST] + lost[HANG]


def _of_attempt(attempt: Life, lost_steps: int) -> dict[str, float]:
    sections = {name: value - attempt.hang.get(name, 0.0) for name, value in attempt.seconds.items()}
    made = attempt.last_step - attempt.first_step
    hang = sum(attempt.hang.values())
    found = buckets_of(sections, lost_share=lost_steps / made if made else 0.0) | {HANG: hang}
    other = max(attempt.ended - attempt.began - sum(found.values()), 0.0)
    return found | {OTHER: other}


def buckets_of(seconds: Mapping[str, float], *, lost_share: float) -> dict[str, float]:
    """Seconds by bucket, from seconds by section.

    Args:
      seconds: without those of a hang.
      lost_share: of the steps that were made in them, those that were made again later.
    """
    making = seconds.get(STEP, 0.0) + seconds.get(DISPATCH, 0.0)
    waiting = {_BUCKET_OF[name]: value for name, value in seconds.items() if name in _BUCKET_OF}
    return waiting | {PRODUCTIVE: making * (1 - lost_share), LOST: making * lost_share}
