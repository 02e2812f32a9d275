"""When a run saves its state, and which of its checkpoints stay."""

import functools
import time

from zaya_jax.checkpoint import Checkpoints, Retention
from zaya_jax.config import Config, TrainConfig
from zaya_jax.parallel import hosts
from zaya_jax.train.metrics import held_out_losses


class SaveClock:
    """Tells when a save is due, and counts the minutes since the last one began."""

    def __init__(self, config: TrainConfig):
        self._config = config
        self.restart()

    def restart(self) -> None:
        """Notes that a save begins now."""
        self._begun = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether the state behind a step is to be saved; the same answer in all processes."""
        due = is_save_due(self._config, step, seconds=time.monotonic() - self._begun)
        if self._config.checkpoint_minutes is None:
            return due
        # Processes' clocks differ by steps: all take the answer of the first one.
        return hosts.gather("save is due", due)[0]


def is_save_due(config: TrainConfig, step: int, *, seconds: float) -> bool:
    """Whether the state behind a step is to be saved; whichever comes first, steps or minutes.

    Args:
      config: says how often.
      step: that is done.
      seconds: since the last save began, or the run.
    """
    minutes = config.checkpoint_minutes
    return step % config.checkpoint_every == 0 or (minutes is not None and seconds >= 60 * minutes)


def open_checkpoints(config: Config) -> Checkpoints:
    """The checkpoints of a run, kept as its config says."""
    # Read when a step has been written, by then with the loss of the step itself.
    losses = functools.partial(held_out_losses, config.run_folder)
    return Checkpoints(config.run_folder, retention=retention_of(config), losses=losses)


def retention_of(config: Config) -> Retention:
    """Which checkpoints of a run stay: those that fields of `train` name, and the ends of phases."""
    train = config.train
    # By its end a phase is judged, and another run's phase may start from it: a few, and worth their disk.
    ends = frozenset(phase.end for phase in config.resolved_phases) if config.phases else frozenset()
    return Retention(
        newest=train.keep_checkpoints,
        every=train.keep_every,
        best=train.keep_best,
        phase_ends=ends,
        min_free_bytes=None if train.min_free_gib is None else int(train.min_free_gib * 2**30),
    )
