"""The training loop: reads batches, runs steps, and calls the hooks."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import jax

from zaya_jax.data.reading.batch import Batch
from zaya_jax.data.reading.positions import describe_epochs, mixture_positions
from zaya_jax.train.compiled_programs import RunPrograms
from zaya_jax.train.heartbeats import COMPILE, DISPATCH, READ, STEP, Heartbeats
from zaya_jax.train.hooks.checkpointing import Checkpointing
from zaya_jax.train.hooks.hook import Hook, StepContext, call_at_exit
from zaya_jax.train.hooks.progress import ProgressLine
from zaya_jax.train.hooks.step_meter import StepClock, StepMeter
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.step.integrity import place_batch
from zaya_jax.train.step.state import TrainState
from zaya_jax.train.stop_request import SAVE_FAILED, Stopped, StopRequest

STEP_NAME = "train"
"""Name of a step in profiler traces."""


def run_steps(
    run: PreparedRun,
    state: TrainState,
    hooks: Sequence[Hook],
    checkpointing: Checkpointing,
    programs: RunPrograms,
    heartbeats: Heartbeats,
    stop: StopRequest,
) -> TrainState:
    """Trains from a state to the last step of the run, and returns the final state.

    Raises:
      Rollback: when a health check requests an older state.
      Stopped: after a signal, once the state is saved.
    """
    config, step = run.config, int(state.step)
    with ProgressLine(config.train.num_steps, step) as progress, contextlib.ExitStack() as stack:
        context = StepContext(
            run=run, hooks=hooks, state=state, step=step, progress=progress, clock=StepClock(step),
            heartbeats=heartbeats, stop=stop,
        )  # fmt: skip
        for hook in hooks:
            hook.on_start(context)
            call_at_exit(stack, functools.partial(hook.on_end, context))
        # The position in the data follows from the sizes of the corpora, and from nothing in a checkpoint.
        for context.range, context.position in mixture_positions(config, run.num_tokens, first_step=step):
            context.emit(Hook.on_range)
            context.programs = programs.of(config, context.range)
            context.clock.restart(context.step)
            _train_range(context, checkpointing)
        return context.state


def _train_range(context: StepContext, checkpointing: Checkpointing) -> None:
    """Runs the steps of one range, which share a phase, a batch size and a compiled program."""
    heartbeats, mesh, config = context.heartbeats, context.mesh, context.config
    # One meter per range, because steps of another size have another throughput.
    meter = StepMeter(context.run, context.range, context.position, context.clock)
    # Every moment of the loop is in some section, so that a hang is too.
    heartbeats.enter(READ, context.step + 1)
    for batch in _read_batches(context):
        context.step, context.batch = context.step + 1, batch
        heartbeats.enter(COMPILE if context.starts_range else DISPATCH, context.step)
        # Each process has read its share; together they are the batch that one process would have read.
        rows = place_batch(batch, mesh)
        # After its batch was read: a trace that starts here begins with the step itself.
        context.emit(Hook.on_step_begin)
        context.previous = (context.state, rows) if config.watch.replay else None
        # An implicit transfer would make each step wait for the previous one.
        with (
            jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=context.step),
            jax.transfer_guard("disallow"),
        ):
            context.state, context.metrics = context.programs.step(context.state, rows)
        meter.add(batch)
        context.emit(Hook.on_step)
        if context.is_logged or context.starts_range:  # a resumed run shows its first step at once
            _log(context, meter)
        context.emit(Hook.on_step_end)
        _save_or_stop(context, checkpointing)
        context.emit(Hook.on_step_done)
        heartbeats.enter(READ, context.step + 1)
    if context.ends_phase:
        epochs = context.position.after(context.range.num_steps * context.range.batch_size)
        context.progress.say(describe_epochs(epochs))


def _save_or_stop(context: StepContext, checkpointing: Checkpointing) -> None:
    """Saves the state when that is due or the run is to stop.

    Raises:
      Stopped: after a signal, once the state is saved.
    """
    step, is_last = context.step, context.step == context.config.train.num_steps
    # The same answer in all processes: one that stopped alone would leave others in a collective.
    stop = context.stop.reached(step)
    if stop is not None and not is_last:
        context.progress.stopping(step)
    if stop == SAVE_FAILED:
        checkpointing.checkpoints.wait()  # raises the failure, which this process may not know yet
    # The end of a phase is always saved, because another run may start from it.
    if context.ends_phase or checkpointing.is_due(step) or stop is not None:
        context.emit(Hook.on_check, True)
        # A process that exits must have written its checkpoint.
        checkpointing.save(context, is_last=is_last or stop is not None)
    if stop is not None and not is_last:
        raise Stopped(stop, step)


def _read_batches(context: StepContext) -> Iterator[Batch]:
    batches = context.run.read_batches(context.range, context.position)
    for hook in context.hooks:
        batches = hook.wrap_batches(context, batches)
    return batches


def _log(context: StepContext, meter: StepMeter) -> None:
    """Waits for a step, shows it, and has it written to the files of the run if it is a logged one."""
    if not context.starts_range:  # that one compiles until it is complete
        context.heartbeats.enter(STEP, context.step, num_steps=context.config.train.log_every)
    # The clock runs until the step is complete.
    context.progress.wait_for(context.metrics.loss)
    # One transfer for all metrics.
    context.metrics = jax.device_get(context.metrics)
    values, context.text_bytes = meter.measure(context.step, context.metrics)
    context.emit(Hook.on_progress, values)
    # The files must not depend on where a run was resumed.
    if context.is_logged:
        context.emit(Hook.on_log, values)
    context.emit(Hook.on_check, False)
