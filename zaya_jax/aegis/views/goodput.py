"""Goodput: the division of a run's time into useful training and losses, from the run's events.

Goodput is the share of a run's time spent on training steps that are still part of the run. The rest is
divided by cause. The last few seconds of a killed process, after its last event, count as time in which
nothing ran.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.run_folder.events import is_finite
from zaya_jax.run_folder.names import AT, BEGAN, ENDS, STALLED
from zaya_jax.train import heartbeats

PRODUCTIVE, DATA_WAIT, LOST = "productive", "data wait", "lost progress"
HANG, DOWN, OTHER = "hang", "down", "other"
MEANINGS = {
    PRODUCTIVE: "training steps that are part of the run",
    heartbeats.START: "opening data, initializing the state, and verifying recorded steps on request",
    heartbeats.COMPILE: "compiling programs, and their first steps",
    DATA_WAIT: "waiting for a batch",
    heartbeats.SAVE: "checkpoints, as far as they block training steps",
    heartbeats.RESTORE: "verifying and reading a checkpoint, and distributing it to the devices",
    heartbeats.EVALUATE: "held-out losses and evaluation tasks",
    LOST: "training steps that were repeated later",
    HANG: "stalls, until they were detected",
    DOWN: "no process was running, or none reached its first step",
    OTHER: "between the last event of an attempt and the last times that its processes reported",
}
"""Buckets with their descriptions, in the order of a table."""
BUCKETS = tuple(MEANINGS)
# Sections are measured by heartbeats in the training loop. The others have a bucket of the same name.
_BUCKET_OF = {
    heartbeats.READ: DATA_WAIT,
    heartbeats.DISPATCH: PRODUCTIVE,
    heartbeats.STEP: PRODUCTIVE,
    heartbeats.TASKS: heartbeats.EVALUATE,
}


@dataclasses.dataclass(frozen=True)
class ProgressReport:
    """Progress that the processes of a run reported at some time.

    Attributes:
      time: Unix time in seconds.
      step: number of completed steps of the run.
      seconds: cumulative time in seconds that the attempt has spent in each section.
    """

    time: float
    step: int
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class AttemptRecord:
    """One attempt: a run's processes from their start to their exit.

    Attributes:
      began: Unix time of the start in seconds.
      reports: progress reports; the first one is from the beginning of the training steps.
      hang: time in seconds for which the processes were stalled, by section.
      end: kind of the last event, one of `ENDS`; None if the processes were killed or are running.
    """

    began: float
    reports: tuple[ProgressReport, ...]
    hang: Mapping[str, float]
    end: str | None

    @property
    def ended(self) -> float:
        """Unix time of the last report in seconds."""
        return self.reports[-1].time

    @property
    def first_step(self) -> int:
        """Number of steps that were complete at the start."""
        return self.reports[0].step

    @property
    def last_step(self) -> int:
        """Number of steps that were complete at the last report."""
        return self.reports[-1].step

    @property
    def seconds(self) -> Mapping[str, float]:
        """Total time in seconds spent in each section."""
        return self.reports[-1].seconds


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Division of a run's time into buckets.

    Attributes:
      seconds: time in seconds by bucket; the sum is the time from the start of the run to its last event.
      attempts: number of attempts.
      steps: number of steps that are part of the run.
      lost_steps: number of steps that were repeated later.
    """

    seconds: Mapping[str, float]
    attempts: int
    steps: int
    lost_steps: int

    @property
    def total(self) -> float:
        """Time in seconds from the start of the run to its last event."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Goodput: productive time divided by total time."""
        return self.seconds[PRODUCTIVE] / self.total if self.total else 0.0

    @property
    def summary(self) -> str:
        """Share, steps and attempts as text, without a full stop."""
        return (
            f"{self.share:.1%}: {self.steps:,} steps in {self.total:,.0f} s, "
            f"{count_attempts(self.attempts)}, {self.lost_steps:,} steps repeated"
        )


def count_attempts(number: int) -> str:
    """Returns a number of attempts as text, such as "3 attempts"."""
    return f"{number:,} attempt{'' if number == 1 else 's'}"


def find_attempts(events: Sequence[Mapping[str, Any]]) -> list[AttemptRecord]:
    """Returns the attempts of a run, in order."""
    attempts: list[list[Mapping[str, Any]]] = []
    for event in filter(_is_report, events):
        if event["event"] == BEGAN:
            attempts.append([event])
        # An attempt that ended before its first step has an event with its reason, but no times.
        elif attempts and event["event"] in (AT, *ENDS) and attempts[-1][-1]["event"] not in ENDS:
            attempts[-1].append(event)
    return [_attempt_record(attempt) for attempt in attempts]


def _is_report(event: Mapping[str, Any]) -> bool:
    """Whether an event has the fields of a report: other versions and other programs also append events."""
    step, seconds = event.get("step"), event.get("seconds")
    return isinstance(step, int) and isinstance(seconds, dict) and all(map(is_finite, seconds.values()))


def _attempt_record(events: Sequence[Mapping[str, Any]]) -> AttemptRecord:
    first, last = events[0], events[-1]
    reports = tuple(ProgressReport(each["time"], each["step"], _known(each["seconds"])) for each in events)
    # The watchdog records for how long the run made no progress before it ended it.
    has_section = last.get("section") in heartbeats.SECTIONS
    is_hang = last["event"] == STALLED and is_finite(last.get("still")) and has_section
    return AttemptRecord(
        # The first report comes after the start sections, whose times lead back to the start.
        began=first["time"] - sum(reports[0].seconds.values()),
        reports=reports,
        hang={last["section"]: float(last["still"])} if is_hang else {},
        end=last["event"] if last["event"] in ENDS else None,
    )


def _known(seconds: Mapping[str, Any]) -> dict[str, float]:
    # Sections of other versions count as other time.
    return {name: float(value) for name, value in seconds.items() if name in heartbeats.SECTIONS}


def measure(events: Sequence[Mapping[str, Any]]) -> Goodput:
    """Divides the time of a run into buckets.

    Raises:
      UserError: if the run has not begun its first step.
    """
    attempts = find_attempts(events)
    if not attempts:
        raise UserError("the run has no event of its first step; wait some minutes, or look at its log")
    seconds: dict[str, float] = dict.fromkeys(BUCKETS, 0.0)
    lost_steps = 0
    # zip_longest pairs the last attempt with None, because nothing is known to be lost of it yet.
    for attempt, following in itertools.zip_longest(attempts, attempts[1:]):
        # Steps after the one from which the next attempt resumed are repeated.
        lost = 0 if following is None else max(attempt.last_step - following.first_step, 0)
        lost_steps += lost
        for bucket, value in _attempt_buckets(attempt, lost).items():
            seconds[bucket] += value
        if following is not None:
            seconds[DOWN] += max(following.began - attempt.ended, 0.0)
    steps = attempts[-1].last_step - attempts[0].first_step
    return Goodput(seconds, len(attempts), steps, lost_steps)


def redo_seconds(events: Sequence[Mapping[str, Any]], newest_step: int) -> float:
    """Returns the time in seconds that the last attempt lost: by steps to repeat, and by a stall.

    Args:
      events: events of the run.
      newest_step: step of the newest checkpoint.
    """
    attempts = find_attempts(events)
    if not attempts:
        return 0.0
    last = attempts[-1]
    # The checkpoint may be older than the attempt, which can lose no more than its own steps.
    lost = _attempt_buckets(last, max(last.last_step - max(newest_step, last.first_step), 0))
    return lost[LOST] + lost[HANG]


def _attempt_buckets(attempt: AttemptRecord, lost_steps: int) -> dict[str, float]:
    sections = {name: value - attempt.hang.get(name, 0.0) for name, value in attempt.seconds.items()}
    steps = attempt.last_step - attempt.first_step
    hang = sum(attempt.hang.values())
    buckets = buckets_of(sections, lost_share=lost_steps / steps if steps else 0.0) | {HANG: hang}
    # A killed process reports nothing after its last event; rounding may make the sum exceed the total.
    other = max(attempt.ended - attempt.began - sum(buckets.values()), 0.0)
    return buckets | {OTHER: other}


def buckets_of(seconds: Mapping[str, float], *, lost_share: float) -> dict[str, float]:
    """Converts seconds by section into seconds by bucket.

    Args:
      seconds: time in seconds by section, without stalls.
      lost_share: share of the steps in this time that were repeated later, from 0 to 1.
    """
    # Several sections may belong to one bucket, such as both kinds of evaluation.
    buckets: dict[str, float] = {PRODUCTIVE: 0.0}
    for name, value in seconds.items():
        bucket = _BUCKET_OF.get(name, name)
        buckets[bucket] = buckets.get(bucket, 0.0) + value
    training = buckets[PRODUCTIVE]
    return buckets | {PRODUCTIVE: training * (1 - lost_share), LOST: training * lost_share}
