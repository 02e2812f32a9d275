"""The hook protocol: how code observes a training run and acts on it without being part of the loop.

    class PrintHeldOutLoss(Hook):
        def on_evaluate(self, context, kind, values):
            context.progress.say(f"{context.step}: {values}")

    train(config, hooks=[PrintHeldOutLoss()])

Everything that the trainer does besides its steps is a hook too (`zaya_jax.train.hooks.defaults`): metric
files, checkpoints, evaluation, health checks. Custom hooks are called after the default ones.

The events of a process, in order:

    on_setup                      before the state is created or restored
      on_start                    before the first step; again after each rollback
        on_range                  before the first step of a phase or batch size, which compiles
          on_step_begin, on_step  around each step
          on_progress, on_log     when the values of a step are on the host
          on_check                after that, and before each save
          on_step_end             when the step has been logged; evaluations run here
          on_evaluate             when an evaluation is done
          on_save                 before a checkpoint is written
          on_step_done            after a step, its evaluations and its checkpoint
      on_end                      after the last step, or after an error
      on_rollback                 when the run folder is back at an older checkpoint
    on_exit                       when the process leaves the run

In a run of several processes all hooks are called in all processes, at the same steps. A hook that exchanges
values between processes must do so in all of them. An exception that a hook raises ends the run, so it must
be raised by all processes at the same step; `zaya_jax.train.hooks.rollback.Rollback` restarts the run from an
older checkpoint instead.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from jax.sharding import Mesh

from zaya_jax.config import Config, StepRange
from zaya_jax.data.reading.batch import Batch
from zaya_jax.data.reading.mixture import MixturePosition
from zaya_jax.train.compiled_programs import Programs
from zaya_jax.train.heartbeats import Heartbeats
from zaya_jax.train.hooks.progress import ProgressLine
from zaya_jax.train.hooks.step_meter import StepClock
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.step.state import TrainState
from zaya_jax.train.step.train_step import Metrics
from zaya_jax.train.stop_request import StopRequest


@dataclasses.dataclass(kw_only=True)
class StepContext:
    """The training loop's state, which hooks may read. A hook may replace `state`, and `programs` for a step.

    Attributes:
      run: the prepared run: config, corpora, mesh.
      hooks: all hooks, in the order in which they are called.
      state: training state after `step`. The next step donates its memory, so copy what you keep.
      step: number of completed (dispatched) steps of the run.
      progress: the progress line; `progress.say` prints a line above it.
      clock: measures seconds per step; restart it after work that is not part of a step.
      heartbeats: records which section of the loop the process is in, for the watchdog and the goodput.
      stop: stops the run after a step, in all processes together.
      range: steps of one phase and batch size; available from `on_range` on, like the next two.
      position: position in the data mixture at the start of `range`.
      programs: compiled step, evaluation and checkpoint programs of `range`.
      batch: this process's share of the step's batch, on the host; available from `on_step_begin` on.
      metrics: metrics of the step, on the devices; available from `on_step` on. Reading one
        waits for the step.
      text_bytes: bytes of text per step since the last `on_progress`, summed over processes.
      previous: arguments of the last step, its state and its batch on the devices; None unless
        `watch.replay`.
    """

    run: PreparedRun
    hooks: "Sequence[Hook]"
    state: TrainState
    step: int
    progress: ProgressLine
    clock: StepClock
    heartbeats: Heartbeats
    stop: StopRequest
    range: StepRange = dataclasses.field(init=False)
    position: MixturePosition = dataclasses.field(init=False)
    programs: Programs = dataclasses.field(init=False)
    batch: Batch = dataclasses.field(init=False)
    metrics: Metrics = dataclasses.field(init=False)
    text_bytes: Sequence[float] = ()
    previous: tuple[TrainState, Batch] | None = None

    def emit(self, event: Callable[..., None], *values: object) -> None:
        """Calls one method of all hooks, as in `context.emit(Hook.on_log, values)`."""
        # By name, so that the overriding method of each hook is called.
        for hook in self.hooks:
            getattr(hook, event.__name__)(self, *values)

    @property
    def config(self) -> Config:
        """Config of the whole run, with all of its phases."""
        return self.run.config

    @property
    def phase_config(self) -> Config:
        """Config of the run with the overrides of the current phase."""
        return self.range.phase.config

    @property
    def mesh(self) -> Mesh:
        """Devices, with the context axis of the phase."""
        return self.run.mesh_of(self.phase_config)

    @property
    def ends_phase(self) -> bool:
        """Whether `step` is the last one of its phase."""
        return self.step == self.range.phase.end

    @property
    def starts_range(self) -> bool:
        """Whether `step` is the first one that this process runs of its range: it compiles the program."""
        return self.step == self.range.first_step + 1

    @property
    def is_logged(self) -> bool:
        """Whether the values of `step` are written to files; the same however often a run was resumed."""
        return self.step == 1 or self.ends_phase or self.step % self.config.train.log_every == 0


class Hook:
    """Base class of hooks; each method does nothing. Override those that you need."""

    def on_setup(self, run: PreparedRun, heartbeats: Heartbeats) -> None:
        """Called once in a process: the run folder is prepared, the state is not restored yet."""

    def on_start(self, context: StepContext) -> None:
        """Called before the first step, and again after each rollback."""

    def on_range(self, context: StepContext) -> None:
        """Called before the first step of a phase or batch size."""

    def wrap_batches(self, context: StepContext, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Returns the batches that training reads, on the host, from the first step of `context.range` on.

        Held-out batches do not pass through hooks: use `Extensions.batch` for changes of both.
        """
        return batches

    def on_step_begin(self, context: StepContext) -> None:
        """Called before a step is dispatched; `context.step` is its number."""

    def on_step(self, context: StepContext) -> None:
        """Called after a step was dispatched. Do not wait for its arrays here: the host runs ahead."""

    def on_progress(self, context: StepContext, values: Mapping[str, float]) -> None:
        """Called with the values of a step, also for the first step after a resume, which no file has."""

    def on_log(self, context: StepContext, values: Mapping[str, float]) -> None:
        """Called with the values of every `train.log_every`-th step, the first and the last of a phase."""

    def on_check(self, context: StepContext, before_save: bool) -> None:
        """Called after `on_progress` and before a save: raise if the run must not continue."""

    def on_step_end(self, context: StepContext) -> None:
        """Called after a step and its log events, before a checkpoint of it is written."""

    def on_evaluate(self, context: StepContext, kind: str, values: Mapping[str, float]) -> None:
        """Called with the results of an evaluation; `kind` is "validation" or "tasks"."""

    def on_save(self, context: StepContext) -> None:
        """Called before a checkpoint is written: flush what you have recorded up to this step."""

    def on_step_done(self, context: StepContext) -> None:
        """Called after a step, its evaluations and the start of its checkpoint."""

    def on_end(self, context: StepContext, error: BaseException | None) -> None:
        """Called after the last step or an error, in the reverse order of the hooks."""

    def on_rollback(self, step: int, values: Mapping[str, object]) -> None:
        """Called after a rollback: `step` is the one to resume from, `values` describe the reason."""

    def on_exit(self, error: BaseException | None) -> None:
        """Called when the process leaves the run, in the reverse order of the hooks."""


def call_at_exit(stack: contextlib.ExitStack, method: Callable[[BaseException | None], None]) -> None:
    """Registers a method to be called with the error that ends a block; it cannot suppress the error."""

    def call(kind: object, error: BaseException | None, traceback: object) -> None:
        # ExitStack would treat a true result as "the error is handled".
        method(error)

    stack.push(call)
