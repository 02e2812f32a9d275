"""Profiler traces of some steps, written to the run folder, with the scopes' names in them."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from zaya_jax.config import ProfileConfig
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import PROFILE_FOLDER
from zaya_jax.train.hooks.hook import Hook, StepContext


class Profiler(Hook):
    """Traces the configured steps in the configured processes.

    Args:
      config: which steps and processes are traced.
      run_folder: folder of the run.
      say: prints where a trace is, or why there is none; the progress line's once the run has started.
    """

    def __init__(self, config: ProfileConfig, run_folder: str, say: Callable[[str], None] = print):
        self._config, self._folder, self._say = config, pathlib.Path(run_folder) / PROFILE_FOLDER, say
        self._reset()

    def _reset(self) -> None:
        # A trace is tens of megabytes: of a thousand processes, one shows where a step's time goes.
        config = self._config
        is_traced = config.processes is None or hosts.process() in config.processes
        first = config.first_step if is_traced else None
        self._steps = range(0) if first is None else range(first, first + config.num_steps)
        self._first: int | None = None

    def on_start(self, context: StepContext) -> None:
        """Reports a configuration that traces none of the run's remaining steps."""
        self._say = context.progress.say
        # After a rollback the traced steps may run again.
        self._reset()
        self.check_steps(context.step, context.config.train.num_steps)

    def on_step_begin(self, context: StepContext) -> None:
        """Starts the trace at its first step."""
        self.start(context.step)

    def on_step_end(self, context: StepContext) -> None:
        """Ends the trace after its last step, which has been logged: its line has the step's own time."""
        if self.stop(context.step, context.metrics):
            # Writing a trace takes seconds that are no step's.
            context.clock.restart(context.step)

    def on_end(self, context: StepContext, error: BaseException | None) -> None:
        """Writes an unfinished trace."""
        self.close()

    def check_steps(self, first_step: int, num_steps: int) -> None:
        """Reports if none of the remaining steps is traced.

        Args:
          first_step: number of completed steps.
          num_steps: number of steps of the run.
        """
        if self._steps and (self._steps[-1] <= first_step or self._steps[0] > num_steps):
            self._say(
                f"profile.first_step is {self._steps[0]}, and the steps to be made are {first_step + 1} to "
                f"{num_steps}: nothing is traced"
            )

    def start(self, step: int) -> None:
        """Starts the trace if `step` is one of its steps; a resumed run traces the remaining ones."""
        if step not in self._steps or self._first is not None:
            return
        try:
            # Both formats: TensorBoard's has the scopes of operations, Perfetto needs no installation.
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        except (RuntimeError, OSError) as error:  # a process has one profiler, which may be in use
            self._say(f"no trace: the profiler does not start: {error}")
            self._steps = range(0)  # or each step would try and report it again
            return
        self._first = step

    def stop(self, step: int, results: Any) -> bool:
        """Ends the trace after its last step, when the results of the step are complete.

        Returns:
          Whether a trace was written now.
        """
        if self._first is None or step + 1 in self._steps:
            return False
        # Otherwise the trace would end while its steps wait in the device's queue.
        jax.block_until_ready(results)
        self._write(f"of steps {self._first} to {step}")
        return True

    def close(self) -> None:
        """Writes a trace whose last step did not come."""
        if self._first is not None:
            self._write("the run ended")

    def _write(self, what: str) -> None:
        try:
            jax.profiler.stop_trace()
            self._say(f"trace {what} in {self._folder}")
        except (RuntimeError, OSError) as error:
            self._say(f"no trace: it cannot be written: {error}")
        self._first = None
