"""Selection of the newest intact checkpoint of a run; damaged ones are skipped with a warning."""

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Iterable

from zaya_jax.checkpoint.format.layout import DAMAGED, EMA, WeightsKind, all_steps, step_folder
from zaya_jax.checkpoint.format.manifest import Part, all_files, average_files, damage_of, weight_files
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.files import durable
from zaya_jax.run_folder.names import CHECKPOINTS_FOLDER

Verify = Callable[[str | pathlib.Path, int, Part], str | None]
"""Verifies a part of a step of a run folder: the first damage as a message, or None; such as `damage_of`."""


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A checkpoint that has been verified.

    Attributes:
      run_folder: folder of the run.
      step: step of the checkpoint.
    """

    run_folder: str
    step: int


def newest_step(
    run_folder: str | pathlib.Path,
    *,
    until: int | None = None,
    after: int | None = None,
    weights_only: bool = False,
    weights: WeightsKind = "raw",
    verify: Verify = damage_of,
) -> int | None:
    """The newest step whose files are intact; None if there are no checkpoints.

    Reads all bytes of the step to verify them. Logs a warning for each newer step that is damaged.

    Args:
      run_folder: folder of the run.
      until: last step to consider; None considers all.
      after: a step that the run can continue from without a checkpoint; only later ones are considered, and
        none of them need be intact. None for a run that needs one.
      weights_only: whether to verify only the files that inference needs.
      weights: which weights inference needs.
      verify: function that verifies a step; that of `verified_together` shares the work between processes.

    Raises:
      DamagedError: if there are checkpoints but none is intact.
    """
    # Inference does not depend on the training item, so its damage is not an error there.
    of_weights = average_files if weights == EMA else weight_files
    part = of_weights if weights_only else all_files
    damaged: dict[int, str] = {}
    steps = [step for step in all_steps(run_folder) if until is None or step <= until]
    steps = [step for step in steps if after is None or step > after]
    for step in reversed(steps):
        damage = verify(run_folder, step, part)
        if damage is None:
            # Warn only if an older step is used; without one, the error below names all of them.
            for newer, cause in damaged.items():
                logging.getLogger(__name__).warning(
                    "%s is damaged (%s); using step %s", step_folder(run_folder, newer), cause, step
                )
            return step
        damaged[step] = damage
    if not damaged or after is not None:
        return None
    which = "no checkpoint" if until is None else f"no checkpoint of step {until} or before"
    messages = (f"{step_folder(run_folder, step)} is damaged: {cause}" for step, cause in damaged.items())
    raise DamagedError(f"{'; '.join(messages)}; {which} is intact: restore one from a backup")


def require_step(
    run_folder: str | pathlib.Path,
    *,
    weights_only: bool = False,
    weights: WeightsKind = "raw",
    verify: Verify = damage_of,
) -> int:
    """The newest intact step of a run that must have one.

    Args:
      run_folder: folder of the run.
      weights_only: whether to verify only the files that inference needs.
      weights: which weights inference needs.
      verify: see `newest_step`.

    Raises:
      UserError: if there is no checkpoint, or the newest one has no average and `weights` is "ema".
      DamagedError: if there are checkpoints but none is intact.
    """
    step = newest_step(run_folder, weights_only=weights_only, weights=weights, verify=verify)
    if step is None:
        raise UserError(f"{run_folder} has no checkpoint yet; train it until it has saved one")
    # Not an older step that has one: its weights would not be those that the user expects.
    if weights == EMA:
        require_average(run_folder, step)
    return step


def require_average(run_folder: str | pathlib.Path, step: int) -> None:
    """Checks that a checkpoint contains an average of the weights.

    Raises:
      UserError: if it has none.
    """
    if not (step_folder(run_folder, step) / EMA).exists():
        raise UserError(
            f"step {step} of {run_folder} has no average of the weights; remove --weights=ema, or train with "
            "--config.ema.decay=0.999"
        )


def require_whole(run_folder: str | pathlib.Path, step: int | None = None) -> SavedStep:
    """Verifies the checkpoint of a step, or finds the newest intact one.

    Raises:
      UserError: if it does not exist.
      DamagedError: if it is damaged.
    """
    if step is None:
        return SavedStep(str(run_folder), require_step(run_folder))
    require_present(run_folder, [step])
    damage = damage_of(run_folder, step)
    if damage is not None:
        raise DamagedError(f"{step_folder(run_folder, step)} is damaged: {damage}")
    return SavedStep(str(run_folder), step)


def require_present(run_folder: str | pathlib.Path, steps: Iterable[int]) -> None:
    """Checks that a run has checkpoints of the given steps, intact or not.

    Raises:
      UserError: if one is missing; the message lists the existing ones.
    """
    existing = all_steps(run_folder)
    # A run without any checkpoint needs a different fix than a wrong step.
    if not existing:
        raise UserError(f"{run_folder} has no checkpoint yet; train it until it has saved one")
    for step in steps:
        if step not in existing:
            raise UserError(
                f"{run_folder} has no checkpoint of step {step}; it has {', '.join(map(str, existing))}"
            )


def steps_set_aside(run_folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Folders of damaged steps that were renamed by `set_aside_later`."""
    return sorted((pathlib.Path(run_folder) / CHECKPOINTS_FOLDER).glob(f"*{DAMAGED}*"))


def set_aside_later(run_folder: str | pathlib.Path, step: int) -> list[int]:
    """Renames the damaged checkpoints after a step, so that the run can write those steps again.

    Returns:
      The steps that were renamed.
    """
    # Callers pass the newest intact step, so all later ones are damaged.
    damaged = [later for later in all_steps(run_folder) if later > step]
    for later in damaged:
        durable.set_aside(step_folder(run_folder, later), DAMAGED)
    return damaged
