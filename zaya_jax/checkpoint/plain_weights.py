"""Orbax's plain form of weights, for whoever writes them without Orbax: a file a chunk, uncompressed.

A chunk's file is the bytes of a part of a weight and nothing else, so that weights of any size can be
written part by part. Orbax restores such a checkpoint like any of its own.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from zaya_jax.checkpoint.layout import FOLDER, METADATA, STEP_METADATA, WEIGHTS, step_metadata

ZARR_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "bfloat16"}
"""Types that weights have on the disk, as zarr spells them."""
_DICT_KEY = 2
"""Orbax's number for a key of a dictionary."""


@dataclasses.dataclass(frozen=True)
class PlainArray:
    """A weight as a folder of chunks.

    Attributes:
      name: the keys that lead to it in what `Zaya.apply` takes, joined with dots.
      shape: of the weight.
      chunk: shape of a chunk.
      dtype: of its values on the disk.
    """

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype

    @property
    def chunk_bytes(self) -> int:
        """Bytes of every chunk's file: the last ones are padded to the size of all."""
        return math.prod(self.chunk) * self.dtype.itemsize


def chunk_name(step: int, array: PlainArray, start: tuple[int, ...]) -> str:
    """The file, relative to the run folder, of the chunk that begins at `start`; axes left out are at 0."""
    numbers = [0] * len(array.chunk)
    for axis, (first, size) in enumerate(zip(start, array.chunk, strict=False)):
        numbers[axis] = first // size
    return f"{_item(step)}/{array.name}/{'.'.join(map(str, numbers))}"


def metadata_files(step: int, arrays: Iterable[PlainArray]) -> dict[str, bytes]:
    """All files but the chunks of a checkpoint of weights only, by their names in the run folder."""
    arrays = list(arrays)
    files = {f"{_item(step)}/{METADATA}": _tree_metadata(arrays)}
    files |= {f"{_item(step)}/{array.name}/.zarray": _zarray(array) for array in arrays}
    encoded = {name: (json.dumps(value, indent=1) + "\n").encode() for name, value in files.items()}
    return {f"{FOLDER}/{step}/{STEP_METADATA}": step_metadata((WEIGHTS,))} | encoded


def _item(step: int) -> str:
    return f"{FOLDER}/{step}/{WEIGHTS}"


def _zarray(array: PlainArray) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": list(array.shape),
        "chunks": list(array.chunk),
        "dtype": ZARR_DTYPES[array.dtype.name],
        "order": "C",
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "dimension_separator": ".",
    }


def _tree_metadata(arrays: Iterable[PlainArray]) -> dict[str, Any]:
    tree = {}
    for array in arrays:
        keys = tuple(array.name.split("."))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(array.shape),
            },
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
