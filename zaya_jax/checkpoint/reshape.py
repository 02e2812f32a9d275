"""A checkpoint in another form, in a run folder of its own: fewer items, another type of weights.

Nothing depends on the number of processes or devices here: arrays are stored whole, in chunks, and whoever
reads them takes the parts that its devices own.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np

from zaya_jax import durable
from zaya_jax.checkpoint.about import read_about, write_about
from zaya_jax.checkpoint.layout import WEIGHTS, step_folder
from zaya_jax.checkpoint.manifest import commit, damage_of, sync_and_describe
from zaya_jax.checkpoint.newest import SavedStep
from zaya_jax.checkpoint.plain_weights import PlainArray, chunk_name, metadata_files
from zaya_jax.checkpoint.restore import read_config
from zaya_jax.checkpoint.steps import has_training
from zaya_jax.checkpoint.stored_arrays import StoredArrays
from zaya_jax.config import CONFIG_FILE, lies_in

ROUTER_BIAS = "router_bias."
"""How names of balancing biases begin, which are never rounded ([ZAYA1-8B] II-A-2)."""


def reshape(
    saved: SavedStep,
    folder: pathlib.Path,
    *,
    dtype: np.dtype | None,
    weights_only: bool,
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a checkpoint that was found whole as the only one of another run folder, all of it or nothing.

    Args:
      saved: the checkpoint.
      folder: of the run to be; it may not be there, or must be empty.
      dtype: that weights are rounded to, the nearest value and of two the even one; None as they are.
        Balancing biases stay in float32.
      weights_only: leaves out what a run needs to go on; inference and `train.init_from` do not.
      extra: further files of the run folder, by name.

    Raises:
      ValueError: if the folder cannot be taken, or a run is to go on from weights that were rounded.
    """
    _check_vacant(saved, folder)
    config = dataclasses.replace(read_config(saved.run_folder), run_folder=str(folder))
    if not weights_only:
        _check_whole_run(saved, dtype)
    with durable.folder_aside(folder) as aside:
        durable.write(aside / CONFIG_FILE, config.to_text())
        for name, content in (extra or {}).items():
            durable.write(aside / name, content)
        if weights_only:
            _write_weights(saved, aside, dtype)
        else:
            shutil.copytree(step_folder(saved.run_folder, saved.step), step_folder(aside, saved.step))
        damage = damage_of(aside, saved.step)
        if damage is not None:
            raise durable.Damaged(f"{folder} was not written: {damage}")


def _check_vacant(saved: SavedStep, folder: pathlib.Path) -> None:
    if lies_in(folder, saved.run_folder):
        raise ValueError(f"{folder} is {saved.run_folder} or inside it; choose another folder")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; it must be an empty folder or not exist yet")


def _check_whole_run(saved: SavedStep, dtype: np.dtype | None) -> None:
    if not has_training(saved.run_folder, saved.step):
        raise ValueError(f"step {saved.step} of {saved.run_folder} has weights only; give --weights-only")
    if dtype is not None and dtype != np.float32:
        raise ValueError(
            f"a run cannot go on from weights in {dtype.name}: what it learned since is in the bits that are "
            "cut off; give --weights-only"
        )


def _write_weights(saved: SavedStep, run_folder: pathlib.Path, dtype: np.dtype | None) -> None:
    """Chunk by chunk, as they lie in the checkpoint: one is in memory, as it is and as it becomes."""
    stored = StoredArrays(saved, WEIGHTS)
    arrays = [_plain(stored, name, dtype) for name in stored.shapes]
    for name, content in metadata_files(saved.step, arrays).items():
        path = run_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for array in arrays:
        for part in stored.parts(array.name):
            values = stored.read(array.name, part).astype(array.dtype)
            start = tuple(each.start for each in part)
            # Orbax reads files of one size: the last ones of an axis are padded.
            content = _padded(values, array.chunk).tobytes()
            (run_folder / chunk_name(saved.step, array, start)).write_bytes(content)
    about, folder = read_about(saved.run_folder, saved.step), step_folder(run_folder, saved.step)
    if about is not None:
        write_about(folder, about)
    commit(folder, saved.step, sync_and_describe(folder, durable.list_files(folder)))


def _plain(stored: StoredArrays, name: str, dtype: np.dtype | None) -> PlainArray:
    kept = stored.dtype(name) if dtype is None or name.startswith(ROUTER_BIAS) else dtype
    return PlainArray(name, stored.shapes[name], stored.chunk(name), kept)


def _padded(values: np.ndarray, chunk: tuple[int, ...]) -> np.ndarray:
    missing = [(0, size - found) for size, found in zip(chunk, values.shape, strict=True)]
    return np.pad(values, missing) if any(size for _, size in missing) else values
