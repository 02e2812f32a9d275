"""Rollback of a run whose loss has spiked: back to an older checkpoint, without the batches of the spike."""

import dataclasses
from typing import Any

from zaya_jax.checkpoint import SavedStep, Verify, all_steps, newest_step, remove_step, verified_together
from zaya_jax.config import WatchConfig
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import SPIKED
from zaya_jax.train.hooks.anomalies import LossSpike
from zaya_jax.train.hooks.hook import StepContext
from zaya_jax.train.hooks.run_events import write_run_event
from zaya_jax.train.hooks.skipped_ranges import write_skipped_ranges
from zaya_jax.train.setup import PreparedRun


class Rollback(Exception):
    """Restarts training from an older state. All processes must raise it at the same step.

    Attributes:
      reason: why the run rolls back.
      first: first step whose batch is skipped from now on.
      last: last step whose batch is skipped.
      step: step of the checkpoint to resume from; None for the state that the run started from.
    """

    def __init__(self, reason: str, *, first: int, last: int, step: int | None):
        super().__init__(reason)
        self.reason, self.first, self.last, self.step = reason, first, last, step


def handle_spike(context: StepContext, spike: LossSpike) -> None:
    """Rolls back to before a loss spike, or reports it where `watch.on_spike` or missing checkpoints say so.

    Raises:
      Rollback: to the newest checkpoint before the spike.
      UserError: after `watch.max_rollbacks` rollbacks.
    """
    run, config = context.run, context.config.watch
    if config.on_spike == "warn":
        return _report(context, spike, "training continues, as watch.on_spike says")
    num_rollbacks = len(run.skipped_ranges.ranges)
    if num_rollbacks >= config.max_rollbacks:
        raise hosts.collective_error(
            f"{spike}; the run has already rolled back {num_rollbacks} times, and watch.max_rollbacks is "
            f"{config.max_rollbacks}: try a smaller optimizer.learning_rate with --change-course, or inspect "
            "the batches of these steps"
        )
    target = verified_together("rollback target", lambda verify: _find_target(run, spike, verify))
    # All processes must raise the same rollback, so the first one decides.
    exists, step = hosts.broadcast_from_first("rollback target", target)
    if not exists:
        return _report(context, spike, "no checkpoint from before it is left: training continues")
    first, last = _skipped_range(spike, config)
    raise Rollback(str(spike), first=first, last=last, step=step)


def _find_target(run: PreparedRun, spike: LossSpike, verify: Verify) -> tuple[bool, int | None]:
    """Returns whether the run can roll back, and the step of the checkpoint; None for the initial state."""
    folder = run.config.run_folder
    # Before its first checkpoint a run loses little by starting again; later it would lose everything.
    if not all_steps(folder):
        # A run that was restored from peer copies has nothing to go back to.
        return run.copy is None, None
    first, _ = _skipped_range(spike, run.config.watch)
    before = [step for step in all_steps(folder) if step < first]
    return (True, newest_step(folder, until=max(before), verify=verify)) if before else (False, None)


def _skipped_range(spike: LossSpike, config: WatchConfig) -> tuple[int, int]:
    # From the step whose update produced the first high loss. As many steps again after the spike: the text
    # that caused it may not end with the steps that were observed.
    return max(spike.first - 1, 1), spike.last + config.spike_steps


def _report(context: StepContext, spike: LossSpike, action: str) -> None:
    folder = context.config.run_folder
    write_run_event(folder, SPIKED, spike.last, reason=str(spike), first=spike.first, last=spike.last)
    context.progress.say(f"{spike}; {action}")


def roll_back(run: PreparedRun, rollback: Rollback) -> tuple[PreparedRun, dict[str, Any]]:
    """Removes checkpoints after the rollback's step, and skips the batches of its range from now on.

    Returns:
      The run to continue with, and the values of the rollback's event.
    """
    folder = run.config.run_folder
    skipped_ranges = run.skipped_ranges.with_range(rollback.first, rollback.last)

    def change_folder() -> None:
        # Ranges first: a process killed in between rolls back all the same, or meets the spike again.
        write_skipped_ranges(folder, skipped_ranges)
        for step in all_steps(folder):
            if step > (rollback.step or 0):
                remove_step(folder, step)

    hosts.run_on_first("rollback", change_folder)
    target = "the start" if rollback.step is None else f"checkpoint {rollback.step}"
    reason = (
        f"{rollback.reason}; rolling back to {target} and skipping the batches of steps "
        f"{rollback.first} to {rollback.last}"
    )
    if hosts.is_first():
        print(reason)
    # Without a checkpoint in its folder the run starts again from fresh weights, or from another run's.
    start = run.start if rollback.step is None else SavedStep(folder, rollback.step)
    run = dataclasses.replace(run, start=start, copy=None, skipped_ranges=skipped_ranges)
    return run, {"reason": reason, "first": rollback.first, "last": rollback.last}
