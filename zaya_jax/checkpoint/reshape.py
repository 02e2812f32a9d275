"""Rewriting of a checkpoint into a new run folder, with fewer items, another type or an average of weights.

The number of processes or devices does not matter: arrays are stored whole, in chunks, and each reader reads
the parts that its devices own.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np

from zaya_jax.checkpoint.format.description import read_description, write_description
from zaya_jax.checkpoint.format.layout import EMA, WeightsKind, step_folder
from zaya_jax.checkpoint.format.manifest import commit, damage_of, sync_and_describe
from zaya_jax.checkpoint.format.plain_weights import PlainArray, chunk_name, metadata_files
from zaya_jax.checkpoint.newest import SavedStep, require_average
from zaya_jax.checkpoint.restore import read_config
from zaya_jax.checkpoint.steps import has_training
from zaya_jax.checkpoint.stored_weights import StoredWeights
from zaya_jax.config import CONFIG_FILE, Config, is_inside
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.files import durable
from zaya_jax.model.frozen_base import SCALES, VALUES

ROUTER_BIAS = "router_bias."
"""Prefix of the names of router biases, which are never rounded ([ZAYA1-8B] II-A-2)."""
QUANTIZED = (f".{VALUES}", f".{SCALES}")
"""Suffixes of the names of quantized experts, whose bits another type would change."""


def reshape(
    saved: SavedStep,
    folder: pathlib.Path,
    *,
    dtype: np.dtype | None,
    weights_only: bool,
    weights: WeightsKind = "raw",
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a verified checkpoint as the only one of a new run folder, atomically.

    Args:
      saved: the checkpoint.
      folder: new run folder; it must not exist or must be empty.
      dtype: type that weights are rounded to, to nearest even; None keeps their type. Router biases stay
        float32.
      weights_only: whether to omit the training item, which only a resuming run needs; inference and
        `train.init_from` do not.
      weights: the weights to write, "raw" or their average, "ema"; the latter requires `weights_only`.
      extra: content of further files of the run folder, by name.

    Raises:
      UserError: if the folder cannot be used, or weights would be rounded in a checkpoint that a run is to
        resume from.
    """
    check_vacant(saved, folder)
    # The new folder is a separate run: resuming it must not write to the old one.
    config = dataclasses.replace(read_config(saved.run_folder), run_folder=str(folder))
    if weights_only:
        origin = f"exponential moving average of step {saved.step}" if weights == EMA else ""
        stored = StoredWeights(saved.run_folder, weights, step=saved.step, interleaved=False)
        publish_weights(stored, saved, folder, config, dtype=dtype, origin=origin, extra=extra)
        return
    # Bitwise: a run that resumes from a copy equals one that resumes from the original.
    _check_whole_run(saved, dtype, weights)
    with durable.temporary_folder(folder) as aside:
        _write_files(aside, config, extra)
        shutil.copytree(step_folder(saved.run_folder, saved.step), step_folder(aside, saved.step))
        _verify(aside, saved.step, folder)


def publish_weights(
    stored: StoredWeights,
    saved: SavedStep,
    folder: pathlib.Path,
    config: Config,
    *,
    dtype: np.dtype | None,
    origin: str = "",
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Writes weights as the only checkpoint of a new run folder, atomically.

    Args:
      stored: the weights.
      saved: checkpoint whose step and description the new one has.
      folder: new run folder; it must not exist or must be empty.
      config: config of the new run.
      dtype: type that weights are rounded to; None keeps their type. Router biases stay float32.
      origin: `StepDescription.weights` of the new checkpoint; "" keeps that of `saved`.
      extra: content of further files of the run folder, by name.

    Raises:
      DamagedError: if the written files are not as they should be.
    """
    with durable.temporary_folder(folder) as aside:
        _write_files(aside, config, extra)
        _write_weights(stored, saved, aside, dtype, origin)
        _verify(aside, saved.step, folder)


def _write_files(folder: pathlib.Path, config: Config, extra: Mapping[str, bytes] | None) -> None:
    durable.write(folder / CONFIG_FILE, config.to_text())
    for name, content in (extra or {}).items():
        durable.write(folder / name, content)


def _verify(aside: pathlib.Path, step: int, folder: pathlib.Path) -> None:
    # Verify the result before it is published, because a disk may lose data silently.
    damage = damage_of(aside, step)
    if damage is not None:
        raise DamagedError(f"{folder} could not be written: {damage}")


def check_vacant(saved: SavedStep, folder: pathlib.Path) -> None:
    """Checks that a new run folder can be written.

    Raises:
      UserError: if the folder is in use, or inside the run that is read.
    """
    # A folder inside the run would be removed with it.
    if is_inside(folder, saved.run_folder):
        raise UserError(f"{folder} is {saved.run_folder} or inside it; choose another folder")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} already exists; choose an empty folder or one that does not exist")


def _check_whole_run(saved: SavedStep, dtype: np.dtype | None, weights: WeightsKind) -> None:
    if weights == EMA:
        require_average(saved.run_folder, saved.step)
        raise UserError("a run resumes from its own weights, not from their average; add --weights-only")
    if not has_training(saved.run_folder, saved.step):
        raise UserError(f"step {saved.step} of {saved.run_folder} has weights only; add --weights-only")
    if dtype is not None and dtype != np.float32:
        raise UserError(
            f"a run cannot resume from weights in {dtype.name}, because small updates are lost in rounding; "
            "add --weights-only"
        )


def _write_weights(
    stored: StoredWeights, saved: SavedStep, run_folder: pathlib.Path, dtype: np.dtype | None, origin: str
) -> None:
    """Writes the weights chunk by chunk, so that only one chunk is in memory, before and after conversion."""
    arrays = [_plain(stored, name, dtype) for name in stored.shapes]
    for name, content in metadata_files(saved.step, arrays).items():
        path = run_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for array in arrays:
        for part in stored.parts(array.name):
            values = stored.read(array.name, part).astype(array.dtype)
            start = tuple(each.start for each in part)
            # Orbax expects files of equal size, so the last chunk of an axis is padded.
            content = _padded(values, array.chunk).tobytes()
            (run_folder / chunk_name(saved.step, array, start)).write_bytes(content)
    folder = step_folder(run_folder, saved.step)
    if (description := read_description(saved.run_folder, saved.step)) is not None:
        # The description would otherwise claim that training had these weights.
        origin = origin or description.weights
        write_description(folder, dataclasses.replace(description, weights=origin))
    commit(folder, saved.step, sync_and_describe(folder, durable.list_files(folder)))


def _plain(stored: StoredWeights, name: str, dtype: np.dtype | None) -> PlainArray:
    is_fixed = name.startswith(ROUTER_BIAS) or name.endswith(QUANTIZED)
    kept = stored.dtype(name) if dtype is None or is_fixed else dtype
    return PlainArray(name, stored.shapes[name], stored.chunk(name), kept)


def _padded(values: np.ndarray, chunk: tuple[int, ...]) -> np.ndarray:
    padding = [(0, size - actual) for size, actual in zip(chunk, values.shape, strict=True)]
    return np.pad(values, padding) if any(size for _, size in padding) else values
