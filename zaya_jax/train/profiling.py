"""The profiler's look at some steps of a run: a trace in the run folder, with our scopes' names in it."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from zaya_jax.config import ProfileConfig
from zaya_jax.parallel import hosts

PROFILE_FOLDER = "profile"
"""In a run folder, as TensorBoard's plugin looks for it: below it lies a folder for each trace."""
STEP_NAME = "train"


class Profiler:
    """Traces the steps that a config asks for, in the processes that it asks for.

    Args:
      config: says which.
      run_folder: of the run.
      say: tells where a trace lies, or why there is none.
    """

    def __init__(self, config: ProfileConfig, run_folder: str, say: Callable[[str], None]):
        self._folder = pathlib.Path(run_folder) / PROFILE_FOLDER
        self._say = say
        # A trace is tens of megabytes: of a thousand processes one is enough to see where a step's time goes.
        is_ours = config.processes is None or hosts.process() in config.processes
        first = config.first_step if is_ours else None
        self._steps = range(0) if first is None else range(first, first + config.num_steps)
        self._begun: int | None = None

    def begin(self, first_step: int, num_steps: int) -> None:
        """Says that nothing will be traced, where of all steps to be made none is asked for.

        Args:
          first_step: steps already done.
          num_steps: of the run.
        """
        if self._steps and (self._steps[-1] <= first_step or self._steps[0] > num_steps):
            self._say(
                f"profile.first_step is {self._steps[0]}, and the steps to be made are {first_step + 1} to "
                f"{num_steps}: nothing is traced"
            )

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._begun is not None:
            self._end("the run ended")

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Around the call of a step, which may be the first that is traced; the trace has its number."""
        # From the first one on: a run that goes on behind it traces those that are left.
        if step in self._steps and self._begun is None:
            self._begin(step)
        return jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=step)

    def made(self, step: int, results: Any) -> bool:
        """A step was called; behind the last one that is traced its results are waited for.

        Returns:
          Whether a trace was written now, which takes seconds that are no step's.
        """
        if self._begun is None or step + 1 in self._steps:
            return False
        # Without it the trace would end while its steps wait in the device's queue.
        jax.block_until_ready(results)
        self._end(f"of steps {self._begun} to {step}")
        return True

    def _begin(self, step: int) -> None:
        try:
            # Both forms: TensorBoard's knows the scopes of operations, Perfetto needs nothing installed.
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        except (RuntimeError, OSError) as error:  # a process has one profiler, which another may hold
            self._say(f"no trace, for the profiler does not begin: {error}")
            self._steps = range(0)  # or each step would try again, and say so
            return
        self._begun = step

    def _end(self, what: str) -> None:
        try:
            jax.profiler.stop_trace()
            self._say(f"trace {what} in {self._folder}")
        except (RuntimeError, OSError) as error:
            self._say(f"no trace, for it cannot be written: {error}")
        self._begun = None
