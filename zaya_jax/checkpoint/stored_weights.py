"""The newest weights of a run, read part by part: for whoever has less memory than they take.

Weights are named by the keys that lead to them in what `Zaya.apply` takes, joined with dots.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from zaya_jax.checkpoint.layout import METADATA, WEIGHTS, step_folder
from zaya_jax.checkpoint.newest import require_step
from zaya_jax.checkpoint.plain_weights import ZARR_DTYPES
from zaya_jax.json_files import read_json


class StoredWeights:
    """Weights on the disk; several threads may read them.

    Attributes:
      step: of the checkpoint.
      folder: of the item that holds them.
      shapes: by name.
    """

    def __init__(self, run_folder: str | pathlib.Path):
        """Opens the newest checkpoint of a run.

        Raises:
          ValueError: if there is none, or a weight cannot be opened, or lacks a part.
        """
        self.step = require_step(run_folder)
        self.folder = step_folder(pathlib.Path(run_folder).absolute(), self.step) / WEIGHTS
        self._arrays = _open_arrays(self.folder)
        self.shapes = {name: tuple(array.shape) for name, array in self._arrays.items()}

    def dtype(self, name: str) -> np.dtype:
        """The type of a weight on the disk."""
        return self._arrays[name].dtype.numpy_dtype

    def read(self, name: str, index: tuple[int | slice, ...]) -> np.ndarray:
        """A part of a weight. Where the disk's chunks are larger, they are kept for the parts that follow.

        Raises:
          ValueError: in TensorStore's words, if the part is damaged.
        """
        return self._arrays[name][index].read().result()

    def identity(self) -> list[Any]:
        """What changes when the checkpoint does, as JSON has it."""
        status = (self.folder / METADATA).stat()
        return [str(self.folder), status.st_size, status.st_mtime_ns]

    def chunk_bytes(self) -> int:
        """Host memory that one chunk of each weight takes: what reading may hold at once."""
        return sum(map(_chunk_bytes, self._arrays.values()))


def check_shapes(folder: pathlib.Path, weights: Any) -> None:
    """Holds the weights of an item against those that a config describes.

    Raises:
      ValueError: for one that is missing or of another shape; Orbax's own error may not say which.
    """
    found = {name: tuple(array.shape) for name, array in _open_arrays(folder).items()}
    for path, weight in jax.tree.leaves_with_path(weights):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if found.get(name) != weight.shape:
            raise ValueError(
                f"{folder} has the weight {name} {found.get(name) or 'nowhere'}, and the run's config.json "
                f"describes {weight.shape}"
            )


def _open_arrays(folder: pathlib.Path) -> dict[str, ts.TensorStore]:
    metadata = read_json(folder / METADATA)
    try:
        leaves = metadata["tree_metadata"].values()
        names = [".".join(str(key["key"]) for key in leaf["key_metadata"]) for leaf in leaves]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / METADATA} has no tree_metadata; Orbax did not write it") from error
    specs = {name: _spec(folder, name, metadata) for name in names}
    opened = {name: _open(folder, name, spec, ts.Context()) for name, spec in specs.items()}
    for name, array in opened.items():
        _check_type(folder, name, array)
        _check_chunks(folder, name, array, specs[name])
    cache = sum(map(_chunk_bytes, opened.values()))
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache}})
    return {name: _open(folder, name, spec, context) for name, spec in specs.items()}


def _spec(folder: pathlib.Path, name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    if metadata.get("use_ocdbt"):
        store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{folder}/{name}/"}
    return {"driver": "zarr3" if metadata.get("use_zarr3") else "zarr", "kvstore": store}


def _open(folder: pathlib.Path, name: str, spec: dict[str, Any], context: ts.Context) -> ts.TensorStore:
    try:
        # What is known of an array does not change while it is read.
        return ts.open(spec | {"recheck_cached_data": "open"}, read=True, context=context).result()
    except ValueError as error:
        raise ValueError(f"{folder}: the weight {name} cannot be opened: {str(error)[:200]}") from error


def _check_type(folder: pathlib.Path, name: str, array: ts.TensorStore) -> None:
    if array.dtype.name not in ZARR_DTYPES:
        raise ValueError(
            f"{folder}: the weight {name} is of type {array.dtype.name}; it must be {', '.join(ZARR_DTYPES)}"
        )


def _check_chunks(folder: pathlib.Path, name: str, array: ts.TensorStore, spec: dict[str, Any]) -> None:
    """TensorStore would read zeros where a chunk is missing, and ask for memory as large as a chunk says."""
    chunk = _read_chunk(array)
    if any(part > size for size, part in zip(array.shape, chunk, strict=True)):
        raise ValueError(f"{folder}: the weight {name} has parts of {chunk}, and is {array.shape} in all")
    expected = math.prod(-(-size // part) for size, part in zip(array.shape, chunk, strict=True))
    keys = ts.KvStore.open(spec["kvstore"]).result().list().result()
    found = sum(not key.decode().startswith((".z", "zarr.json")) for key in keys)
    if found != expected:
        raise ValueError(f"{folder}: the weight {name} has {found} of its {expected} parts; it is damaged")


def _chunk_bytes(array: ts.TensorStore) -> int:
    return math.prod(_read_chunk(array)) * array.dtype.numpy_dtype.itemsize


def _read_chunk(array: ts.TensorStore) -> tuple[int, ...]:
    """The shape of a part that is read at once."""
    shape = array.chunk_layout.read_chunk.shape or array.shape
    return tuple(int(size or 1) for size in shape)
