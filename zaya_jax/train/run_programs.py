"""The programs of a run, each made once: what repeats steps and what goes on from them run the same ones."""

from zaya_jax.config import StepRange
from zaya_jax.train.opening import OpenRun
from zaya_jax.train.programs import Programs, make_programs
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

    def _make(self, step_range: StepRange) -> Programs:
        run, config = self._run, step_range.phase.config
        setup, mesh = run.setup(config), run.mesh_of(config)
        state = abstract_state(run.config, setup, mesh)
        return make_programs(state, setup=setup, mesh=mesh, num_microbatches=step_range.num_microbatches)
