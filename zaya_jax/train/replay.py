"""Recorded steps once more, before a run goes on with another jax, driver or cluster than it began with.

Such a change may compute something else without any error. A run has the means to find out: an older
checkpoint, and the losses of the steps behind it. Nothing of the run folder is changed.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping

from zaya_jax.checkpoint import SavedStep, all_steps, newest_step
from zaya_jax.data.reading import readings
from zaya_jax.parallel import hosts
from zaya_jax.parallel.mesh import place_rows
from zaya_jax.train.batches import batches_of
from zaya_jax.train.changes import read_changes
from zaya_jax.train.metrics import METRICS_FILE, read_metrics
from zaya_jax.train.opening import OpenRun
from zaya_jax.train.run_programs import RunPrograms
from zaya_jax.train.starting import restored_state

LARGEST_DIFFERENCE = 1e-3
"""Of a repeated loss to the recorded one, relative. The same jax on as many of the same devices gives the
same bits. Others sum in another order: bfloat16 rounds a product by up to 2^-9, 0.2%, up or down by chance,
of which a mean over thousands of targets keeps a small part. What is wrong, such as other data, a lost share
of a gradient or other weights, moves a loss by percents."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """Steps that are to be repeated.

    Attributes:
      start: the checkpoint before them.
      num_steps: how many they are.
      losses: the recorded ones, by step; not every step has one.
    """

    start: SavedStep
    num_steps: int
    losses: Mapping[int, float]

    @property
    def end(self) -> int:
        """The last of the steps."""
        return self.start.step + self.num_steps

    def __str__(self) -> str:
        return f"steps {self.start.step + 1} to {self.end}"


def find_replay(run_folder: str, num_steps: int) -> Replay:
    """Finds the newest checkpoint with so many recorded steps behind it, before a resumed run forgets any.

    Raises:
      ValueError: if there is none.
    """
    if num_steps < 1:
        raise ValueError(f"--replay-check is {num_steps}; it must be above 0")
    steps = all_steps(run_folder)
    if not steps:
        raise ValueError(
            f"{run_folder} has no checkpoint, and --replay-check repeats steps behind one; a run that begins "
            "goes without"
        )
    losses = _recorded_losses(run_folder)
    changed = max((each.step for each in read_changes(run_folder) if each.has_left_its_course), default=0)
    last = max(losses, default=0)
    # Not the newest of all, behind which little is recorded, but no older than it must be: all its bytes are
    # read, and what the run does now is what is to be compared.
    start = newest_step(run_folder, until=last - num_steps)
    if start is not None and start < changed:
        raise ValueError(
            f"--replay-check={num_steps}: {run_folder} goes on otherwise since step {changed}, and steps "
            f"before that cannot be repeated; of those behind it {max(last - changed, 0)} are recorded"
        )
    if start is None:
        raise ValueError(
            f"--replay-check={num_steps}: the oldest checkpoint of {run_folder} is of step {steps[0]} and "
            f"the last recorded loss of step {last}, so that at most {max(last - steps[0], 0)} steps can be "
            "repeated; a larger train.keep_checkpoints leaves more"
        )
    compared = {step: loss for step, loss in losses.items() if start < step <= start + num_steps}
    if not compared:
        first = min(step for step in losses if step > start)
        raise ValueError(
            f"--replay-check={num_steps}: of the steps behind checkpoint {start} of {run_folder}, {first} is "
            f"the first whose loss is recorded; give at least --replay-check={first - start}"
        )
    return Replay(SavedStep(run_folder, start), num_steps, compared)


def replay(run: OpenRun, planned: Replay, programs: RunPrograms) -> None:
    """Repeats steps on the run's devices, and says how their losses compare with the recorded ones.

    Raises:
      ValueError: at the first loss that is another.
    """
    print(f"replaying {planned} from checkpoint {planned.start.step} of {planned.start.run_folder}")
    largest = 0.0
    # One by one: who waits for a cluster is to know of a wrong first step before the last one is made.
    for step, found in _repeat(run, planned, programs):
        recorded = planned.losses[step]
        difference = _difference(recorded, found)
        if difference > LARGEST_DIFFERENCE:
            raise hosts.shared(
                f"step {step} has a loss of {found:.9g} when it is repeated from checkpoint "
                f"{planned.start.step} of {planned.start.run_folder}, and {recorded:.9g} is recorded: they "
                f"differ by {difference:.2g}, and rounding by no more than {LARGEST_DIFFERENCE:g}; something "
                "of this jax, these devices or the data is not what it was, and nothing has been trained"
            )
        largest = max(largest, difference)
    compared = f"differ by {largest:.1e} at most" if largest else "equal"
    print(f"replayed {planned}, {len(planned.losses)} of them recorded: losses {compared}")


def _recorded_losses(run_folder: str) -> dict[int, float]:
    if not (pathlib.Path(run_folder) / METRICS_FILE).is_file():
        return {}
    return {row["step"]: row["loss"] for row in read_metrics(run_folder, "train")}


def _repeat(run: OpenRun, planned: Replay, programs: RunPrograms) -> Iterator[tuple[int, float]]:
    """Each step that has a recorded loss, with the loss that it has now."""
    state = restored_state(run, planned.start)
    for step_range, reading in readings(run.config, run.num_tokens, first_step=planned.start.step):
        mesh = run.mesh_of(step_range.phase.config)
        batches = batches_of(run, step_range, reading, num_steps=planned.end - step_range.first_step)
        for step, batch in enumerate(batches, start=step_range.first_step + 1):
            # Evaluations and checkpoints are left out: neither moves a state.
            state, metrics = programs.of(step_range).step(state, place_rows(batch, mesh))
            if step in planned.losses:
                yield step, float(metrics.loss)
        if step_range.end >= planned.end:
            return


def _difference(recorded: float, found: float) -> float:
    """Relative; none between two NaNs, for a step that was skipped is one that is skipped again."""
    if recorded == found or (math.isnan(recorded) and math.isnan(found)):
        return 0.0
    difference = abs(found - recorded) / abs(recorded) if recorded else math.inf
    return math.inf if math.isnan(difference) else difference
