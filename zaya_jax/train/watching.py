"""A run that is watched while it trains, and what is written down of it.

All of it lies beside the steps: nothing here changes what is learned, unless a fault is ordered.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

from zaya_jax.aegis.faults import VARIABLE, Faults, parse_faults
from zaya_jax.aegis.heartbeats import Heartbeats
from zaya_jax.aegis.journal import AT, BEGAN, DIVERGED, FAILED, FINISHED, STOPPED, WENT_BACK, write_event
from zaya_jax.aegis.watchdog import Watchdog
from zaya_jax.config import Config
from zaya_jax.parallel import hosts
from zaya_jax.parallel.failures import Diverged
from zaya_jax.train.stopping import Stopped

EVENT_SECONDS = 10.0
"""Between two words on where a run is: of a run that is killed, so much at most is not known."""


@dataclasses.dataclass
class Watch:
    """What the loop tells of itself.

    Attributes:
      heartbeats: of this process.
      faults: on order.
      run_folder: of the run.
    """

    heartbeats: Heartbeats
    faults: Faults
    run_folder: str
    _spoke: float | None = None
    """None before the run has begun."""

    def began(self, step: int, *, devices: int, **origin: Any) -> None:
        """The steps behind this one are to be made."""
        self._tell(BEGAN, step, processes=hosts.num_processes(), devices=devices, **origin)

    def at(self, step: int, *, is_first: bool = False) -> None:
        """A step is made; said of the first one of a life, and then now and then."""
        if self._spoke is not None and (is_first or time.monotonic() - self._spoke >= EVENT_SECONDS):
            self._tell(AT, step)

    def note(self, kind: str, step: int, **values: Any) -> None:
        """Something was seen at a step, and the run goes on."""
        if hosts.is_first():
            write_event(self.run_folder, kind, step=step, **values)

    def went_back(self, **values: Any) -> None:
        """This life of the run ends, and the next one begins in the same process."""
        self.ended(WENT_BACK, **values)
        # What follows is no part of this life's time: its steps are made again, by the same processes.
        self.heartbeats.begin_anew()
        self._spoke = None

    def ended(self, kind: str, **values: Any) -> None:
        """The process leaves its run."""
        if self._spoke is not None:  # what ends before its first step is no part of a run's life
            self._tell(kind, self.heartbeats.beat.made, **values)

    def _tell(self, kind: str, step: int, **values: Any) -> None:
        self._spoke = time.monotonic()
        # Its time is that of all: where one waits, the others wait for it.
        if hosts.is_first():
            seconds = {name: round(value, 3) for name, value in self.heartbeats.seconds().items()}
            write_event(self.run_folder, kind, step=step, seconds=seconds, **values)


@contextlib.contextmanager
def watched(config: Config, heartbeats: Heartbeats) -> Iterator[Watch]:
    """Watches a run, and writes down how it ends.

    Args:
      config: of the run.
      heartbeats: of this process.

    Raises:
      ValueError: if faults are ordered in words that say nothing.
    """
    # Read here and not in the config: a run that goes on without them is the same run.
    faults = Faults(parse_faults(os.environ.get(VARIABLE, "")), config.run_folder, hosts.process())
    watch = Watch(heartbeats, faults, config.run_folder)
    # Not while the run was opened: each wait of that has its own limit, and a corpus may take a day.
    with Watchdog(config.watch, config.run_folder, heartbeats):
        try:
            yield watch
        except (Stopped, SystemExit, KeyboardInterrupt):
            watch.ended(STOPPED)
            raise
        except Diverged as error:
            watch.ended(DIVERGED, reason=str(error), hosts=list(error.hosts))
            raise
        except BaseException as error:
            watch.ended(FAILED, reason=f"{type(error).__name__}: {error}"[:500])
            raise
        watch.ended(FINISHED)
