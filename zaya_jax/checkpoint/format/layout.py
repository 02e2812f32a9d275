"""Names of files and folders of checkpoints, and the steps that exist."""

import datetime
import json
import pathlib
from collections.abc import Iterable
from typing import Literal

from zaya_jax.run_folder.names import CHECKPOINTS_FOLDER

WEIGHTS = "weights"
TRAINING = "training"
EMA = "ema"
"""Item with the exponential moving average of the weights that train; absent in runs without one."""
NUM_UPDATES = "num_updates"
"""Array of an average that is no weight: the number of its updates."""
WeightsKind = Literal["raw", "ema"]
"""Which weights of a checkpoint to read: those that training continues with, or their average."""
METADATA = "_METADATA"
"""File in each item that lists its arrays; its format is Orbax's."""
STEP_METADATA = "_CHECKPOINT_METADATA"
"""File in each step that names the handlers of its items; its format is Orbax's."""
DESCRIPTION = "run.json"
"""File with the description of a step."""
MANIFEST = "manifest.json"
"""File with the sizes and hashes of all files of a step."""
COMMITTED = "committed"
"""File that is written last and contains the hash of the manifest."""
DAMAGED = ".damaged"
"""Suffix of the name of a step that was set aside because it is damaged."""
_LARGEST_STEP = 2**31 - 1
"""Steps are counted in int32."""
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


def step_metadata(items: Iterable[str]) -> bytes:
    """Content of `STEP_METADATA`: the Orbax handler of each item."""
    # Orbax reads the handler of each item from this file.
    return (json.dumps({"item_handlers": dict.fromkeys(items, _HANDLER)}, indent=1) + "\n").encode()


def step_folder(run_folder: str | pathlib.Path, step: int) -> pathlib.Path:
    """Folder of the committed checkpoint of a step."""
    return pathlib.Path(run_folder) / CHECKPOINTS_FOLDER / str(step)


def all_steps(run_folder: str | pathlib.Path) -> list[int]:
    """Committed steps of a run in ascending order. `damage_of` verifies them."""
    folder = pathlib.Path(run_folder) / CHECKPOINTS_FOLDER
    paths = folder.iterdir() if folder.is_dir() else ()
    # Temporary folders and steps that were set aside have other names.
    return sorted(int(path.name) for path in paths if _is_step(path.name) and path.is_dir())


def step_written(run_folder: str | pathlib.Path, step: int) -> datetime.datetime:
    """Time in UTC at which a step without a description was written: its folder's modification time."""
    modified = step_folder(run_folder, step).stat().st_mtime
    return datetime.datetime.fromtimestamp(modified, datetime.UTC)


def folder_bytes(folder: pathlib.Path) -> int:
    """Total size in bytes of all files in a folder and its subfolders."""
    # lstat, so that a link is not counted with the size of its target.
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _is_step(name: str) -> bool:
    # `isdecimal` alone accepts digits of other scripts, and a huge number would be slow to convert.
    if not (name.isascii() and name.isdecimal() and len(name) <= len(str(_LARGEST_STEP))):
        return False
    return str(int(name)) == name and int(name) <= _LARGEST_STEP
