"""The loop around the step: batches in, metrics and checkpoints out, resumable at any moment."""

import dataclasses
import functools
import time

import jax

from zaya_jax.checkpoint import FOLDER, Checkpoints
from zaya_jax.config import Config
from zaya_jax.data.loader import training_batches
from zaya_jax.data.mixture import Reading
from zaya_jax.data.shards import Corpus
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import data_mesh, sharded
from zaya_jax.train.evaluation import evaluate, held_out_batches
from zaya_jax.train.implementations import describe_implementations
from zaya_jax.train.metrics import METRICS_FILE, MetricsWriter, read_metrics
from zaya_jax.train.opening import OpenRun, open_run
from zaya_jax.train.phases import StepRange, describe_batch, describe_phase
from zaya_jax.train.programs import Programs, make_programs
from zaya_jax.train.progress import ProgressLine
from zaya_jax.train.reading import describe_epochs, readings
from zaya_jax.train.starting import starting_state
from zaya_jax.train.state import TrainState, abstract_state
from zaya_jax.train.step import Metrics
from zaya_jax.train.step_values import train_values
from zaya_jax.train.stopping import Stopped, StopRequest


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run has to show."""

    config: Config
    corpus: Corpus
    model: Zaya
    """Of the last phase."""
    state: TrainState
    validation_bits_per_byte: float


class _Clock:
    """Seconds a step since the last look, without what evaluation and checkpoints took."""

    def __init__(self, step: int):
        self.restart(step)

    def restart(self, step: int) -> None:
        self._step, self._time = step, time.monotonic()

    def lap(self, step: int) -> float:
        seconds = (time.monotonic() - self._time) / (step - self._step)
        self.restart(step)
        return seconds


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """Where a run writes, and the clock of what it writes."""

    checkpoints: Checkpoints
    writer: MetricsWriter
    progress: ProgressLine
    clock: _Clock
    stop: StopRequest


@dataclasses.dataclass(frozen=True)
class _Steps:
    """All that the steps of one range have in common."""

    run: OpenRun
    outputs: _Outputs
    range: StepRange
    reading: Reading
    """Where the range begins to read."""
    programs: Programs


def train(config: Config, *, overwrite: bool = False) -> TrainResult:
    """Trains, from the newest checkpoint of the run folder if there is one, to the last step.

    Args:
      config: of the run; one that has begun goes on with no other than `zaya_jax.config.resume` allows.
      overwrite: throws away what the run folder holds.

    Raises:
      ValueError: for whatever cannot work, before anything is compiled.
      Stopped: behind a SIGTERM or Ctrl-C, when the state is saved.
    """
    run = open_run(config, data_mesh(), overwrite=overwrite)
    state = starting_state(run)
    with Checkpoints(config.run_folder, keep=config.train.keep_checkpoints) as checkpoints:
        first_step = int(state.step)
        if first_step == config.train.num_steps:
            print(f"run {config.run_folder} is finished: it has all {first_step:,} steps")
            return _result(run, state)
        with (
            MetricsWriter(config.run_folder, first_step=first_step) as writer,
            ProgressLine(config.train.num_steps, first_step) as progress,
            StopRequest() as stop,
        ):
            _introduce(run, first_step, progress)
            state = _loop(run, state, _Outputs(checkpoints, writer, progress, _Clock(first_step), stop))
            return _result(run, state)


def _introduce(run: OpenRun, first_step: int, progress: ProgressLine) -> None:
    config = run.config
    device = run.mesh.devices.flat[0]
    what = f"of {config.data.batch_tokens:,} tokens from {run.corpus.folder}"
    if config.phases:
        what = f"in {len(config.phases)} phases"
    progress.say(
        f"run {config.run_folder} on {run.mesh.size} x {device.device_kind}: "
        f"{config.train.num_steps:,} steps {what}"
    )
    progress.say(describe_implementations(config.execution, config.model))
    if first_step:
        progress.say(f"resuming at step {first_step} from {config.run_folder}/{FOLDER}")


def _loop(run: OpenRun, state: TrainState, outputs: _Outputs) -> TrainState:
    """Makes the steps of the run that are left; a new phase or batch size is a new program."""
    phase = None
    # Where a run reads follows from the sizes of its corpora, and from nothing that a checkpoint holds.
    num_tokens = {folder: corpus.train.tokens for folder, corpus in run.corpora.items()}
    for step_range, reading in readings(run.config, num_tokens, first_step=int(state.step)):
        # A ramp has several ranges in one phase, which is announced once.
        if step_range.phase.name and step_range.phase != phase:
            outputs.progress.say(describe_phase(step_range.phase))
        if step_range.phase.config.data.batch_ramp:
            outputs.progress.say(describe_batch(step_range))
        phase = step_range.phase
        steps = _Steps(run, outputs, step_range, reading, _programs(run, step_range))
        outputs.clock.restart(step_range.first_step)
        outputs.progress.compiling()
        state = _make_steps(steps, state)
        if step_range.end == phase.end:
            outputs.progress.say(describe_epochs(_reading_after(steps, step_range.end)))
    return state


def _programs(run: OpenRun, step_range: StepRange) -> Programs:
    setup = run.setup(step_range.phase.config)
    state = abstract_state(run.config, setup, run.mesh)
    return make_programs(state, setup=setup, mesh=run.mesh, num_microbatches=step_range.num_microbatches)


def _make_steps(steps: _Steps, state: TrainState) -> TrainState:
    run, outputs, programs = steps.run, steps.outputs, steps.programs
    config, first_step = run.config.train, steps.range.first_step + 1
    batches = training_batches(
        steps.reading, run.corpora, batch_size=steps.range.batch_size, num_steps=steps.range.num_steps
    )
    for step, batch in enumerate(batches, start=first_step):
        rows = jax.device_put(batch, sharded(run.mesh))
        # A value that crosses unasked would make each step wait for the one before it.
        with jax.transfer_guard("disallow"):
            state, metrics = programs.step(state, rows)
        num_bytes = run.text_bytes(batch)
        outputs.progress.add(metrics.loss, metrics.num_targets, num_bytes)
        outputs.checkpoints.check()  # a save that failed is known now, not at the next one
        ends_phase = step == steps.range.phase.end
        is_logged = step == 1 or ends_phase or step % config.log_every == 0
        if is_logged or step == first_step:  # a resumed run shows at once that it lives
            # The transfer waits for the step, and the clock is read behind it: until then the step runs.
            metrics = jax.device_get(metrics)
            values = _values(steps, step, metrics, num_bytes, outputs.clock.lap(step))
            outputs.progress.update(step, values, steps.range.phase.name)
            if is_logged:  # what a file holds must not depend on where a run was resumed
                outputs.writer.write(step, "train", values, phase=steps.range.phase.name)
        # A phase's end is always scored and kept: by it the phase is judged, and others may start from it.
        if ends_phase or step % config.eval_every == 0:
            _evaluate(steps, state, step)
            outputs.clock.restart(step)
        asked = outputs.stop.signal_number  # read once: a signal behind this line is for the next step
        if ends_phase or step % config.checkpoint_every == 0 or asked is not None:
            with outputs.progress.pausing():
                outputs.checkpoints.save(step, **programs.checkpoint(state))
            outputs.clock.restart(step)
        if asked is not None and step < config.num_steps:
            raise Stopped(asked, step)
    return state


def _values(steps: _Steps, step: int, metrics: Metrics, num_bytes: float, seconds: float) -> dict[str, float]:
    values = train_values(steps.run, steps.range, step, metrics, num_bytes, seconds)
    epochs = _reading_after(steps, step).epochs()
    return values | {f"epochs/{folder}": count for folder, count in epochs.items()}


def _reading_after(steps: _Steps, step: int) -> Reading:
    return steps.reading.after((step - steps.range.first_step) * steps.range.batch_size)


def _evaluate(steps: _Steps, state: TrainState, step: int) -> None:
    """Says and writes down the held-out loss."""
    progress, sums_of = steps.outputs.progress, functools.partial(steps.programs.evaluate, state)
    batches, num_batches = held_out_batches(steps.run, steps.range)
    values = evaluate(steps.run, sums_of, progress.evaluating(step, batches, num_batches))
    steps.outputs.writer.write(step, "validation", values, phase=steps.range.phase.name)
    found = f"loss {values['loss']:.4f}, {values['bits_per_byte']:.4f} bits/byte"
    progress.say(f"step {step}: held-out {found}")


def _result(run: OpenRun, state: TrainState) -> TrainResult:
    config = run.config
    setup = run.setup(config.phase_at(config.train.num_steps).config)
    # From the file: a run that was finished before has evaluated nothing in this process.
    held_out = [row.get("bits_per_byte") for row in read_metrics(config.run_folder, "validation")]
    if not held_out or held_out[-1] is None:  # the file was damaged or taken away since
        raise ValueError(
            f"{config.run_folder} has all its steps, but {METRICS_FILE} has lost its held-out loss"
        )
    return TrainResult(config, run.corpus, setup.model, state, held_out[-1])
