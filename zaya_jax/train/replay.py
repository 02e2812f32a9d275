"""Replay check: repeats recorded steps before a run is resumed with another jax, driver or cluster.

Such a change may silently compute something else. A replay starts from an older checkpoint and compares the
losses of the steps after it with the recorded ones. It changes nothing in the run folder.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping

from zaya_jax.checkpoint import SavedStep, Verify, all_steps, damage_of, newest_step, verified_together
from zaya_jax.data.reading.positions import mixture_positions
from zaya_jax.errors import UserError
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import METRICS_FILE
from zaya_jax.train.compiled_programs import RunPrograms
from zaya_jax.train.consistency.config_changes import read_changes
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.starting_state import restored_state
from zaya_jax.train.step.integrity import place_batch

MAX_RELATIVE_DIFFERENCE = 1e-3
"""Maximum relative difference of a repeated loss. The same jax on the same devices returns the same bits.
Others sum in another order: bfloat16 rounds a product by up to 2^-9 (0.2%) in either direction, of which a
mean over thousands of targets keeps a small part. Errors such as other data, a lost part of a gradient or
other weights change a loss by percents."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """Steps to repeat.

    Attributes:
      start: checkpoint to start from.
      num_steps: number of steps to repeat.
      losses: recorded losses by step; not every step has one.
    """

    start: SavedStep
    num_steps: int
    losses: Mapping[int, float]

    @property
    def end(self) -> int:
        """Number of the last step that the replay repeats."""
        return self.start.step + self.num_steps

    def __str__(self) -> str:
        return f"steps {self.start.step + 1} to {self.end}"


def find_shared_replay(run_folder: str, num_steps: int) -> Replay:
    """`find_replay` by one process for all, each of which reads a share of the checkpoint.

    Raises:
      UserError: as `find_replay`.
    """
    found = verified_together("replay", lambda verify: find_replay(run_folder, num_steps, verify=verify))
    # As a list, because JSON has no numbers as keys.
    values = None if found is None else [found.start.step, list(found.losses.items())]
    step, losses = hosts.broadcast_from_first("replay", values)
    return Replay(SavedStep(run_folder, step), num_steps, dict(losses))


def find_replay(run_folder: str, num_steps: int, *, verify: Verify = damage_of) -> Replay:
    """Finds the newest checkpoint that has enough recorded steps after it, before a resume removes any.

    Args:
      run_folder: folder of the run.
      num_steps: number of steps to repeat.
      verify: see `newest_step`.

    Raises:
      UserError: if there is no such checkpoint.
    """
    if num_steps < 1:
        raise UserError(f"--replay-check is {num_steps}; it must be above 0")
    # A new run has recorded nothing that could be compared.
    steps = all_steps(run_folder)
    if not steps:
        raise UserError(
            f"{run_folder} has no checkpoint, and --replay-check repeats steps after one; remove the "
            "option for a new run"
        )
    losses = _recorded_losses(run_folder)
    changed = max((each.step for each in read_changes(run_folder) if each.has_left_its_course), default=0)
    last = max(losses, default=0)
    # The newest checkpoint that has enough recorded steps after it: every byte of it is read, and the latest
    # steps are the ones to compare.
    start = newest_step(run_folder, until=last - num_steps, verify=verify)
    if start is not None and start < changed:
        raise UserError(
            f"--replay-check={num_steps}: the config of {run_folder} has changed at step {changed}, and "
            f"earlier steps cannot be repeated; {max(last - changed, 0)} steps after it are recorded"
        )
    if start is None:
        raise UserError(
            f"--replay-check={num_steps}: the oldest checkpoint of {run_folder} is of step {steps[0]} and "
            f"the last recorded loss of step {last}, so that at most {max(last - steps[0], 0)} steps can be "
            "repeated; a larger train.keep_checkpoints leaves more"
        )
    compared = {step: loss for step, loss in losses.items() if start < step <= start + num_steps}
    # With a large train.log_every no recorded step may be among them.
    if not compared:
        first = min(step for step in losses if step > start)
        raise UserError(
            f"--replay-check={num_steps}: of the steps after checkpoint {start} of {run_folder}, {first} is "
            f"the first with a recorded loss; use at least --replay-check={first - start}"
        )
    return Replay(SavedStep(run_folder, start), num_steps, compared)


def replay(run: PreparedRun, planned: Replay, programs: RunPrograms) -> None:
    """Repeats steps on the run's devices, and compares their losses with the recorded ones.

    Raises:
      UserError: at the first loss that differs.
    """
    print(f"replaying {planned} from checkpoint {planned.start.step} of {planned.start.run_folder}")
    largest = 0.0
    # One by one: a wrong first step is reported before the last one has run.
    for step, repeated in _repeat(run, planned, programs):
        recorded = planned.losses[step]
        difference = relative_difference(recorded, repeated)
        if difference > MAX_RELATIVE_DIFFERENCE:
            raise hosts.collective_error(
                f"step {step} has a loss of {repeated:.9g} when it is repeated from checkpoint "
                f"{planned.start.step} of {planned.start.run_folder}, and {recorded:.9g} is recorded: they "
                f"differ by {difference:.2g}, and rounding by no more than {MAX_RELATIVE_DIFFERENCE:g}; "
                "this jax, these devices or the data have changed, and nothing has been trained"
            )
        largest = max(largest, difference)
    compared = f"differ by {largest:.1e} at most" if largest else "equal"
    print(f"replayed {planned}, {len(planned.losses)} of them recorded: losses {compared}")


def _recorded_losses(run_folder: str) -> dict[int, float]:
    if not (pathlib.Path(run_folder) / METRICS_FILE).is_file():
        return {}
    return {row["step"]: row["loss"] for row in read_metrics(run_folder, "train")}


def _repeat(run: PreparedRun, planned: Replay, programs: RunPrograms) -> Iterator[tuple[int, float]]:
    """Yields each step that has a recorded loss, and its repeated loss."""
    state = restored_state(run, planned.start)
    for step_range, reading in mixture_positions(run.config, run.num_tokens, first_step=planned.start.step):
        mesh = run.mesh_of(step_range.phase.config)
        batches = run.read_batches(step_range, reading, num_steps=planned.end - step_range.first_step)
        for step, batch in enumerate(batches, start=step_range.first_step + 1):
            # Without evaluations and checkpoints, which do not change the state.
            state, metrics = programs.of(run.config, step_range).step(state, place_batch(batch, mesh))
            if step in planned.losses:
                yield step, float(metrics.loss)
        if step_range.end >= planned.end:
            return


def relative_difference(recorded: float, repeated: float) -> float:
    """Returns the relative difference; 0 for two NaNs, because a skipped step is skipped again."""
    if recorded == repeated or (math.isnan(recorded) and math.isnan(repeated)):
        return 0.0
    difference = abs(repeated - recorded) / abs(recorded) if recorded else math.inf
    return math.inf if math.isnan(difference) else difference
