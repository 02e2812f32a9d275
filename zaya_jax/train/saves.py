"""Writes a run's state down while it goes on, and what becomes of it where that fails."""

import contextlib
from collections.abc import Iterator

from zaya_jax.aegis.heartbeats import SAVE
from zaya_jax.checkpoint import SaveFailed
from zaya_jax.train.state import TrainState
from zaya_jax.train.steps import Steps
from zaya_jax.train.stopping import SAVE_FAILED


def save_state(steps: Steps, state: TrainState, step: int, *, is_last: bool) -> None:
    """Begins to write a checkpoint; the last one of a run, or of a process that is to end, must not fail."""
    outputs = steps.outputs
    outputs.watch.heartbeats.enter(SAVE, step)
    outputs.saving.restart()  # at its begin: a save that takes long moves none that follows
    with outputs.progress.pausing():
        with going_on(steps):  # the one before: its failure is not that of this one
            outputs.checkpoints.wait()
        # First: whoever finds the step finds all that was told of it, whatever becomes of this host.
        outputs.writer.sync()
        outputs.sinks.sync()
        with contextlib.nullcontext() if is_last else going_on(steps):
            about = steps.run.provenance.of_step(step)
            outputs.checkpoints.save(step, **steps.programs.checkpoint(state), about=about)
        if is_last:
            outputs.checkpoints.wait()  # a process that is to end has nothing else to do
    outputs.clock.restart(step)


def look_for_failed_save(steps: Steps) -> None:
    """Goes on behind a save that failed, or has all processes end behind the same step."""
    if not steps.outputs.checkpoints.has_failed():
        return
    if steps.run.config.train.on_failed_save == "stop":
        # Others may not know yet, and would wait in the next step for one that left.
        steps.outputs.stop.propose(SAVE_FAILED)
    else:
        with going_on(steps):
            steps.outputs.checkpoints.wait()


@contextlib.contextmanager
def going_on(steps: Steps) -> Iterator[None]:
    """Says of a save that failed, and goes on where the config wants it."""
    try:
        yield
    except SaveFailed as error:
        if steps.run.config.train.on_failed_save == "stop":
            raise
        steps.outputs.progress.say(f"{error.what}; going on, and the next one is tried")
