"""Where a process is in its run, and how long it may be there.

The main thread says which section it enters, and nothing else; everything about time is worked out by
whoever watches. Sections follow each other in the same order in all processes of a run, so that of two
processes the one that has entered fewer of them is the later one.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from zaya_jax.config import WatchConfig

SECTIONS: tuple[str, ...] = (
    "start",
    "restore",
    "compile",
    "read",
    "dispatch",
    "step",
    "save",
    "evaluate",
    "tasks",
)
START, RESTORE, COMPILE, READ, DISPATCH, STEP, SAVE, EVALUATE, TASKS = SECTIONS
"""To dispatch a step takes no time, until a device's queue is full; then as long as a step."""
REMEMBERED = 512
"""Newest visits to a section, of which the slowest counts."""
ENOUGH = 8
"""Visits after which a section is known."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """Where a process is.

    Attributes:
      count: of sections that it has entered.
      section: the one that it is in.
      step: of the run, that it is at.
      num_steps: that it waits for, if it waits for steps.
    """

    count: int
    section: str
    step: int
    num_steps: int = 1

    @property
    def made(self) -> int:
        """Steps of the run that are made."""
        return self.step if self.section in (SAVE, EVALUATE, TASKS) else max(self.step - 1, 0)

    def __str__(self) -> str:
        return f"at step {self.step} ({self.section})"


class Heartbeats:
    """What the main thread tells, and what was learned from it.

    Args:
      clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._entered = clock()
        # One tuple, put in place at once: another thread reads it at any moment.
        self.beat = Beat(0, START, 0)
        self._visits = {name: collections.deque[float](maxlen=REMEMBERED) for name in SECTIONS}
        self._seconds = dict.fromkeys(SECTIONS, 0.0)

    def enter(self, section: str, step: int, *, num_steps: int = 1) -> None:
        """Ends the section that the process is in, and begins another one, or the same anew.

        Args:
          section: one of `SECTIONS`.
          step: of the run, that it is at.
          num_steps: that it waits for: those that were dispatched since it last did, at most.
        """
        left, now = self.beat.section, self._clock()
        self._visits[left].append(now - self._entered)
        self._seconds[left] += now - self._entered
        self._entered = now
        self.beat = Beat(self.beat.count + 1, section, step, num_steps)

    @contextlib.contextmanager
    def within(self, section: str) -> Iterator[None]:
        """A section within another one, which goes on behind it.

        Args:
          section: one of `SECTIONS`.
        """
        around = self.beat
        self.enter(section, around.step)
        yield
        # Not where it failed: who asks then is to hear where that was.
        self.enter(around.section, around.step, num_steps=around.num_steps)

    def begin_anew(self) -> None:
        """The process begins another life of its run: what it took so far belongs to the one before."""
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._entered = self._clock()
        self.beat = Beat(self.beat.count + 1, START, self.beat.step)

    def slowest(self, section: str) -> float | None:
        """Seconds of the slowest of the newest visits; None while there were too few.

        What dispatching may take is known by steps alone: the first time that a queue is full is no fault.
        """
        visits = list(self._visits[STEP if section == DISPATCH else section])
        return max(visits) if len(visits) >= ENOUGH else None

    def seconds(self) -> dict[str, float]:
        """How long the process was in each section so far, the one that it is in included."""
        return self._seconds | {
            self.beat.section: self._seconds[self.beat.section] + self._clock() - self._entered
        }


def limit_of(config: WatchConfig, beat: Beat, slowest: float | None) -> float | None:
    """How long a visit to a section may take, in seconds; None for as long as it likes.

    Args:
      config: of the run.
      beat: the visit.
      slowest: of the visits that were seen; None for too few.
    """
    most = getattr(config, f"{STEP if beat.section == DISPATCH else beat.section}_seconds")
    if most is not None:
        most *= beat.num_steps
    # A program is compiled anew where a phase begins, which may be the first one of its size; and a round of
    # tasks may have more of them than those before it.
    if most is None or slowest is None or beat.section in (START, RESTORE, COMPILE, TASKS):
        return most
    return min(most, max(config.least_seconds, config.times_slowest * slowest))


def find_late(beats: Sequence[Beat | None]) -> list[int]:
    """The processes for which the others wait: those that give no answer, or else are furthest behind.

    Args:
      beats: of all processes; None of those that give no answer.

    Returns:
      Their numbers; none where all stand at the same place.
    """
    silent = [number for number, beat in enumerate(beats) if beat is None]
    if silent:
        return silent
    counts = [beat.count for beat in beats if beat is not None]
    if min(counts) == max(counts):
        return []
    return [number for number, count in enumerate(counts) if count == min(counts)]
