"""The hooks that every run has, in the order in which they are called."""

from collections.abc import Mapping

import numpy as np

from zaya_jax.model.adapters import declare_run, describe_trained
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import CHECKPOINTS_FOLDER, TRAIN, VALIDATION
from zaya_jax.train.hooks.checkpointing import Checkpointing
from zaya_jax.train.hooks.evaluation import Evaluation
from zaya_jax.train.hooks.health import HealthChecks, ReplicaCheck
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.hooks.profiling import Profiler
from zaya_jax.train.hooks.run_events import RunEvents
from zaya_jax.train.hooks.trackers import Trackers
from zaya_jax.train.implementations import describe_implementations
from zaya_jax.train.integrity.checks import IntegrityChecks
from zaya_jax.train.integrity.step_replay import StepReplay
from zaya_jax.train.metrics.files import MetricsWriter
from zaya_jax.train.peer_copies.copying import PeerCopying
from zaya_jax.train.phase_summary import describe_batch, describe_phase
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.step.step_metrics import has_router_row
from zaya_jax.train.stragglers.straggler_checks import StragglerChecks


def default_hooks(run: PreparedRun, checkpointing: Checkpointing, trackers: Trackers) -> list[Hook]:
    """Returns the default hooks of a run.

    Args:
      run: the run.
      checkpointing: its checkpoints.
      trackers: its experiment trackers.
    """
    return [
        checkpointing,
        MetricsFiles(),
        # After the files: a tracker that fails or hangs must not lose a row of the run's own record.
        trackers,
        # The line comes before the end of a trace, whose time is no step's.
        ProgressDisplay(),
        Profiler(run.config.profile, run.config.run_folder),
        # Before the events: a step that ends the attempt is not recorded as reached. Corruption first,
        # because it makes all other findings its consequences.
        IntegrityChecks(),
        StepReplay(),
        HealthChecks(checkpointing),
        RunEvents(),
        # Before all that waits for devices at the end of a step.
        StragglerChecks(checkpointing),
        Evaluation(),
        ReplicaCheck(),
        PeerCopying(),
    ]


class MetricsFiles(Hook):
    """Writes `metrics.jsonl`, `routers.jsonl` and TensorBoard events in the first process."""

    _writer: MetricsWriter | None = None

    def on_start(self, context: StepContext) -> None:
        """Opens the files, and removes rows of steps that will run again."""
        # Two processes that write to one file would tear each other's lines.
        if hosts.is_first():
            config = context.config
            self._writer = MetricsWriter(
                config.run_folder, first_step=context.step, config_text=config.to_text()
            )

    def on_log(self, context: StepContext, values: Mapping[str, float]) -> None:
        """Writes the values of a training step, and now and then what each layer's router did."""
        self.on_evaluate(context, TRAIN, values)
        # In a separate file: a row of 40 layers is longer than all other values of its step.
        if self._writer is not None and has_router_row(context.config.train, context.step):
            router = context.metrics.router_counts_LX, context.metrics.router_entropy_L
            self._writer.write_router(context.step, *map(np.asarray, router))

    def on_evaluate(self, context: StepContext, kind: str, values: Mapping[str, float]) -> None:
        """Writes a row of values."""
        if self._writer is not None:
            self._writer.write(context.step, kind, values, phase=context.range.phase.name)

    def on_save(self, context: StepContext) -> None:
        """Waits until all rows are on the disk."""
        # A process that resumes from the checkpoint must find the rows of all its steps.
        if self._writer is not None:
            self._writer.sync()

    def on_end(self, context: StepContext, error: BaseException | None) -> None:
        """Closes the files of metrics, also after an error."""
        if self._writer is not None:
            self._writer.close()


class ProgressDisplay(Hook):
    """Shows what the run is, and its steps and evaluations as they complete."""

    def on_start(self, context: StepContext) -> None:
        """Prints the run, its devices and implementations, and the checkpoint that it resumes from."""
        run, config, say = context.run, context.config, context.progress.say
        what = f"of {config.data.batch_tokens:,} tokens from {run.corpus.folder}"
        if config.phases:
            what = f"in {len(config.phases)} phases"
        device_kind = run.mesh.devices.flat[0].device_kind
        say(
            f"run {config.run_folder} on {run.mesh.size} x {device_kind}: "
            f"{config.train.num_steps:,} steps {what}"
        )
        say(describe_implementations(config.execution, config.model))
        if (trained := describe_trained(declare_run(config))) is not None:
            say(f"parameters that train: {trained}")
        if context.step:
            checkpoints = f"{config.run_folder}/{CHECKPOINTS_FOLDER}"
            place = checkpoints if run.copy is None else "copies in the memory of the nodes"
            say(f"resuming at step {context.step} from {place}")
        self._phase: int | None = None

    def on_range(self, context: StepContext) -> None:
        """Prints a new phase and a new batch size."""
        phase = context.range.phase
        # A batch ramp has several ranges in one phase, which is announced once.
        if phase.name and phase.first_step != self._phase:
            context.progress.say(describe_phase(phase))
        if phase.config.data.batch_ramp:
            context.progress.say(describe_batch(context.range))
        context.progress.compiling()
        self._phase = phase.first_step

    def on_step(self, context: StepContext) -> None:
        """Counts a step, which may still be in progress on the devices."""
        metrics = context.metrics
        context.progress.add(metrics.loss, metrics.num_targets, metrics.preferences)

    def on_progress(self, context: StepContext, values: Mapping[str, float]) -> None:
        """Prints the line of a step."""
        name = context.range.phase.name
        context.progress.update(context.step, dict(values), name, num_bytes=context.text_bytes)

    def on_evaluate(self, context: StepContext, kind: str, values: Mapping[str, float]) -> None:
        """Prints the results of an evaluation."""
        if kind != VALIDATION:
            scores = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            context.progress.say(f"step {context.step}: {scores}")
            return
        text = f"loss {values['loss']:.4f} | {values['bits_per_byte']:.4f} bits/byte"
        if context.config.dpo.beta:
            # Single answers have no accuracy, because no answer is compared with another one.
            accuracy = values.get("rewards/accuracies")
            text += "" if accuracy is None else f" | accuracy {accuracy:.1%}"
            text += f" | margin {values['rewards/margins']:.3f}"
        if "ema/loss" in values:
            text += f" | EMA: loss {values['ema/loss']:.4f}, {values['ema/bits_per_byte']:.4f} bits/byte"
        context.progress.validated(context.step, text)
