"""Heartbeats: which section of its work a process is in, and how much time it has spent in each.

The main thread reports each section that it enters, and nothing else; other threads derive times from that.
All processes of a run enter the same sections in the same order, so of two processes the one that has
entered fewer sections is late.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

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
"""Dispatching a step takes no time until a device's queue is full; then it takes as long as a step."""
NUM_RECENT_VISITS = 512
"""Number of latest visits to a section among which the slowest is found."""
MIN_VISITS = 8
"""Number of visits after which the slowest one is meaningful."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """Where a process is.

    Attributes:
      count: number of sections that the process has entered.
      section: current section.
      step: current step of the run.
      num_steps: number of dispatched steps that a wait covers.
    """

    count: int
    section: str
    step: int
    num_steps: int = 1

    @property
    def made(self) -> int:
        """Number of the last step of the run that this process has completed."""
        # These sections follow the step; all others precede its end.
        return self.step if self.section in (SAVE, EVALUATE, TASKS) else max(self.step - 1, 0)

    def __str__(self) -> str:
        return f"at step {self.step} ({self.section})"


class Heartbeats:
    """Records the sections of the main thread.

    Args:
      clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._entered = clock()
        # One immutable object, replaced at once: another thread reads it at any moment.
        self.beat = Beat(0, START, 0)
        self._visits = {name: collections.deque[float](maxlen=NUM_RECENT_VISITS) for name in SECTIONS}
        self._seconds = dict.fromkeys(SECTIONS, 0.0)

    def enter(self, section: str, step: int, *, num_steps: int = 1) -> None:
        """Ends the current section and begins another one, or a new visit to the same one.

        Args:
          section: one of `SECTIONS`.
          step: current step of the run.
          num_steps: maximum number of dispatched steps that the process waits for.
        """
        previous, now = self.beat.section, self._clock()
        self._visits[previous].append(now - self._entered)
        self._seconds[previous] += now - self._entered
        self._entered = now
        # The count never decreases: the watchdog recognizes progress by it, also within one section.
        self.beat = Beat(self.beat.count + 1, section, step, num_steps)

    @contextlib.contextmanager
    def within(self, section: str) -> Iterator[None]:
        """Enters a section for the duration of a block, and then the previous one again."""
        around = self.beat
        self.enter(section, around.step)
        yield
        # Not after an exception: the final event must name the section that failed.
        self.enter(around.section, around.step, num_steps=around.num_steps)

    def restart(self) -> None:
        """Resets the times per section, for the next attempt of the run in this process."""
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._entered = self._clock()
        # The visits stay: their durations set the time limits of the next attempt too.
        self.beat = Beat(self.beat.count + 1, START, self.beat.step)

    def slowest(self, section: str) -> float | None:
        """Returns the seconds of the slowest recent visit to a section; None after too few visits.

        For dispatches it returns those of steps: the first full queue is not a stall.
        """
        visits = list(self._visits[STEP if section == DISPATCH else section])
        return max(visits) if len(visits) >= MIN_VISITS else None

    def seconds(self) -> dict[str, float]:
        """Returns the seconds spent in each section, including the current visit."""
        return self._seconds | {
            self.beat.section: self._seconds[self.beat.section] + self._clock() - self._entered
        }
