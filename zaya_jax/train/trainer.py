"""Training of a run from its config to its last step: setup, restore, rollbacks, and the final result."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from zaya_jax.checkpoint import RunLock, run_lock
from zaya_jax.config import Config
from zaya_jax.data.corpora.corpus import training_texts
from zaya_jax.data.corpora.shards import Corpus
from zaya_jax.errors import UserError
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.parallel.processes import hosts
from zaya_jax.progress import working
from zaya_jax.run_folder.names import METRICS_FILE
from zaya_jax.train.compiled_programs import RunPrograms
from zaya_jax.train.consistency.same_run import check_same_run
from zaya_jax.train.derived_config import find_run_config
from zaya_jax.train.extensions import NO_EXTENSIONS, Extensions
from zaya_jax.train.heartbeats import COMPILE, Heartbeats
from zaya_jax.train.hooks.checkpointing import Checkpointing
from zaya_jax.train.hooks.defaults import default_hooks
from zaya_jax.train.hooks.evaluation import EvaluationTasks
from zaya_jax.train.hooks.hook import Hook, call_at_exit
from zaya_jax.train.hooks.rollback import Rollback, roll_back
from zaya_jax.train.hooks.trackers import Trackers, open_trackers
from zaya_jax.train.loop import run_steps
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.reference_logprobs import compute_references, load_references
from zaya_jax.train.replay import Replay, find_shared_replay, replay
from zaya_jax.train.setup import PreparedRun, prepare_run
from zaya_jax.train.starting_state import starting_state
from zaya_jax.train.step.state import TrainState
from zaya_jax.train.step.step_metrics import compile_values
from zaya_jax.train.stop_request import StopRequest
from zaya_jax.train.teacher.predictions import compute_predictions, load_predictions


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes:
      config: config of the run.
      corpus: corpus whose held-out split is evaluated.
      model: network of the last phase.
      state: final training state.
      mesh: devices that hold the state.
      validation_bits_per_byte: last held-out loss, in bits per byte.
    """

    config: Config
    corpus: Corpus
    model: Zaya
    state: TrainState
    mesh: Mesh
    validation_bits_per_byte: float


def train(
    config: Config,
    *,
    overwrite: bool = False,
    change_course: bool = False,
    replay_check: int | None = None,
    extensions: Extensions = NO_EXTENSIONS,
    hooks: Sequence[Hook] = (),
    trackers: Trackers | None = None,
) -> TrainResult:
    """Trains to the last step, from the newest checkpoint of the run folder if there is one.

    Args:
      config: config of the run; a resumed run may change only the fields that
        `zaya_jax.config.resume` allows.
      overwrite: removes what the run folder holds.
      change_course: allows a resumed run other learning rates, decays or lengths, and records the change.
      replay_check: number of recorded steps to repeat first; their losses must equal the recorded ones.
      extensions: a custom optimizer, or a function that changes batches.
      hooks: custom hooks, called after the default ones.
      trackers: experiment trackers that the caller closes; None opens them for the duration of the run.

    Raises:
      UserError: for a config, corpus or folder that cannot work, before anything is compiled; after
        `train.max_consecutive_skips` non-finite steps in a row; or for a replayed loss that differs.
      Stopped: after SIGTERM, SIGHUP or Ctrl-C, once the state is saved.
    """
    _check_arguments(config, hooks, overwrite=overwrite, replay_check=replay_check)
    # Before the lock: a process with another config must not touch the run folder.
    check_same_run(config, replay_check=replay_check)
    with contextlib.ExitStack() as stack:
        # The limit exceeds the time after which another host's lock is stale, also where --wait is short.
        lock = hosts.run_on_first(
            "lock", lambda: stack.enter_context(_lock(config)), limit_seconds=hosts.LIMIT_SECONDS
        )
        # Before the metrics files are opened, which removes the recorded losses after the checkpoint.
        planned = None
        if replay_check is not None:
            planned = find_shared_replay(config.run_folder, replay_check)
        trackers = trackers or stack.enter_context(open_trackers(config))
        # After the lock: while another process holds it, time is accounted to that process.
        heartbeats = Heartbeats()
        mesh = data_mesh(node_devices=config.execution.node_devices)
        programs = RunPrograms(mesh, extensions)
        run = prepare_run(
            config,
            mesh,
            lock,
            heartbeats=heartbeats,
            overwrite=overwrite,
            change_course=change_course,
            extensions=extensions,
            on_checked=functools.partial(_compile_while_building, programs),
        )
        checkpointing = Checkpointing(lock)
        hooks = [*default_hooks(run, checkpointing, trackers), *hooks]
        return _train(run, hooks, checkpointing, planned, heartbeats, programs)


def _compile_while_building(programs: RunPrograms, config: Config, first_step: int) -> None:
    """Starts compiling before a missing corpus of text is built, which takes as long.

    Not in a run of several processes, which compile together on some platforms, and of which one builds.

    Raises:
      UserError: if the source has no text, before anything is compiled.
    """
    data = config.data
    is_missing = data.source_kind == "text" and not pathlib.Path(data.corpus).exists()
    if data.source is not None and is_missing and hosts.num_processes() == 1:
        next(training_texts(data.source), None)
        programs.start_compiling(config, first_step)


def _check_arguments(
    config: Config, hooks: Sequence[Hook], *, overwrite: bool, replay_check: int | None
) -> None:
    if overwrite and replay_check is not None:
        raise UserError(
            "--replay-check repeats steps of the run that --overwrite removes; give only one of them"
        )
    if config.tasks.names and not any(isinstance(hook, EvaluationTasks) for hook in hooks):
        raise UserError(
            f"tasks.names has {', '.join(config.tasks.names)}, but no hook scores them; use zaya train, or "
            "add an EvaluationTasks hook"
        )


def _lock(config: Config) -> contextlib.AbstractContextManager[RunLock]:
    find_run_config(pathlib.Path(config.run_folder))  # refuses other folders: no lock is made in them
    return run_lock(config.run_folder)


def _train(
    run: PreparedRun,
    hooks: Sequence[Hook],
    checkpointing: Checkpointing,
    planned: Replay | None,
    heartbeats: Heartbeats,
    programs: RunPrograms,
) -> TrainResult:
    """Restores or creates the state, and trains until the end, through all rollbacks."""
    config = run.config
    is_resumed = run.start is not None and run.start.run_folder == config.run_folder
    # Before a replay, whose steps need the references as all others do.
    if config.dpo.has_reference and is_resumed:
        run = dataclasses.replace(run, references=load_references(run))
    if config.distillation.teacher is not None:
        # Before the state exists: the teacher and the state may not fit in memory together.
        teachers = load_predictions(run) if is_resumed else compute_predictions(run, heartbeats)
        run = dataclasses.replace(run, teachers=teachers)
    if planned is not None:
        replay(run, planned, programs)  # before the state is restored: two may not fit in memory
    with _set_up(hooks, run, heartbeats):
        first_step = run.start.step if run.start is not None and is_resumed else 0
        restoring = f"restoring step {first_step} and " if first_step else ""
        with (
            working(f"{restoring}compiling the step"),
            programs.compiling_in_background(config, first_step),
        ):
            state = starting_state(run, heartbeats)
            # The step's program takes longer than the state.
            compile_values(run)
            heartbeats.enter(COMPILE, int(state.step))  # the rest of the compilation is waited for
        if config.dpo.has_reference and not is_resumed:
            # With the state that will train: nothing has changed it yet, and it is the only copy.
            references = compute_references(run, state, heartbeats)
            run = dataclasses.replace(run, references=references)
        # After the start, which a signal may interrupt. One for all attempts: a signal arrives once.
        with StopRequest() as stop:
            while True:
                try:
                    if int(state.step) == config.train.num_steps:
                        print(f"run {config.run_folder} is finished: it has all {int(state.step):,} steps")
                    else:
                        state = run_steps(run, state, hooks, checkpointing, programs, heartbeats, stop)
                    return _result(run, state)
                except Rollback as rollback:
                    # All hooks have ended this attempt by now, so no checkpoint is being written.
                    run, values = roll_back(run, rollback)
                    for hook in hooks:
                        hook.on_rollback(rollback.step or 0, values)
                    heartbeats.restart()
                # After the except block, which ends the exception's frames and frees the state they hold.
                state = starting_state(run, heartbeats)


@contextlib.contextmanager
def _set_up(hooks: Sequence[Hook], run: PreparedRun, heartbeats: Heartbeats) -> Iterator[None]:
    # In reverse order, so that a hook can rely on those before it until it has exited.
    with contextlib.ExitStack() as stack:
        for hook in hooks:
            hook.on_setup(run, heartbeats)
            call_at_exit(stack, hook.on_exit)
        yield


def _result(run: PreparedRun, state: TrainState) -> TrainResult:
    config = run.config
    setup = run.setup(config.phase_at(config.train.num_steps).config)
    # From the file: a run that was finished before has evaluated nothing in this process.
    held_out = hosts.broadcast_from_first(
        "held-out", hosts.run_on_first("result", lambda: _held_out_bits_per_byte(config))
    )
    return TrainResult(config, run.corpus, setup.model, state, run.mesh, held_out)


def _held_out_bits_per_byte(config: Config) -> float:
    values = [row.get("bits_per_byte") for row in read_metrics(config.run_folder, "validation")]
    if not values or values[-1] is None:  # the file was damaged or removed since
        raise UserError(
            f"{config.run_folder} has all its steps, but {METRICS_FILE} has lost its held-out loss"
        )
    return values[-1]
