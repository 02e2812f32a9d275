"""The arrays of a checkpoint, read part by part: for whoever has less memory than they take.

They are named by the keys that lead to them, joined with dots.
"""

import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from zaya_jax.checkpoint.layout import METADATA, step_folder
from zaya_jax.checkpoint.newest import SavedStep
from zaya_jax.checkpoint.plain_weights import ZARR_DTYPES
from zaya_jax.durable import Damaged
from zaya_jax.json_files import read_json


class StoredArrays:
    """An item of a checkpoint on the disk; several threads may read it.

    Attributes:
      folder: of the item.
      shapes: by name.
    """

    def __init__(self, saved: SavedStep, item: str, *, in_turn: bool = False):
        """Opens an item of a checkpoint that was found whole.

        Args:
          saved: the checkpoint.
          item: "weights" or "training".
          in_turn: keeps a chunk of each array, for parts of several that are read in turn; otherwise what
            is kept is as large as the largest chunk.

        Raises:
          Damaged: if an array cannot be opened, or lacks a part.
        """
        self.folder = step_folder(pathlib.Path(saved.run_folder).absolute(), saved.step) / item
        self._arrays = _open_arrays(self.folder, in_turn=in_turn)
        self.shapes = {name: tuple(array.shape) for name, array in self._arrays.items()}

    def dtype(self, name: str) -> np.dtype:
        """The type of an array on the disk."""
        return self._arrays[name].dtype.numpy_dtype

    def read(self, name: str, index: tuple[int | slice, ...]) -> np.ndarray:
        """A part of an array. Where the disk's chunks are larger, they are kept for the parts that follow.

        Raises:
          ValueError: in TensorStore's words, if the part is damaged.
        """
        return self._arrays[name][index].read().result()

    def chunk(self, name: str) -> tuple[int, ...]:
        """The shape of the parts in which an array lies on the disk; the last ones may be cut off."""
        return _read_chunk(self._arrays[name])

    def parts(self, name: str) -> Iterator[tuple[slice, ...]]:
        """Where each chunk of an array lies in it, in order: what is read at once."""
        axes = zip(self.shapes[name], self.chunk(name), strict=True)
        slices = ([slice(i, min(i + part, size)) for i in range(0, size, part)] for size, part in axes)
        return itertools.product(*slices)

    def chunk_bytes(self) -> int:
        """Host memory that one chunk of each array takes: what reading in turn may hold at once."""
        return sum(map(_chunk_bytes, self._arrays.values()))


def check_shapes(folder: pathlib.Path, weights: Any) -> None:
    """Holds the weights of an item against those that a config describes.

    Raises:
      ValueError: for one that is missing, of another shape or of no type of weights; Orbax's own error may
        not say which.
    """
    found = _open_arrays(folder, in_turn=False)
    for path, weight in jax.tree.leaves_with_path(weights):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name not in found or tuple(found[name].shape) != weight.shape:
            shape = tuple(found[name].shape) if name in found else "nowhere"
            raise ValueError(
                f"{folder} has the weight {name} {shape}, and the run's config.json describes {weight.shape}"
            )
        check_type(folder, name, found[name])


def _open_arrays(folder: pathlib.Path, *, in_turn: bool) -> dict[str, ts.TensorStore]:
    metadata = read_json(folder / METADATA)
    try:
        names = [_name(leaf) for leaf in metadata["tree_metadata"].values() if not _is_empty(leaf)]
    except (AttributeError, KeyError, TypeError) as error:
        raise Damaged(f"{folder / METADATA} has no tree_metadata; Orbax did not write it") from error
    specs = {name: _spec(folder, name, metadata) for name in names}
    opened = {name: _open(folder, name, spec, ts.Context()) for name, spec in specs.items()}
    for name, array in opened.items():
        _check_chunks(folder, name, array, specs[name])
    sizes = [_chunk_bytes(array) for array in opened.values()]
    cache = sum(sizes) if in_turn else max(sizes, default=0)
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache}})
    return {name: _open(folder, name, spec, context) for name, spec in specs.items()}


def _name(leaf: Mapping[str, Any]) -> str:
    return ".".join(str(key["key"]) for key in leaf["key_metadata"])


def _is_empty(leaf: Mapping[str, Any]) -> bool:
    """Whether it stands for a state without arrays, as some of Optax are; nothing is stored of it."""
    return leaf.get("value_metadata", {}).get("value_type") == "None"


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
        raise Damaged(f"{folder}: the array {name} cannot be opened: {str(error)[:200]}") from error


def check_type(folder: pathlib.Path, name: str, array: ts.TensorStore) -> None:
    """Refuses an array of a type that no weight has.

    Raises:
      ValueError: with the types that it may have.
    """
    if array.dtype.name not in ZARR_DTYPES:
        raise ValueError(
            f"{folder}: the weight {name} is of type {array.dtype.name}; it must be {', '.join(ZARR_DTYPES)}"
        )


def _check_chunks(folder: pathlib.Path, name: str, array: ts.TensorStore, spec: dict[str, Any]) -> None:
    """TensorStore would read zeros where a chunk is missing, and ask for memory as large as a chunk says."""
    chunk = _read_chunk(array)
    if any(part > max(size, 1) for size, part in zip(array.shape, chunk, strict=True)):
        raise Damaged(f"{folder}: the array {name} has parts of {chunk}, and is {array.shape} in all")
    expected = math.prod(-(-size // part) for size, part in zip(array.shape, chunk, strict=True))
    keys = ts.KvStore.open(spec["kvstore"]).result().list().result()
    found = sum(not key.decode().startswith((".z", "zarr.json")) for key in keys)
    if found != expected:
        raise Damaged(f"{folder}: the array {name} has {found} of its {expected} parts; it is damaged")


def _chunk_bytes(array: ts.TensorStore) -> int:
    return math.prod(_read_chunk(array)) * array.dtype.numpy_dtype.itemsize


def _read_chunk(array: ts.TensorStore) -> tuple[int, ...]:
    """The shape of a part that is read at once."""
    shape = array.chunk_layout.read_chunk.shape or array.shape
    return tuple(int(size or 1) for size in shape)
