"""The run history, `events.jsonl`: when a run starts, its steps, what happens to it, and how it ends."""

import time
from collections.abc import Mapping
from typing import Any

from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import Diverged
from zaya_jax.run_folder.events import write_event
from zaya_jax.run_folder.names import AT, BEGAN, DIVERGED, FAILED, FINISHED, STOPPED, WENT_BACK
from zaya_jax.train.consistency.provenance import describe_origin
from zaya_jax.train.heartbeats import Heartbeats
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.stop_request import Stopped

EVENT_SECONDS = 10.0
"""Interval of "at" events. After a kill, at most this much time of the run is unaccounted for."""


class RunEvents(Hook):
    """Writes events with the seconds that the process has spent in each section of the loop."""

    _written: float | None = None
    """Time of the last event; None before the run's first one."""

    def on_setup(self, run: PreparedRun, heartbeats: Heartbeats) -> None:
        """Remembers the run folder."""
        self._run_folder, self._heartbeats = run.config.run_folder, heartbeats

    def on_start(self, context: StepContext) -> None:
        """Writes that steps begin, with hosts, devices and versions."""
        mesh = context.run.mesh
        origin = describe_origin(mesh)
        self._write(BEGAN, context.step, processes=hosts.num_processes(), devices=mesh.size, **origin)

    def on_check(self, context: StepContext, before_save: bool) -> None:
        """Writes the current step, for the first one and then every `EVENT_SECONDS`."""
        if before_save or self._written is None:
            return
        if context.starts_range or time.monotonic() - self._written >= EVENT_SECONDS:
            self._write(AT, context.step)

    def on_rollback(self, step: int, values: Mapping[str, object]) -> None:
        """Ends this attempt of the run; the next one starts in the same process."""
        # Before the heartbeats restart: the event has the times of the attempt that it ends.
        self._write_end(WENT_BACK, **values, to=step)
        self._written = None

    def on_exit(self, error: BaseException | None) -> None:
        """Writes how the run ended in this process."""
        if error is None:
            self._write_end(FINISHED)
        elif isinstance(error, Stopped | SystemExit | KeyboardInterrupt):
            self._write_end(STOPPED)
        elif isinstance(error, Diverged):
            self._write_end(DIVERGED, reason=str(error), hosts=list(error.hosts))
        else:
            # Truncated, because messages of XLA may have thousands of characters.
            self._write_end(FAILED, reason=f"{type(error).__name__}: {error}"[:500])

    def _write_end(self, kind: str, **values: Any) -> None:
        # A process that ends before its first step is no part of the run's history.
        if self._written is not None:
            self._write(kind, self._heartbeats.beat.made, **values)

    def _write(self, kind: str, step: int, **values: Any) -> None:
        self._written = time.monotonic()
        # The first process's times stand for all: where one waits, the others wait for it.
        seconds = {name: round(value, 3) for name, value in self._heartbeats.seconds().items()}
        write_run_event(self._run_folder, kind, step, seconds=seconds, **values)


def write_run_event(run_folder: str, kind: str, step: int, **values: Any) -> None:
    """Writes an event of a step, in the first process alone."""
    if hosts.is_first():
        write_event(run_folder, kind, step=step, **values)
