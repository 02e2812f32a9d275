"""Looks at what a run has computed, and does what that asks for; all processes alike, at the same step."""

from zaya_jax.aegis.heartbeats import COMPILE
from zaya_jax.aegis.journal import SKIPPED
from zaya_jax.train.going_back import answer_spike, end_for_skips, tell_starved
from zaya_jax.train.replicas import require_equal
from zaya_jax.train.saves import going_on
from zaya_jax.train.state import TrainState
from zaya_jax.train.steps import Steps


def look(steps: Steps, step: int) -> None:
    """Looks at the numbers of the steps since the last look, and does what they ask for."""
    run, outputs = steps.run, steps.outputs
    found = outputs.numbers.look()
    for skipped in found.skipped:
        outputs.watch.note(SKIPPED, skipped, reason="its loss or a gradient was NaN or infinite")
    # First: of a run that ends nothing else is worth a word.
    if found.streak is not None:
        end_for_skips(run, found.streak, newest=outputs.checkpoints.newest())
    tell_starved(found.starved, step, outputs.progress, outputs.watch)
    if found.spike is not None:
        # What is being written is in the way of what is to be removed.
        with going_on(steps):
            outputs.checkpoints.wait()
        answer_spike(run, found.spike, outputs.progress, outputs.watch)


def compare(steps: Steps, state: TrainState, step: int) -> None:
    """Ends a run whose devices hold different numbers where they must be the same, if that is asked for."""
    if steps.run.mesh.size > 1 and steps.run.config.watch.compare_every is not None:
        # The first time it is compiled; and all wait for the step under way.
        steps.outputs.watch.heartbeats.enter(COMPILE, step)
        require_equal(steps.programs.checksums(state), node_devices=state.partition.node_devices)
