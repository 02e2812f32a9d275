"""What the time of a run went into, from its events.

Goodput is the share of a run's time in which it made steps that are part of it still. What is left is told
by what it was lost to. Of a process that was killed nothing is known behind its last event, a few seconds
before; they count as time in which nothing ran.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.aegis.heartbeats import COMPILE, DISPATCH, EVALUATE, READ, SAVE, START, STEP
from zaya_jax.aegis.journal import AT, BEGAN, ENDS, STALLED

PRODUCTIVE, LOST, HANG, DOWN, OTHER = "productive", "lost progress", "hang", "down", "other"
BUCKETS: tuple[str, ...] = (PRODUCTIVE, START, COMPILE, READ, SAVE, EVALUATE, LOST, HANG, DOWN, OTHER)
MEANINGS = {
    PRODUCTIVE: "steps that are part of the run",
    START: "state restored or made",
    COMPILE: "programs compiled, and their first steps",
    READ: "waiting for a batch",
    SAVE: "checkpoints, as far as steps wait for them",
    EVALUATE: "held-out loss",
    LOST: "steps that were made again later",
    HANG: "standing still, until it was noticed",
    DOWN: "no process ran, or none that had begun its steps",
    OTHER: "between an end's last word and what the processes told before",
}
"""In the order of a table."""


@dataclasses.dataclass(frozen=True)
class Life:
    """A life of a run's processes, from their begin to their end.

    Attributes:
      began: Unix time at which they began.
      ended: Unix time of their last event.
      first_step: steps that were there.
      last_step: that they made.
      seconds: that they were in each section.
      hang: of these, seconds in which they stood still, by section.
      end: how it ended, one of `ENDS`; None where it was killed, or goes on.
    """

    began: float
    ended: float
    first_step: int
    last_step: int
    seconds: Mapping[str, float]
    hang: Mapping[str, float]
    end: str | None


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
    for event in events:
        if event["event"] == BEGAN:
            lives.append([event])
        # What ended before it began has told its reason, and nothing of its time.
        elif lives and event["event"] in (AT, *ENDS) and lives[-1][-1]["event"] not in ENDS:
            lives[-1].append(event)
    return [_attempt(life) for life in lives]


def _attempt(life: Sequence[Mapping[str, Any]]) -> Life:
    first, last = life[0], life[-1]
    return Life(
        began=first["time"] - sum(first["seconds"].values()),
        ended=last["time"],
        first_step=first["step"],
        last_step=last["step"],
        seconds={name: float(value) for name, value in last["seconds"].items()},
        hang={last["section"]: float(last["still"])} if last["event"] == STALLED else {},
        end=last["event"] if last["event"] in ENDS else None,
    )


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
    making = sections.pop(STEP, 0.0) + sections.pop(DISPATCH, 0.0)
    made = attempt.last_step - attempt.first_step
    lost = making * lost_steps / made if made else 0.0
    hang = sum(attempt.hang.values())
    told = sum(sections.values()) + making + hang
    other = max(attempt.ended - attempt.began - told, 0.0)
    return sections | {PRODUCTIVE: making - lost, LOST: lost, HANG: hang, OTHER: other}
