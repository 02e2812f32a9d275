"""The newest checkpoint of a run that is whole: a damaged one is passed over aloud, never in silence."""

import dataclasses
import logging
import pathlib
from collections.abc import Iterable

from zaya_jax import durable
from zaya_jax.checkpoint.layout import DAMAGED, FOLDER, all_steps, step_folder
from zaya_jax.checkpoint.manifest import damage_of


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A checkpoint that was found whole."""

    run_folder: str
    step: int


def newest_step(run_folder: str | pathlib.Path, *, until: int | None = None) -> int | None:
    """The newest step whose files are all as they were written; None when there is no checkpoint.

    All of its bytes are read. Newer ones that are damaged are told of in the log, which without settings of
    its own is the standard error.

    Args:
      run_folder: of the run.
      until: later steps are left alone; None for none.

    Raises:
      Damaged: if there are checkpoints, and none is whole.
    """
    damaged: dict[int, str] = {}
    steps = [step for step in all_steps(run_folder) if until is None or step <= until]
    for step in reversed(steps):
        damage = damage_of(run_folder, step)
        if damage is None:
            for each, cause in damaged.items():
                logging.getLogger(__name__).warning(
                    "%s is damaged (%s); going on from step %s", step_folder(run_folder, each), cause, step
                )
            return step
        damaged[step] = damage
    if not damaged:
        return None
    which = "no checkpoint" if until is None else f"no checkpoint of step {until} or before"
    found = (f"{step_folder(run_folder, step)} is damaged: {damage}" for step, damage in damaged.items())
    raise durable.Damaged(f"{'; '.join(found)}; {which} is whole: restore one from a copy")


def require_step(run_folder: str | pathlib.Path) -> int:
    """`newest_step`, where there must be one.

    Raises:
      ValueError: if there is none.
      Damaged: if there are, and none is whole.
    """
    step = newest_step(run_folder)
    if step is None:
        raise ValueError(f"{run_folder} has no checkpoint yet; it must have trained to its first one")
    return step


def require_whole(run_folder: str | pathlib.Path, step: int | None = None) -> SavedStep:
    """A checkpoint by its step, or the newest, when all of its files are as they were written.

    Raises:
      ValueError: if it is not there.
      Damaged: if it is not as it was written.
    """
    if step is None:
        return SavedStep(str(run_folder), require_step(run_folder))
    require_present(run_folder, [step])
    damage = damage_of(run_folder, step)
    if damage is not None:
        raise durable.Damaged(f"{step_folder(run_folder, step)} is damaged: {damage}")
    return SavedStep(str(run_folder), step)


def require_present(run_folder: str | pathlib.Path, steps: Iterable[int]) -> None:
    """Checks that a run has checkpoints of some steps, whole or not.

    Raises:
      ValueError: naming those that it has.
    """
    found = all_steps(run_folder)
    if not found:
        raise ValueError(f"{run_folder} has no checkpoint yet; it must have trained to its first one")
    for step in steps:
        if step not in found:
            raise ValueError(
                f"{run_folder} has no checkpoint of step {step}; it has {', '.join(map(str, found))}"
            )


def steps_set_aside(run_folder: str | pathlib.Path) -> list[pathlib.Path]:
    """The folders of steps that a run found damaged and gave other names."""
    return sorted((pathlib.Path(run_folder) / FOLDER).glob(f"*{DAMAGED}*"))


def set_aside_later(run_folder: str | pathlib.Path, step: int) -> list[int]:
    """Gives what is damaged behind the newest whole step other names: a run writes those steps anew.

    Returns:
      Of which steps that was.
    """
    damaged = [later for later in all_steps(run_folder) if later > step]
    for later in damaged:
        durable.set_aside(step_folder(run_folder, later), DAMAGED)
    return damaged
