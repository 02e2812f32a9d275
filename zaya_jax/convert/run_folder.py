"""The weights of a run: read out of an Orbax checkpoint slice by slice, and written as one.

What is written is Orbax's plain form: a folder of Zarr chunks for each weight, without compression.
A chunk is then the bytes of a slice of ours, which is all that a conversion ever holds. Orbax, and
`zaya_jax.checkpoint` with it, restores such a checkpoint like any of its own.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from zaya_jax.checkpoint import FOLDER, METADATA, WEIGHTS, read_config, require_step
from zaya_jax.config import CONFIG_FILE, Config, ModelConfig
from zaya_jax.convert.layouts import (
    ROUTER_BIAS,
    OurWeight,
    WeightSlice,
    check_shapes,
    layer_slices,
    our_weights,
    rows_per_slice,
)
from zaya_jax.convert.pytorch_folder import read_json
from zaya_jax.convert.stream import Block, PlannedFile

STEP_METADATA = "_CHECKPOINT_METADATA"
_ZARR_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "bfloat16"}
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_DICT_KEY = 2
"""Orbax's number for a key of a dictionary."""


class RunWeights:
    """The newest weights of a run as a `zaya_jax.convert.stream.Source`.

    Attributes:
      run: its config.
      step: of the checkpoint.
    """

    def __init__(self, run_folder: str | pathlib.Path):
        """Opens a run.

        Raises:
          ValueError: if the folder is no run, has no checkpoint, or one that is damaged.
        """
        self.run = read_config(run_folder)
        self.step = require_step(run_folder)
        self._folder = pathlib.Path(run_folder).absolute() / FOLDER / str(self.step) / WEIGHTS
        arrays = _open_arrays(self._folder)
        weights = our_weights(self.run.model)
        try:
            check_shapes(
                {name: tuple(array.shape) for name, array in arrays.items()},
                {orbax_name(path): weight.shape for path, weight in weights.items()},
                "weight",
            )
        except ValueError as error:
            raise ValueError(
                f"{self._folder} does not hold what the run's {CONFIG_FILE} describes: {error}"
            ) from error
        self._arrays = {path: arrays[orbax_name(path)] for path in weights}

    @property
    def config(self) -> ModelConfig:
        """The config of the network whose weights these are."""
        return self.run.model

    def dtype(self, path: str) -> np.dtype:
        """The type of a weight in the checkpoint."""
        return self._arrays[path].dtype.numpy_dtype

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """A slice. Where the checkpoint's chunks are larger, they are kept for the slices that follow."""
        try:
            return self._arrays[weight_slice.path][weight_slice.index].read().result()
        except ValueError as error:
            raise ValueError(f"{self._folder}: {weight_slice.path} is damaged: {str(error)[:200]}") from error

    def identity(self) -> list[Any]:
        """What changes when the checkpoint does."""
        file = self._folder / METADATA
        return [str(self._folder), file.stat().st_size, file.stat().st_mtime_ns]

    def chunk_bytes(self) -> int:
        """Host memory that one chunk of each weight takes: what reading may hold at once."""
        return sum(_chunk_bytes(array) for array in self._arrays.values())


def _open_arrays(folder: pathlib.Path) -> dict[str, ts.TensorStore]:
    """The arrays of a checkpoint item, by Orbax's names for them.

    Raises:
      ValueError: if one cannot be opened, or lacks a part: TensorStore would read zeros there.
    """
    metadata = read_json(folder / METADATA)
    tree = metadata.get("tree_metadata")
    if not isinstance(tree, Mapping):
        raise ValueError(f"{folder / METADATA} has no tree_metadata; Orbax did not write it")
    names = [".".join(str(key["key"]) for key in leaf["key_metadata"]) for leaf in tree.values()]
    specs = {name: _spec(folder, name, metadata) for name in names}
    opened = {name: _open(folder, name, spec, ts.Context()) for name, spec in specs.items()}
    for name, array in opened.items():
        _check_chunks(folder, name, array, specs[name])
    cache = sum(_chunk_bytes(array) for array in opened.values())
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


def _check_chunks(folder: pathlib.Path, name: str, array: ts.TensorStore, spec: dict[str, Any]) -> None:
    chunk = _read_chunk(array)
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


def orbax_name(path: str) -> str:
    """What Orbax calls a weight of ours."""
    return path.replace("/", ".") if path == ROUTER_BIAS else "params." + path.replace("/", ".")


def run_files(
    config: Config, dtypes: Mapping[str, np.dtype], *, step: int, extra: Mapping[str, bytes]
) -> list[PlannedFile]:
    """A run folder with one checkpoint, of weights only.

    Args:
      config: of the run.
      dtypes: of the weights, by path.
      step: of the checkpoint.
      extra: further files by name.
    """
    weights = our_weights(config.model)
    item = f"{FOLDER}/{step}/{WEIGHTS}"
    files = [PlannedFile(name, content) for name, content in extra.items()]
    files += [
        PlannedFile(CONFIG_FILE, config.to_text().encode()),
        PlannedFile(f"{FOLDER}/{step}/{STEP_METADATA}", _json({"item_handlers": {WEIGHTS: _HANDLER}})),
        PlannedFile(f"{item}/{METADATA}", _json(_tree_metadata(weights))),
    ]
    for path, weight in weights.items():
        array, chunk = f"{item}/{orbax_name(path)}", _chunk_shape(weight)
        files.append(PlannedFile(f"{array}/.zarray", _json(_zarray(weight.shape, chunk, dtypes[path]))))
    for layer in (None, *range(config.model.num_hidden_layers)):
        for path, weight in weights.items():
            if weight.is_stacked == (layer is not None):
                for weight_slice in layer_slices(path, weight, config.model.num_hidden_layers, layer):
                    files.append(
                        _chunk_file(f"{item}/{orbax_name(path)}", weight, weight_slice, dtypes[path])
                    )
    return files


def _chunk_shape(weight: OurWeight) -> tuple[int, ...]:
    if not weight.is_stacked:
        return (rows_per_slice(weight.shape), *weight.shape[1:])
    counted = 2 if weight.has_experts else 1
    return (1,) * counted + weight.shape[counted:]


def _chunk_file(array: str, weight: OurWeight, weight_slice: WeightSlice, dtype: np.dtype) -> PlannedFile:
    chunk = _chunk_shape(weight)
    numbers = list(weight_slice.start) if weight.is_stacked else [weight_slice.start[0] // chunk[0]]
    numbers += [0] * (len(chunk) - len(numbers))
    padding = (math.prod(chunk) - weight_slice.size) * dtype.itemsize  # Zarr's last chunk is as large as all
    name = ".".join(map(str, numbers))
    return PlannedFile(f"{array}/{name}", b"", (Block(weight_slice, dtype, _as_it_is, padding),))


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def _zarray(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunk),
        "dtype": _ZARR_DTYPES[dtype.name],
        "order": "C",
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "dimension_separator": ".",
    }


def _tree_metadata(weights: Mapping[str, OurWeight]) -> dict[str, Any]:
    tree = {}
    for path, weight in weights.items():
        keys = tuple(orbax_name(path).split("."))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(weight.shape),
            },
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
