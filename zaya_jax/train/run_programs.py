"""The programs of a run, each made once: what repeats steps and what goes on from them run the same ones."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from zaya_jax.config import StepRange
from zaya_jax.data.reading import readings
from zaya_jax.parallel.mesh import of_batch
from zaya_jax.pytree import abstract
from zaya_jax.train.opening import OpenRun
from zaya_jax.train.programs import Programs, abstract_batch, make_programs
from zaya_jax.train.state import abstract_state


class RunPrograms:
    """Gives ranges of steps their programs."""

    def __init__(self, run: OpenRun):
        self._run = run
        self._made: dict[tuple[int, int], Programs] = {}

    def of(self, step_range: StepRange) -> Programs:
        """The programs of a range; another batch size is another shape, for which jax compiles anew."""
        # Not by the phase itself, which has dicts and lists of its config and no hash.
        key = step_range.phase.first_step, step_range.num_microbatches
        if key not in self._made:
            self._made[key] = self._make(step_range)
        return self._made[key]

    @contextlib.contextmanager
    def made_meanwhile(self, first_step: int) -> Iterator[None]:
        """Compiles the step that a run will need first, in a thread: a restore waits for its disk.

        Args:
          first_step: steps that are done.
        """
        ranges = readings(self._run.config, self._run.num_tokens, first_step=first_step)
        first = next((step_range for step_range, _ in ranges), None)
        if first is None:  # all steps are done
            yield
            return
        thread = threading.Thread(target=self._compile, args=(first,), name="compile", daemon=True)
        thread.start()
        try:
            yield
        finally:
            # Also behind an error: a process that ends while it compiles is aborted, and its code says that.
            thread.join()

    def _compile(self, step_range: StepRange) -> None:
        run, config = self._run, step_range.phase.config
        mesh = run.mesh_of(config)
        state = abstract_state(run.config, run.setup(config), mesh)
        rows = abstract(abstract_batch(config, step_range.batch_size), of_batch(mesh))
        program: Any = self.of(step_range).step
        # What fails here fails again where the step is made, which says so. jax keeps what was compiled.
        with contextlib.suppress(Exception):
            program.lower(state, rows).compile()

    def _make(self, step_range: StepRange) -> Programs:
        run, config = self._run, step_range.phase.config
        setup, mesh = run.setup(config), run.mesh_of(config)
        state = abstract_state(run.config, setup, mesh)
        return make_programs(state, setup=setup, mesh=mesh, num_microbatches=step_range.num_microbatches)
