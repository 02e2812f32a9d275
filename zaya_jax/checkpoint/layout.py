"""Names of what a run's checkpoints are made of, and which steps are there."""

import pathlib

FOLDER = "checkpoints"
WEIGHTS = "weights"
TRAINING = "training"
METADATA = "_METADATA"
"""In each item that is whole: Orbax writes it last."""
STEP_METADATA = "_CHECKPOINT_METADATA"
UNFINISHED = ".orbax-checkpoint-tmp"
"""Orbax appends it to the name of a step while it is written."""


def step_folder(run_folder: str | pathlib.Path, step: int) -> pathlib.Path:
    """Where a step's checkpoint lies when it is whole."""
    return pathlib.Path(run_folder) / FOLDER / str(step)


def all_steps(run_folder: str | pathlib.Path) -> list[int]:
    """The steps of a run's checkpoints; what Orbax has not finished bears another name."""
    folder = pathlib.Path(run_folder) / FOLDER
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdecimal() and path.is_dir())


def newest_step(run_folder: str | pathlib.Path) -> int | None:
    """The step of the newest checkpoint; None when there is none.

    An older one is never taken in place of one that lost a part: whoever asks for the newest weights
    would not know that they are not.

    Raises:
      ValueError: if its weights are not whole.
    """
    steps = all_steps(run_folder)
    if not steps:
        return None
    require_item(run_folder, steps[-1], WEIGHTS)
    return steps[-1]


def require_step(run_folder: str | pathlib.Path) -> int:
    """The step of the newest checkpoint.

    Raises:
      ValueError: if there is none, or its weights are not whole.
    """
    step = newest_step(run_folder)
    if step is None:
        raise ValueError(f"{run_folder} has no checkpoint yet; it must have trained to its first one")
    return step


def require_item(run_folder: str | pathlib.Path, step: int, item: str) -> None:
    """Checks that an item of a checkpoint is whole, as far as names tell.

    Raises:
      ValueError: if it is not.
    """
    if not (step_folder(run_folder, step) / item / METADATA).is_file():
        raise ValueError(damaged(run_folder, step, f"it has no {item}/{METADATA}"))


def damaged(run_folder: str | pathlib.Path, step: int, cause: str) -> str:
    """A sentence on what is wrong with a checkpoint, and what can be done about it."""
    older = [known for known in all_steps(run_folder) if known < step]
    way_out = f"or remove it to take step {older[-1]}" if older else "there is no older one"
    return f"{step_folder(run_folder, step)} is damaged: {cause}; restore it from a copy, {way_out}"
