"""The loop around the step: batches in, metrics and checkpoints out, resumable at any moment."""

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from zaya_jax.aegis.heartbeats import COMPILE, DISPATCH, EVALUATE, READ, SAVE, STEP
from zaya_jax.checkpoint import FOLDER, Checkpoints, RunLock, SaveFailed, run_lock
from zaya_jax.config import Config, StepRange
from zaya_jax.data.batch import Batch
from zaya_jax.data.loader import training_batches
from zaya_jax.data.mixture import Reading
from zaya_jax.data.reading import describe_epochs, readings
from zaya_jax.data.shards import Corpus
from zaya_jax.model.adapters import declare_run, describe_trained
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel import hosts
from zaya_jax.parallel.mesh import data_mesh, place_rows
from zaya_jax.train.between_lines import Clock, TextBytes
from zaya_jax.train.evaluation import evaluate, held_out_batches
from zaya_jax.train.extensions import NONE, Extensions
from zaya_jax.train.implementations import describe_implementations
from zaya_jax.train.metrics import METRICS_FILE, Writer, metrics_writer, read_metrics
from zaya_jax.train.opening import VERIFY_SECONDS, OpenRun, open_run, read_held
from zaya_jax.train.phases import describe_batch, describe_phase
from zaya_jax.train.programs import Programs
from zaya_jax.train.progress import ProgressLine
from zaya_jax.train.reference import compute_references, load_references
from zaya_jax.train.replay import Replay, find_replay, replay
from zaya_jax.train.run_programs import RunPrograms
from zaya_jax.train.saving import SaveClock, open_checkpoints
from zaya_jax.train.skips import SkipWatch
from zaya_jax.train.starting import starting_state
from zaya_jax.train.state import TrainState
from zaya_jax.train.step import Metrics, Sums
from zaya_jax.train.step_values import train_values
from zaya_jax.train.stopping import SAVE_FAILED, Stopped, StopRequest
from zaya_jax.train.watching import Watch, watched


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run has to show."""

    config: Config
    corpus: Corpus
    model: Zaya
    """Of the last phase."""
    state: TrainState
    mesh: Mesh
    """Of the devices that have the state."""
    validation_bits_per_byte: float


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """Where a run writes, and the clock of what it writes."""

    lock: RunLock | None
    """In the first process."""
    checkpoints: Checkpoints
    writer: Writer
    progress: ProgressLine
    clock: Clock
    saving: SaveClock
    stop: StopRequest
    skips: SkipWatch
    watch: Watch


@dataclasses.dataclass(frozen=True)
class _Steps:
    """All that the steps of one range have in common."""

    run: OpenRun
    outputs: _Outputs
    range: StepRange
    reading: Reading
    """Where the range begins to read."""
    programs: Programs


def train(
    config: Config,
    *,
    overwrite: bool = False,
    change_course: bool = False,
    replay_check: int | None = None,
    extensions: Extensions = NONE,
) -> TrainResult:
    """Trains, from the newest checkpoint of the run folder if there is one, to the last step.

    Args:
      config: of the run; one that has begun goes on with no other than `zaya_jax.config.resume` allows.
      overwrite: throws away what the run folder holds.
      change_course: lets a run that has begun go on with other rates, decays or lengths, and records it.
      replay_check: so many recorded steps are repeated first, and must have the losses that they had.
      extensions: parts of one's own program.

    Raises:
      ValueError: for whatever cannot work, before anything is compiled; or for `train.stop_after_skips` steps
        in a row that were not finite; or for a step that is not what it was.
      Stopped: behind a SIGTERM or Ctrl-C, when the state is saved.
    """
    if overwrite and replay_check is not None:
        raise ValueError(
            "--replay-check repeats steps of the run that --overwrite throws away; give one of them"
        )
    with contextlib.ExitStack() as held:
        # Longer than a lock of another host is watched, also where --wait is short.
        lock = hosts.first_does(
            "lock", lambda: held.enter_context(_lock(config)), limit_seconds=hosts.LIMIT_SECONDS
        )
        planned = None
        if replay_check is not None:
            planned = hosts.together(
                "replay",
                lambda: find_replay(config.run_folder, replay_check),
                limit_seconds=VERIFY_SECONDS,
            )
        run = open_run(config, data_mesh(), lock, overwrite=overwrite, change_course=change_course)
        return _train(dataclasses.replace(run, extensions=extensions), lock, planned)


def _lock(config: Config) -> contextlib.AbstractContextManager[RunLock]:
    read_held(pathlib.Path(config.run_folder))  # in a folder that is no run nobody makes a lock
    return run_lock(config.run_folder)


def _train(run: OpenRun, lock: RunLock | None, planned: Replay | None) -> TrainResult:
    # Before a replay, whose steps need it as all others do.
    has_begun = run.start is not None and run.start.run_folder == run.config.run_folder
    if run.config.dpo.beta and has_begun:
        run = dataclasses.replace(run, references=load_references(run))
    config, programs = run.config, RunPrograms(run)
    if planned is not None:
        replay(run, planned, programs)  # before the state that goes on: two may not fit beside each other
    with watched(config) as watch:
        state = starting_state(run)
        if config.dpo.beta and not has_begun:
            # With the state that will train: nothing has moved it yet, and it is the only copy.
            references = compute_references(run, state, watch.heartbeats)
            run = dataclasses.replace(run, references=references)
        return _train_on(run, state, lock, programs, watch)


def _train_on(
    run: OpenRun, state: TrainState, lock: RunLock | None, programs: RunPrograms, watch: Watch
) -> TrainResult:
    """Makes all steps that are left, and writes down what comes of them."""
    config = run.config
    with open_checkpoints(config) as checkpoints:
        first_step = int(state.step)
        if first_step == config.train.num_steps:
            print(f"run {config.run_folder} is finished: it has all {first_step:,} steps")
            return _result(run, state)
        with (
            metrics_writer(config.run_folder, first_step=first_step) as writer,
            ProgressLine(config.train.num_steps, first_step) as progress,
            StopRequest() as stop,
        ):
            _introduce(run, first_step, progress)
            skips = SkipWatch(config.train.stop_after_skips, int(state.skipped_steps))
            clocks = Clock(first_step), SaveClock(config.train)
            outputs = _Outputs(lock, checkpoints, writer, progress, *clocks, stop, skips, watch)
            watch.began(first_step, devices=run.mesh.size)
            state = _loop(run, state, outputs, programs)
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
    if (trained := describe_trained(declare_run(config))) is not None:
        progress.say(f"parameters that train: {trained}")
    if first_step:
        progress.say(f"resuming at step {first_step} from {config.run_folder}/{FOLDER}")


def _loop(run: OpenRun, state: TrainState, outputs: _Outputs, programs: RunPrograms) -> TrainState:
    """Makes the steps of the run that are left; a new phase or batch size is a new program."""
    phase = None
    # Where a run reads follows from the sizes of its corpora, and from nothing that a checkpoint holds.
    for step_range, reading in readings(run.config, run.num_tokens, first_step=int(state.step)):
        # A ramp has several ranges in one phase, which is announced once.
        if step_range.phase.name and step_range.phase != phase:
            outputs.progress.say(describe_phase(step_range.phase))
        if step_range.phase.config.data.batch_ramp:
            outputs.progress.say(describe_batch(step_range))
        phase = step_range.phase
        steps = _Steps(run, outputs, step_range, reading, programs.of(step_range))
        outputs.clock.restart(step_range.first_step)
        outputs.progress.compiling()
        state = _make_steps(steps, state)
        if step_range.end == phase.end:
            outputs.progress.say(describe_epochs(_reading_after(steps, step_range.end)))
    return state


def _make_steps(steps: _Steps, state: TrainState) -> TrainState:
    run, outputs, programs = steps.run, steps.outputs, steps.programs
    mesh = run.mesh_of(steps.range.phase.config)
    config, first_step = run.config.train, steps.range.first_step + 1
    text_bytes = TextBytes()
    # All time of the loop is in some section, that of a hang too.
    heartbeats = outputs.watch.heartbeats
    heartbeats.enter(READ, first_step)
    for step, batch in enumerate(_batches(steps), start=first_step):
        heartbeats.enter(COMPILE if step == first_step else DISPATCH, step)
        # Each process has read its share alone; together they are the batch that one would have read.
        rows = place_rows(batch, mesh)
        # A value that crosses unasked would make each step wait for the one before it.
        with jax.transfer_guard("disallow"):
            state, metrics = programs.step(state, rows)
        # Outside the guard: what others do with a state is theirs, a transfer included.
        if run.extensions.after_step is not None:
            run.extensions.after_step(step, state)
        text_bytes.add(run.text_bytes(batch))
        outputs.progress.add(metrics.loss, metrics.num_targets, metrics.preferences)
        outputs.skips.add(step, metrics)
        if outputs.lock is not None:
            outputs.lock.check()  # before anything is written beside a run that has taken the folder
        _look_for_failed_save(steps)  # known now, not at the next one
        ends_phase = step == steps.range.phase.end
        is_logged = step == 1 or ends_phase or step % config.log_every == 0
        if is_logged or step == first_step:  # a resumed run shows at once that it lives
            if step != first_step:  # which compiles until it is made
                heartbeats.enter(STEP, step, num_steps=config.log_every)
            # The transfer waits for the step, and the clock is read behind it: until then the step runs.
            metrics = jax.device_get(metrics)
            num_bytes = text_bytes.take()  # all processes come here at the same steps
            values = _values(steps, step, metrics, num_bytes[-1], outputs.clock.lap(step))
            outputs.progress.update(step, values, steps.range.phase.name, num_bytes=num_bytes)
            if is_logged:  # what a file holds must not depend on where a run was resumed
                _tell(steps, step, "train", values)
            _check_skips(steps)
            outputs.watch.at(step)
        # A phase's end is always scored and kept: by it the phase is judged, and others may start from it.
        if ends_phase or step % config.eval_every == 0:
            _evaluate(steps, state, step)
            outputs.clock.restart(step)
        # The same answer in all processes: one that stopped alone would leave the others in a collective.
        asked = outputs.stop.reached(step)
        if asked == SAVE_FAILED:
            outputs.checkpoints.wait()  # raises the failure, of which this process may hear just now
        if ends_phase or outputs.saving.is_due(step) or asked is not None:
            _check_skips(steps)  # a checkpoint is no reason to go on
            _save(steps, state, step, is_last=step == config.num_steps or asked is not None)
        if asked is not None and step < config.num_steps:
            raise Stopped(asked, step)
        heartbeats.enter(READ, step + 1)
    return state


def _batches(steps: _Steps) -> Iterator[Batch]:
    """What this process has of the batches of a range, one after the other."""
    run, step_range = steps.run, steps.range
    config = step_range.phase.config
    batches = training_batches(
        steps.reading,
        run.corpora,
        batch_size=step_range.batch_size,
        num_steps=step_range.num_steps,
        share=run.share_of(config, step_range.batch_size),
        num_threads=config.execution.read_threads,
        references=run.training_references,
    )
    faults = steps.outputs.watch.faults
    return faults.among(run.extensions.of_batches(batches), first_step=step_range.first_step + 1)


def _check_skips(steps: _Steps) -> None:
    """Ends a run that learns nothing any more."""
    streak = steps.outputs.skips.look()
    if streak is not None:
        newest_step = steps.outputs.checkpoints.newest()
        sentence = streak.describe(steps.run.config.run_folder, newest_step=newest_step)
        raise hosts.shared(sentence)


def _save(steps: _Steps, state: TrainState, step: int, *, is_last: bool) -> None:
    """Begins to write a checkpoint; the last one of a run, or of a process that is to end, must not fail."""
    outputs = steps.outputs
    outputs.watch.heartbeats.enter(SAVE, step)
    outputs.saving.restart()  # at its begin: a save that takes long moves none that follows
    with outputs.progress.pausing():
        with _going_on(steps):  # the one before: its failure is not that of this one
            outputs.checkpoints.wait()
        # First: whoever finds the step finds all that was told of it, whatever becomes of this host.
        outputs.writer.sync()
        with contextlib.nullcontext() if is_last else _going_on(steps):
            about = steps.run.provenance.of_step(step)
            outputs.checkpoints.save(step, **steps.programs.checkpoint(state), about=about)
        if is_last:
            outputs.checkpoints.wait()  # a process that is to end has nothing else to do
    outputs.clock.restart(step)


def _look_for_failed_save(steps: _Steps) -> None:
    """Goes on behind a save that failed, or has all processes end behind the same step."""
    if not steps.outputs.checkpoints.has_failed():
        return
    if steps.run.config.train.on_failed_save == "stop":
        # Others may not know yet, and would wait in the next step for one that left.
        steps.outputs.stop.propose(SAVE_FAILED)
    else:
        with _going_on(steps):
            steps.outputs.checkpoints.wait()


@contextlib.contextmanager
def _going_on(steps: _Steps) -> Iterator[None]:
    """Says of a save that failed, and goes on where the config wants it."""
    try:
        yield
    except SaveFailed as error:
        if steps.run.config.train.on_failed_save == "stop":
            raise
        steps.outputs.progress.say(f"{error.what}; going on, and the next one is tried")


def _values(steps: _Steps, step: int, metrics: Metrics, num_bytes: float, seconds: float) -> dict[str, float]:
    values = train_values(steps.run, steps.range, step, metrics, num_bytes, seconds)
    epochs = _reading_after(steps, step).epochs()
    return values | {f"epochs/{folder}": count for folder, count in epochs.items()}


def _reading_after(steps: _Steps, step: int) -> Reading:
    return steps.reading.after((step - steps.range.first_step) * steps.range.batch_size)


def _evaluate(steps: _Steps, state: TrainState, step: int) -> None:
    """Says and writes down the held-out loss."""
    progress = steps.outputs.progress

    # Each batch anew: how many there are must not matter to how long one may take. The first one may compile.
    sections = itertools.chain([COMPILE], itertools.repeat(EVALUATE))

    def sums_of(batch: Batch) -> Sums:
        steps.outputs.watch.heartbeats.enter(next(sections), step)
        return steps.programs.evaluate(state, batch)

    batches, num_batches = held_out_batches(steps.run, steps.range)
    values = evaluate(steps.run, steps.range, sums_of, progress.evaluating(step, batches, num_batches))
    _tell(steps, step, "validation", values)
    found = f"loss {values['loss']:.4f}, {values['bits_per_byte']:.4f} bits/byte"
    if steps.run.config.dpo.beta:
        found += f", accuracy {values['rewards/accuracies']:.1%}, margin {values['rewards/margins']:.3f}"
    progress.say(f"step {step}: held-out {found}")


def _tell(steps: _Steps, step: int, kind: str, values: dict[str, float]) -> None:
    """Writes values of a step down, and gives them to whoever else wants them."""
    steps.outputs.writer.write(step, kind, values, phase=steps.range.phase.name)
    # Behind the file, so that a logger that fails has lost nothing of the run.
    logger = steps.run.extensions.logger
    if logger is not None and hosts.is_first():
        logger(step, kind, values)


def _result(run: OpenRun, state: TrainState) -> TrainResult:
    config = run.config
    setup = run.setup(config.phase_at(config.train.num_steps).config)
    # From the file: a run that was finished before has evaluated nothing in this process.
    held_out = hosts.from_first("held-out", hosts.first_does("result", lambda: _held_out(config)))
    return TrainResult(config, run.corpus, setup.model, state, run.mesh, held_out)


def _held_out(config: Config) -> float:
    found = [row.get("bits_per_byte") for row in read_metrics(config.run_folder, "validation")]
    if not found or found[-1] is None:  # the file was damaged or taken away since
        raise ValueError(
            f"{config.run_folder} has all its steps, but {METRICS_FILE} has lost its held-out loss"
        )
    return found[-1]
