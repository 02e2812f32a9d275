"""Names of what a run's checkpoints are made of, and which steps are there."""

import datetime
import json
import pathlib
from collections.abc import Iterable

FOLDER = "checkpoints"
WEIGHTS = "weights"
TRAINING = "training"
METADATA = "_METADATA"
"""Of each item: which arrays it has."""
STEP_METADATA = "_CHECKPOINT_METADATA"
ABOUT = "run.json"
"""What a step says of itself."""
MANIFEST = "manifest.json"
"""All files of a step with their sizes and hashes."""
COMMITTED = "committed"
"""Written last: holds the hash of the manifest."""
DAMAGED = ".damaged"
"""Ends the name of a step that a run has set aside."""
_LARGEST_STEP = 2**31 - 1
"""A run counts its steps in int32."""


_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


def step_metadata(items: Iterable[str]) -> bytes:
    """What Orbax wants to be told of a step: how its items are to be read."""
    return (json.dumps({"item_handlers": dict.fromkeys(items, _HANDLER)}, indent=1) + "\n").encode()


def step_folder(run_folder: str | pathlib.Path, step: int) -> pathlib.Path:
    """Where a step's checkpoint lies when it is committed."""
    return pathlib.Path(run_folder) / FOLDER / str(step)


def all_steps(run_folder: str | pathlib.Path) -> list[int]:
    """The steps that have a name among a run's checkpoints; whether they are whole, `damage_of` says."""
    folder = pathlib.Path(run_folder) / FOLDER
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if _is_step(path.name) and path.is_dir())


def step_written(run_folder: str | pathlib.Path, step: int) -> datetime.datetime:
    """When a step that does not say it itself was written, in UTC: as its folder has it."""
    changed = step_folder(run_folder, step).stat().st_mtime
    return datetime.datetime.fromtimestamp(changed, datetime.UTC)


def folder_bytes(folder: pathlib.Path) -> int:
    """Of all files in a folder, however deep."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _is_step(name: str) -> bool:
    if not (name.isascii() and name.isdecimal() and len(name) <= len(str(_LARGEST_STEP))):
        return False
    return str(int(name)) == name and int(name) <= _LARGEST_STEP
