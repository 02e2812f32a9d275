"""Reading of a checkpoint's arrays part by part, with less memory than they need.

The name of an array is its keys, joined with dots.
"""

import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from zaya_jax.checkpoint.format.layout import METADATA, step_folder
from zaya_jax.checkpoint.format.plain_weights import ZARR_DTYPES
from zaya_jax.checkpoint.newest import SavedStep
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.files.json_files import read_json


class StoredArrays:
    """An item of a checkpoint on disk. It is safe to read from several threads.

    Attributes:
      folder: folder of the item.
      shapes: shape of each array, by name.
    """

    def __init__(self, saved: SavedStep, item: str, *, interleaved: bool = False):
        """Opens an item of a verified checkpoint.

        Args:
          saved: the checkpoint.
          item: "weights" or "training".
          interleaved: whether parts of several arrays are read alternately. The cache then has room for one
            chunk of each array, otherwise only for the largest chunk.

        Raises:
          DamagedError: if an array cannot be opened, or a chunk is missing.
        """
        self.folder = step_folder(pathlib.Path(saved.run_folder).absolute(), saved.step) / item
        self._arrays = _open_arrays(self.folder, interleaved=interleaved)
        self.shapes = {name: tuple(array.shape) for name, array in self._arrays.items()}

    def dtype(self, name: str) -> np.dtype:
        """Stored type of an array."""
        return self._arrays[name].dtype.numpy_dtype

    def read(self, name: str, index: tuple[int | slice, ...]) -> np.ndarray:
        """Reads a part of an array. Chunks that are larger than the part are cached for the following ones.

        Raises:
          DamagedError: with TensorStore's message, if the part is damaged.
        """
        try:
            return self._arrays[name][index].read().result()
        except ValueError as error:
            raise DamagedError(f"{self.folder}: {name} cannot be read: {str(error)[:200]}") from error

    def chunk(self, name: str) -> tuple[int, ...]:
        """Shape of the chunks of an array; those at the end of an axis may be smaller."""
        return _read_chunk(self._arrays[name])

    def parts(self, name: str) -> Iterator[tuple[slice, ...]]:
        """Yields the index of each chunk of an array, in order."""
        axes = zip(self.shapes[name], self.chunk(name), strict=True)
        # The last slice of an axis is clipped to its size.
        slices = ([slice(i, min(i + part, size)) for i in range(0, size, part)] for size, part in axes)
        return itertools.product(*slices)

    def chunk_bytes(self) -> int:
        """Total size in bytes of one chunk of each array: the cache of interleaved reading."""
        return sum(map(_chunk_bytes, self._arrays.values()))


def check_shapes(folder: pathlib.Path, weights: Any) -> None:
    """Compares the weights of an item with those that a config describes.

    Raises:
      UserError: for a weight that is missing, or has another shape or an invalid type. Orbax's own error may
        not name the weight.
    """
    stored = _open_arrays(folder, interleaved=False)
    for path, weight in jax.tree.leaves_with_path(weights):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name not in stored or tuple(stored[name].shape) != weight.shape:
            shape = f"shape {tuple(stored[name].shape)}" if name in stored else "no such weight"
            raise UserError(
                f"{folder}: {name} has shape {weight.shape} by the run's config.json, and the checkpoint has "
                f"{shape}"
            )
        check_type(folder, name, stored[name])


def _open_arrays(folder: pathlib.Path, *, interleaved: bool) -> dict[str, ts.TensorStore]:
    # A size limit applies, as the file may be hostile.
    metadata = read_json(folder / METADATA)
    try:
        names = [_name(leaf) for leaf in metadata["tree_metadata"].values() if not _is_empty(leaf)]
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedError(
            f"{folder / METADATA} has no valid tree_metadata; it was not written by Orbax"
        ) from error
    specs = {name: _spec(folder, name, metadata) for name in names}
    # Opened twice: the size of the cache depends on the chunks, which are only known once arrays are open.
    opened = {name: _open(folder, name, spec, ts.Context()) for name, spec in specs.items()}
    for name, array in opened.items():
        _check_chunks(folder, name, array, specs[name])
    sizes = [_chunk_bytes(array) for array in opened.values()]
    cache = sum(sizes) if interleaved else max(sizes, default=0)
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache}})
    return {name: _open(folder, name, spec, context) for name, spec in specs.items()}


def _name(leaf: Mapping[str, Any]) -> str:
    return ".".join(str(key["key"]) for key in leaf["key_metadata"])


def _is_empty(leaf: Mapping[str, Any]) -> bool:
    """Whether an entry is an empty state, as some of Optax are; nothing is stored for it."""
    return leaf.get("value_metadata", {}).get("value_type") == "None"


def _spec(folder: pathlib.Path, name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    # Orbax writes OCDBT; `plain_weights` writes plain files.
    if metadata.get("use_ocdbt"):
        store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{folder}/{name}/"}
    return {"driver": "zarr3" if metadata.get("use_zarr3") else "zarr", "kvstore": store}


def _open(folder: pathlib.Path, name: str, spec: dict[str, Any], context: ts.Context) -> ts.TensorStore:
    try:
        # The metadata of a committed array does not change, so it is not checked again at each read.
        return ts.open(spec | {"recheck_cached_data": "open"}, read=True, context=context).result()
    except ValueError as error:
        raise DamagedError(f"{folder}: the array {name} cannot be opened: {str(error)[:200]}") from error


def check_type(folder: pathlib.Path, name: str, array: ts.TensorStore) -> None:
    """Checks that an array has a type that weights can have.

    Raises:
      UserError: if it has another type; the message lists the valid ones.
    """
    if array.dtype.name not in ZARR_DTYPES:
        raise UserError(
            f"{folder}: {name} has type {array.dtype.name}; it must be one of {', '.join(ZARR_DTYPES)}"
        )


def _check_chunks(folder: pathlib.Path, name: str, array: ts.TensorStore, spec: dict[str, Any]) -> None:
    """Checks the chunks of an array.

    TensorStore reads zeros for a missing chunk, and allocates as much memory as a chunk claims to have.
    """
    chunk = _read_chunk(array)
    # Reading allocates a whole chunk, so a forged chunk shape could exhaust the memory.
    if any(part > max(size, 1) for size, part in zip(array.shape, chunk, strict=True)):
        raise DamagedError(
            f"{folder}: the array {name} has shape {array.shape}, and chunks of {chunk} are larger"
        )
    expected = math.prod(-(-size // part) for size, part in zip(array.shape, chunk, strict=True))
    # Counting keys detects missing chunks without reading any.
    keys = ts.KvStore.open(spec["kvstore"]).result().list().result()
    actual = sum(not key.decode().startswith((".z", "zarr.json")) for key in keys)
    if actual != expected:
        raise DamagedError(f"{folder}: the array {name} has {actual} of {expected} chunks; it is damaged")


def _chunk_bytes(array: ts.TensorStore) -> int:
    return math.prod(_read_chunk(array)) * array.dtype.numpy_dtype.itemsize


def _read_chunk(array: ts.TensorStore) -> tuple[int, ...]:
    """Shape of a chunk, with 1 for axes that are not chunked."""
    shape = array.chunk_layout.read_chunk.shape or array.shape
    return tuple(int(size or 1) for size in shape)
