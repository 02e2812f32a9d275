"""Health checks of a run's metrics: non-finite steps, loss spikes, unused experts and diverging replicas."""

from collections.abc import Iterable
from typing import TypeVar

import jax

from zaya_jax.config import Config
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import SKIPPED, STARVED
from zaya_jax.train.heartbeats import COMPILE
from zaya_jax.train.hooks.anomalies import ExpertLoadMonitor, LossSpikeDetector
from zaya_jax.train.hooks.checkpointing import Checkpointing
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.hooks.nonfinite_steps import SkipCounter
from zaya_jax.train.hooks.rollback import handle_spike
from zaya_jax.train.hooks.run_events import write_run_event
from zaya_jax.train.integrity.step_replay import verify_last_step
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.step.replica_checksums import require_equal
from zaya_jax.train.step.train_step import Metrics

T = TypeVar("T")


class HealthChecks(Hook):
    """Keeps the metrics of steps on their devices, and examines them together at the next check.

    All processes have the same metrics, so all reach the same result at the same step.

    Args:
      checkpointing: the run's checkpoints.
    """

    def __init__(self, checkpointing: Checkpointing):
        self._checkpointing = checkpointing

    def on_start(self, context: StepContext) -> None:
        """Resets all counts."""
        limit = context.config.train.max_consecutive_skips
        self._skips = SkipCounter(limit, int(context.state.skipped_steps))
        self._expert_loads = ExpertLoadMonitor(context.config.watch)
        self._steps: list[tuple[int, Metrics]] = []
        self._phase: int | None = None

    def on_range(self, context: StepContext) -> None:
        """Forgets the losses of the last phase: other sequences or another mixture have other losses."""
        phase = context.range.phase
        if phase.first_step != self._phase:
            losses = recent_losses(context.config, phase.name, until=context.step)
            self._spikes = LossSpikeDetector(context.config.watch, losses)
        self._phase = phase.first_step

    def on_step(self, context: StepContext) -> None:
        """Collects the step's metrics without waiting for them."""
        # Device arrays: converting them would wait for the step.
        self._steps.append((context.step, context.metrics))

    def on_check(self, context: StepContext, before_save: bool) -> None:
        """Waits for the steps since the last check and examines them; repeats the last if one is suspicious.

        Raises:
          UserError: after `train.max_consecutive_skips` skipped steps in a row.
          Rollback: to before a loss spike.
        """
        folder, ordered = context.config.run_folder, context.run.skipped_ranges
        steps, self._steps = self._steps, []
        # One transfer: two numbers per step.
        numbers = jax.device_get([(metrics.skipped_steps, metrics.loss) for _, metrics in steps])
        streaks, spikes, is_skipped = [], [], False
        for (step, metrics), (skipped, loss) in zip(steps, numbers, strict=True):
            # A step that is skipped after a rollback says nothing about the model.
            is_ordered = step in ordered
            if skipped > self._skips.skipped_steps and not is_ordered:
                write_run_event(folder, SKIPPED, step, reason="its loss or a gradient was NaN or infinite")
                is_skipped = True
            streaks.append(self._skips.add(step, metrics, int(skipped), is_ordered=is_ordered))
            spikes.append(None if is_ordered else self._spikes.add(step, float(loss)))
        if spike := _first(spikes):
            verify_last_step(context, str(spike))
        elif is_skipped:
            verify_last_step(context, "a step was not finite")
        # The newest step only: an unused expert stays unused for thousands of steps.
        counts_LX = jax.device_get(steps[-1][1].router_counts_LX) if steps else None
        # The end of a run comes first, because it makes all other findings irrelevant.
        if (streak := _first(streaks)) is not None:
            newest = self._checkpointing.checkpoints.newest()
            raise hosts.collective_error(streak.describe(folder, newest_step=newest))
        # An unused expert costs quality but is no reason to end a run, so it is only reported.
        for alert in [] if counts_LX is None else self._expert_loads.add(counts_LX):
            place = {"layer": alert.layer, "expert": alert.expert, "share": alert.share}
            write_run_event(folder, STARVED, context.step, reason=str(alert), **place)
            context.progress.say(f"step {context.step}: {alert} for many lines in a row")
        if spike is not None:
            # A save in progress would be in the way of checkpoints that a rollback removes.
            with self._checkpointing.tolerating_failure(context):
                self._checkpointing.checkpoints.wait()
            handle_spike(context, spike)


def recent_losses(config: Config, phase: str, *, until: int) -> list[float]:
    """Returns the recorded losses of a phase, newest last; the same in all processes.

    Args:
      config: config of the run.
      phase: name of the phase.
      until: last step that counts.
    """

    # Read by one process: two that detected different spikes would diverge for good.
    def read() -> list[float]:
        rows = read_metrics(config.run_folder, "train") if until else []
        losses = (row.get("loss") for row in rows if row["step"] <= until and row.get("phase", "") == phase)
        return [loss for loss in losses if isinstance(loss, float)][-config.watch.spike_window :]

    return hosts.broadcast_from_first("losses", hosts.run_on_first("losses", read))


def _first(values: Iterable[T | None]) -> T | None:
    # Even if later steps were fine: a run's fate must not depend on how often it is checked.
    return next((each for each in values if each is not None), None)


class ReplicaCheck(Hook):
    """Compares devices every `watch.replica_check_every` steps and before saves; ends a diverged run."""

    def on_step_end(self, context: StepContext) -> None:
        """Compares when it is due."""
        every = context.config.watch.replica_check_every
        if every is not None and context.step % every == 0:
            self._compare(context)

    def on_check(self, context: StepContext, before_save: bool) -> None:
        """Compares before a save: a checkpoint is what later runs trust."""
        if before_save and context.config.watch.replica_check_every is not None:
            self._compare(context)

    def _compare(self, context: StepContext) -> None:
        if context.run.mesh.size > 1:
            # The first comparison compiles its program, and all of them wait for the step in progress.
            context.heartbeats.enter(COMPILE, context.step)
            checksums = context.programs.checksums(context.state)
            require_equal(checksums, node_devices=context.state.partition.node_devices)
