"""Injected slowness: steps of a process take longer by a share, because it waits for its input."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError
from zaya_jax.train.heartbeats import STEP
from zaya_jax.train.hooks.hook import StepContext

SLOW = "slow"
_ORDER = re.compile(
    r"slow@step=(?P<step>\d+)(:process=(?P<process>\d+))?"
    r":percent=(?P<percent>\d+(\.\d+)?)(:steps=(?P<steps>\d+))?"
)


@dataclasses.dataclass(frozen=True)
class Slowness:
    """A steady slowness. Unlike other faults, it occurs again when its steps are repeated.

    Attributes:
      step: first slow step.
      process: process that is slow; None for all.
      percent: time added to each step, in percent of the time that the process takes without it.
      num_steps: number of slow steps; None for all until the end.
    """

    step: int
    process: int | None
    percent: float
    num_steps: int | None = None

    @property
    def name(self) -> str:
        """Name of the file that records the slowness."""
        return f"{SLOW}-{self.step}"

    def covers(self, step: int) -> bool:
        """Returns whether a step is slow."""
        return self.step <= step and (self.num_steps is None or step < self.step + self.num_steps)


def parse_slowness(word: str, *, variable: str) -> Slowness | None:
    """Parses one word of a list of faults; returns None if it is a fault of another kind.

    Raises:
      UserError: for a slowness that does not parse.
    """
    if word.partition("@")[0] != SLOW:
        return None
    match = _ORDER.fullmatch(word)
    if match is None:
        raise UserError(
            f'{variable} has "{word}"; a slowness is slow@step=N:percent=P or '
            "slow@step=N:process=M:percent=P, optionally followed by :steps=N"
        )
    process, steps = (None if match[name] is None else int(match[name]) for name in ("process", "steps"))
    return Slowness(int(match["step"]), process, float(match["percent"]), steps)


def slow_batches(
    slownesses: Sequence[Slowness],
    context: StepContext,
    batches: Iterator[Batch],
    *,
    first_step: int,
    record: Callable[[Slowness], object],
) -> Iterator[Batch]:
    """Yields batches, and delays the process before each one of a slow step.

    Args:
      slownesses: slownesses of the process.
      context: state of the loop.
      batches: batches of the steps from `first_step` on.
      first_step: first step.
      record: called with the slowness of a slow step.
    """
    ended = None
    for step, batch in enumerate(batches, start=first_step):
        slow = next((each for each in slownesses if each.covers(step)), None)
        if slow is not None and ended is None:
            record(slow)
        ended = None if slow is None else _delay(context, slow, ended)
        yield batch


def _delay(context: StepContext, slow: Slowness, ended: float | None) -> float:
    """Delays a step, and returns when; since the last delay the process has worked on one step."""
    # A host that runs ahead of its devices could lose time at no cost, which is not a slow process.
    with context.heartbeats.within(STEP):
        jax.block_until_ready(context.state)
    now = time.monotonic()
    seconds = 0.0 if ended is None else slow.percent / 100 * (now - ended)
    time.sleep(seconds)
    return time.monotonic()
