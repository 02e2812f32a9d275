"""Checkpoints of a run: when they are written, which ones stay, and what happens when a save fails."""

import contextlib
import functools
import time
from collections.abc import Iterator

from zaya_jax.checkpoint import Checkpoints, Retention, RunLock, SaveFailed
from zaya_jax.config import Config, TrainConfig
from zaya_jax.parallel.processes import hosts
from zaya_jax.train.heartbeats import SAVE
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.metrics.files import held_out_losses
from zaya_jax.train.stop_request import SAVE_FAILED


class SaveSchedule:
    """Decides when a save is due, by steps and by minutes since the last save began."""

    def __init__(self, config: TrainConfig):
        self._config = config
        self.restart()

    def restart(self) -> None:
        """Records that a save begins now."""
        self._start = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Returns whether the state after a step is to be saved; the same in all processes."""
        due = is_save_due(self._config, step, seconds=time.monotonic() - self._start)
        if self._config.checkpoint_minutes is None:
            return due
        # Clocks of processes differ by steps: all use the first process's answer.
        return hosts.broadcast_from_first("save is due", due)


def is_save_due(config: TrainConfig, step: int, *, seconds: float) -> bool:
    """Returns whether the state after a step is to be saved, by steps or minutes, whichever comes first.

    Args:
      config: save interval in steps and in minutes.
      step: number of completed steps.
      seconds: time since the last save began, or since the start.
    """
    minutes = config.checkpoint_minutes
    return step % config.checkpoint_every == 0 or (minutes is not None and seconds >= 60 * minutes)


def retention_of(config: Config) -> Retention:
    """Returns which checkpoints of a run are kept: by the fields of `train`, and the ends of phases."""
    train = config.train
    # A phase is evaluated at its end, and a later run may start from it: these few are worth their disk.
    ends = frozenset(phase.end for phase in config.resolved_phases) if config.phases else frozenset()
    return Retention(
        newest=train.keep_checkpoints,
        every=train.keep_every,
        best=train.keep_best,
        phase_ends=ends,
        min_free_bytes=None if train.min_free_gib is None else int(train.min_free_gib * 2**30),
    )


class Checkpointing(Hook):
    """Writes checkpoints in the background, and notices failed saves and a lost lock of the run folder.

    Args:
      lock: lock of the run folder, in the first process; None in others.
    """

    checkpoints: Checkpoints

    def __init__(self, lock: RunLock | None):
        self._lock = lock

    def on_start(self, context: StepContext) -> None:
        """Opens the run's checkpoints, with its retention and its schedule of saves."""
        config = context.config
        # Read when a step has been written, by then with the loss of the step itself.
        losses = functools.partial(held_out_losses, config.run_folder)
        self.checkpoints = Checkpoints(
            config.run_folder,
            retention=retention_of(config),
            losses=losses,
            writers=config.train.checkpoint_writers,
        )
        self._schedule = SaveSchedule(config.train)

    def on_step(self, context: StepContext) -> None:
        """Ends the run if another process took its folder, and handles a save that failed."""
        if self._lock is not None:
            self._lock.check()  # before anything is written next to a run that has taken the folder
        if not self.checkpoints.has_failed():
            return
        if context.config.train.on_failed_save == "stop":
            # Other processes may not know yet, and would wait in the next step for one that left.
            context.stop.propose(SAVE_FAILED)
        else:
            with self.tolerating_failure(context):
                self.checkpoints.wait()

    def on_end(self, context: StepContext, error: BaseException | None) -> None:
        """Waits for the save that is being written."""
        # After an error other processes may be gone; then several processes do not wait for each other.
        self.checkpoints.__exit__(None if error is None else type(error), error, None)

    def is_due(self, step: int) -> bool:
        """Returns whether the state after a step is to be saved; the same in all processes."""
        return self._schedule.is_due(step)

    def save(self, context: StepContext, *, is_last: bool) -> None:
        """Starts writing a checkpoint; the last one of a run or of a stopping process must not fail."""
        context.heartbeats.enter(SAVE, context.step)
        self._schedule.restart()  # at the beginning, so that a slow save delays none of the next ones
        with context.progress.pausing():
            with self.tolerating_failure(context):  # the previous save, whose failure is not this one's
                self.checkpoints.wait()
            # Records first: every process that reads this checkpoint also finds the metrics up to its step.
            context.emit(Hook.on_save)
            with contextlib.nullcontext() if is_last else self.tolerating_failure(context):
                about = context.run.provenance.of_step(context.step)
                arrays = context.programs.checkpoint(context.state)
                self.checkpoints.save(context.step, **arrays, about=about)
            if is_last:
                self.checkpoints.wait()
        context.clock.restart(context.step)

    @contextlib.contextmanager
    def tolerating_failure(self, context: StepContext) -> Iterator[None]:
        """Reports a failed save and continues, unless `train.on_failed_save` is "stop"."""
        try:
            yield
        except SaveFailed as error:
            if context.config.train.on_failed_save == "stop":
                raise
            context.progress.say(f"{error.message}; training continues, and the next save is tried")
