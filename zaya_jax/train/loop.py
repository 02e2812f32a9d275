"""The loop around the step: batches in, metrics and checkpoints out, resumable at any moment."""

import contextlib
import dataclasses
import itertools
import pathlib

import jax
import numpy as np
from jax.sharding import Mesh

from zaya_jax.aegis import heartbeats as sections
from zaya_jax.aegis.heartbeats import COMPILE, DISPATCH, EVALUATE, READ, STEP, Heartbeats
from zaya_jax.aegis.journal import TASKS, TRAIN, VALIDATION
from zaya_jax.checkpoint import FOLDER, RunLock, run_lock
from zaya_jax.config import Config
from zaya_jax.data.batch import Batch
from zaya_jax.data.mixture import Reading
from zaya_jax.data.reading import describe_epochs, readings
from zaya_jax.data.shards import Corpus
from zaya_jax.model.adapters import declare_run, describe_trained
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel import hosts
from zaya_jax.parallel.mesh import data_mesh, place_rows
from zaya_jax.train.batches import batches_of
from zaya_jax.train.between_lines import Clock, TextBytes
from zaya_jax.train.evaluation import evaluate, held_out_batches
from zaya_jax.train.extensions import NONE, Extensions, TasksFunction
from zaya_jax.train.going_back import GoingBack, go_back
from zaya_jax.train.implementations import describe_implementations
from zaya_jax.train.looking import compare, look
from zaya_jax.train.metrics import METRICS_FILE, metrics_writer, read_metrics
from zaya_jax.train.numbers import NumberWatch, recent_losses
from zaya_jax.train.opening import VERIFY_SECONDS, OpenRun, open_run, read_held
from zaya_jax.train.phases import describe_batch, describe_phase
from zaya_jax.train.profiling import Profiler
from zaya_jax.train.programs import whole_variables
from zaya_jax.train.progress import ProgressLine
from zaya_jax.train.provenance import describe_origin
from zaya_jax.train.reference import compute_references, load_references
from zaya_jax.train.replay import Replay, find_replay, replay
from zaya_jax.train.run_programs import RunPrograms
from zaya_jax.train.saves import look_for_failed_save, save_state
from zaya_jax.train.saving import SaveClock, open_checkpoints
from zaya_jax.train.sinks import Sinks, open_sinks
from zaya_jax.train.skips import SkipCounter
from zaya_jax.train.starting import starting_state
from zaya_jax.train.state import TrainState
from zaya_jax.train.step import Metrics, Sums
from zaya_jax.train.step_values import has_router_row, train_values
from zaya_jax.train.steps import Outputs, Steps
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


def train(
    config: Config,
    *,
    overwrite: bool = False,
    change_course: bool = False,
    replay_check: int | None = None,
    extensions: Extensions = NONE,
    sinks: Sinks | None = None,
) -> TrainResult:
    """Trains, from the newest checkpoint of the run folder if there is one, to the last step.

    Args:
      config: of the run; one that has begun goes on with no other than `zaya_jax.config.resume` allows.
      overwrite: throws away what the run folder holds.
      change_course: lets a run that has begun go on with other rates, decays or lengths, and records it.
      replay_check: so many recorded steps are repeated first, and must have the losses that they had.
      extensions: parts of one's own program.
      sinks: the run's, of somebody who tells them more when it is done; None opens them for the run alone.

    Raises:
      ValueError: for whatever cannot work, before anything is compiled; or for `train.stop_after_skips` steps
        in a row that were not finite; or for a step that is not what it was.
      Stopped: behind a SIGTERM or Ctrl-C, when the state is saved.
    """
    if overwrite and replay_check is not None:
        raise ValueError(
            "--replay-check repeats steps of the run that --overwrite throws away; give one of them"
        )
    if config.tasks.names and extensions.tasks is None:
        raise ValueError(
            f"tasks.names has {', '.join(config.tasks.names)}, and extensions.tasks nobody who asks them; "
            "zaya train has lm-eval do it"
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
        sinks = sinks or held.enter_context(open_sinks(config))
        # Behind the lock: as long as another process has it, the run's time is that one's.
        heartbeats = Heartbeats()
        run = open_run(
            config,
            data_mesh(node_devices=config.execution.node_devices),
            lock,
            heartbeats=heartbeats,
            overwrite=overwrite,
            change_course=change_course,
        )
        return _train(dataclasses.replace(run, extensions=extensions), lock, planned, heartbeats, sinks)


def _lock(config: Config) -> contextlib.AbstractContextManager[RunLock]:
    read_held(pathlib.Path(config.run_folder))  # in a folder that is no run nobody makes a lock
    return run_lock(config.run_folder)


def _train(
    run: OpenRun, lock: RunLock | None, planned: Replay | None, heartbeats: Heartbeats, sinks: Sinks
) -> TrainResult:
    # Before a replay, whose steps need it as all others do.
    has_begun = run.start is not None and run.start.run_folder == run.config.run_folder
    if run.config.dpo.beta and has_begun:
        run = dataclasses.replace(run, references=load_references(run))
    config, programs = run.config, RunPrograms(run)
    if planned is not None:
        replay(run, planned, programs)  # before the state that goes on: two may not fit beside each other
    with watched(config, heartbeats) as watch:
        with programs.made_meanwhile(run.start.step if run.start is not None and has_begun else 0):
            state = starting_state(run, heartbeats)
            heartbeats.enter(COMPILE, int(state.step))  # what is left of it is waited for
        if config.dpo.beta and not has_begun:
            # With the state that will train: nothing has moved it yet, and it is the only copy.
            references = compute_references(run, state, heartbeats)
            run = dataclasses.replace(run, references=references)
        # Behind the start, which a signal may cut short; and one for all lives: a word is heard once.
        with StopRequest() as stop:
            while True:
                try:
                    return _train_on(run, state, lock, programs, watch, stop, sinks)
                except GoingBack as order:
                    run = go_back(run, order, watch)
                # Behind the block, with whose end the state goes that an exception's frames still hold.
                state = starting_state(run, heartbeats)


def _train_on(
    run: OpenRun,
    state: TrainState,
    lock: RunLock | None,
    programs: RunPrograms,
    watch: Watch,
    stop: StopRequest,
    sinks: Sinks,
) -> TrainResult:
    """Makes all steps that are left, and writes down what comes of them."""
    config = run.config
    with open_checkpoints(config) as checkpoints:
        first_step = int(state.step)
        if first_step == config.train.num_steps:
            print(f"run {config.run_folder} is finished: it has all {first_step:,} steps")
            return _result(run, state)
        sinks.begin()  # first: the writer takes back what an earlier life told of steps behind this one
        with (
            metrics_writer(config, first_step=first_step) as writer,
            ProgressLine(config.train.num_steps, first_step) as progress,
            Profiler(config.profile, config.run_folder, progress.say) as profiler,
        ):
            _introduce(run, first_step, progress)
            profiler.begin(first_step, config.train.num_steps)
            skips = SkipCounter(config.train.stop_after_skips, int(state.skipped_steps))
            numbers = NumberWatch(skips, config.watch, run.passed_over)
            clocks = Clock(first_step), SaveClock(config.train)
            written = writer, sinks, progress, profiler
            outputs = Outputs(lock, checkpoints, *written, *clocks, stop, numbers, watch)
            watch.began(first_step, devices=run.mesh.size, **describe_origin(run.mesh))
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


def _loop(run: OpenRun, state: TrainState, outputs: Outputs, programs: RunPrograms) -> TrainState:
    """Makes the steps of the run that are left; a new phase or batch size is a new program."""
    phase = None
    # Where a run reads follows from the sizes of its corpora, and from nothing that a checkpoint holds.
    for step_range, reading in readings(run.config, run.num_tokens, first_step=int(state.step)):
        # A ramp has several ranges in one phase, which is announced once.
        if step_range.phase.name and step_range.phase != phase:
            outputs.progress.say(describe_phase(step_range.phase))
        if step_range.phase.config.data.batch_ramp:
            outputs.progress.say(describe_batch(step_range))
        if step_range.phase != phase:
            losses = recent_losses(run.config, step_range.phase.name, until=step_range.first_step)
            outputs.numbers.begin_phase(losses)
        phase = step_range.phase
        steps = Steps(run, outputs, step_range, reading, programs.of(step_range))
        outputs.clock.restart(step_range.first_step)
        outputs.progress.compiling()
        state = _make_steps(steps, state)
        if step_range.end == phase.end:
            outputs.progress.say(describe_epochs(_reading_after(steps, step_range.end)))
    return state


def _make_steps(steps: Steps, state: TrainState) -> TrainState:
    run, outputs, programs = steps.run, steps.outputs, steps.programs
    mesh = run.mesh_of(steps.range.phase.config)
    config, first_step = run.config.train, steps.range.first_step + 1
    text_bytes = TextBytes()
    # All time of the loop is in some section, that of a hang too.
    heartbeats = outputs.watch.heartbeats
    heartbeats.enter(READ, first_step)
    batches = batches_of(run, steps.range, steps.reading)
    for step, batch in enumerate(
        outputs.watch.faults.among(batches, first_step=first_step), start=first_step
    ):
        heartbeats.enter(COMPILE if step == first_step else DISPATCH, step)
        # Each process has read its share alone; together they are the batch that one would have read.
        rows = place_rows(batch, mesh)
        # A value that crosses unasked would make each step wait for the one before it.
        with outputs.profiler.step(step), jax.transfer_guard("disallow"):
            state, metrics = programs.step(state, rows)
        state = outputs.watch.faults.on_state(step, state)
        # Outside the guard: what others do with a state is theirs, a transfer included.
        if run.extensions.after_step is not None:
            run.extensions.after_step(step, state)
        text_bytes.add(run.text_bytes(batch))
        outputs.progress.add(metrics.loss, metrics.num_targets, metrics.preferences)
        outputs.numbers.add(step, metrics)
        if outputs.lock is not None:
            outputs.lock.check()  # before anything is written beside a run that has taken the folder
        look_for_failed_save(steps)  # known now, not at the next one
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
                _tell(steps, step, TRAIN, values)
                if has_router_row(config, step):
                    router = metrics.router_counts_LX, metrics.router_entropy_L
                    outputs.writer.write_router(step, *map(np.asarray, router))
            look(steps, step)
            outputs.watch.at(step, is_first=step == first_step)
        if outputs.profiler.made(step, metrics):  # not before the line, or its time would be the trace's
            outputs.clock.restart(step)
        _judge(steps, state, step)
        if run.config.watch.compare_every is not None and step % run.config.watch.compare_every == 0:
            compare(steps, state, step)
        # The same answer in all processes: one that stopped alone would leave the others in a collective.
        asked = outputs.stop.reached(step)
        if asked == SAVE_FAILED:
            outputs.checkpoints.wait()  # raises the failure, of which this process may hear just now
        if ends_phase or outputs.saving.is_due(step) or asked is not None:
            look(steps, step)  # a checkpoint is no reason to go on
            compare(steps, state, step)  # what is saved now is what others will trust
            save_state(steps, state, step, is_last=step == config.num_steps or asked is not None)
        if asked is not None and step < config.num_steps:
            raise Stopped(asked, step)
        heartbeats.enter(READ, step + 1)
    return state


def _values(steps: Steps, step: int, metrics: Metrics, num_bytes: float, seconds: float) -> dict[str, float]:
    values = train_values(steps.run, steps.range, step, metrics, num_bytes, seconds)
    epochs = _reading_after(steps, step).epochs()
    return values | {f"epochs/{folder}": count for folder, count in epochs.items()}


def _reading_after(steps: Steps, step: int) -> Reading:
    return steps.reading.after((step - steps.range.first_step) * steps.range.batch_size)


def _judge(steps: Steps, state: TrainState, step: int) -> None:
    """Scores a state where that is due; a phase's end always is, for others may start from it."""
    run, ends_phase = steps.run, step == steps.range.phase.end
    if ends_phase or step % run.config.train.eval_every == 0:
        _evaluate(steps, state, step)
        steps.outputs.clock.restart(step)
    if run.extensions.tasks is not None and (ends_phase or step % run.config.tasks.every == 0):
        _ask_tasks(run.extensions.tasks, steps, state, step)
        steps.outputs.clock.restart(step)


def _evaluate(steps: Steps, state: TrainState, step: int) -> None:
    """Says and writes down the held-out loss."""
    progress = steps.outputs.progress

    # Each batch anew: how many there are must not matter to how long one may take. The first one may compile.
    sections = itertools.chain([COMPILE], itertools.repeat(EVALUATE))

    def sums_of(batch: Batch) -> Sums:
        steps.outputs.watch.heartbeats.enter(next(sections), step)
        return steps.programs.evaluate(state, batch)

    batches, num_batches = held_out_batches(steps.run, steps.range)
    values = evaluate(steps.run, steps.range, sums_of, progress.evaluating(step, batches, num_batches))
    _tell(steps, step, VALIDATION, values)
    found = f"loss {values['loss']:.4f}, {values['bits_per_byte']:.4f} bits/byte"
    if steps.run.config.dpo.beta:
        found += f", accuracy {values['rewards/accuracies']:.1%}, margin {values['rewards/margins']:.3f}"
    progress.say(f"step {step}: held-out {found}")


def _ask_tasks(ask: TasksFunction, steps: Steps, state: TrainState, step: int) -> None:
    """Has the network do tasks as it is now, and writes down how well; one that fails holds up no step."""
    progress, config = steps.outputs.progress, steps.range.phase.config
    steps.outputs.watch.heartbeats.enter(sections.TASKS, step)
    variables = whole_variables(state, steps.run.mesh_of(config))
    try:
        values = dict(ask(step, steps.run.setup(config).model, variables))
    except (ValueError, OSError) as error:
        progress.say(f"step {step}: tasks without an answer, and the run goes on: {error}")
        return
    _tell(steps, step, TASKS, values)
    progress.say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))


def _tell(steps: Steps, step: int, kind: str, values: dict[str, float]) -> None:
    """Writes values of a step down, and gives them to whoever else wants them."""
    steps.outputs.writer.write(step, kind, values, phase=steps.range.phase.name)
    # Behind the file, so that a logger that fails has lost nothing of the run.
    steps.outputs.sinks.write(step, kind, values)
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
