"""Files of weights that are written without Orbax but restored by it: one uncompressed file per chunk.

The file of a chunk contains the bytes of a part of a weight and nothing else, so weights of any size can be
written part by part. The format is zarr 2 with the metadata that Orbax expects.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from zaya_jax.checkpoint.format.layout import METADATA, STEP_METADATA, WEIGHTS, step_metadata
from zaya_jax.run_folder.names import CHECKPOINTS_FOLDER

ZARR_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "bfloat16", "int8": "|i1", "uint8": "|u1"}
"""zarr's name of each type that stored weights can have; integers are quantized."""
_DICT_KEY = 2
"""Orbax's code for a dictionary key in a path."""


@dataclasses.dataclass(frozen=True)
class PlainArray:
    """A weight that is stored as a folder of chunks.

    Attributes:
      name: keys of the weight in the variables of `Zaya.apply`, joined with dots.
      shape: shape of the weight.
      chunk: shape of a chunk.
      dtype: type of the stored values.
    """

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype

    @property
    def chunk_bytes(self) -> int:
        """Size in bytes of the file of a chunk; chunks at the end of an axis are padded to the same size."""
        return math.prod(self.chunk) * self.dtype.itemsize


def chunk_name(step: int, array: PlainArray, start: tuple[int, ...]) -> str:
    """File, relative to the run folder, of the chunk at offset `start`; missing trailing axes are at 0."""
    # zarr 2 names the file of a chunk by its index along each axis.
    indices = [0] * len(array.chunk)
    for axis, (offset, size) in enumerate(zip(start, array.chunk, strict=False)):
        indices[axis] = offset // size
    return f"{_item(step)}/{array.name}/{'.'.join(map(str, indices))}"


def metadata_files(step: int, arrays: Iterable[PlainArray]) -> dict[str, bytes]:
    """Content of all files of a weights-only checkpoint except chunks, by name relative to the run folder."""
    arrays = list(arrays)
    files = {f"{_item(step)}/{METADATA}": _tree_metadata(arrays)}
    files |= {f"{_item(step)}/{array.name}/.zarray": _zarray(array) for array in arrays}
    # Indented like the files that Orbax writes, so that a person can read them.
    encoded = {name: (json.dumps(value, indent=1) + "\n").encode() for name, value in files.items()}
    return {f"{CHECKPOINTS_FOLDER}/{step}/{STEP_METADATA}": step_metadata((WEIGHTS,))} | encoded


def _item(step: int) -> str:
    return f"{CHECKPOINTS_FOLDER}/{step}/{WEIGHTS}"


def _zarray(array: PlainArray) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": list(array.shape),
        "chunks": list(array.chunk),
        "dtype": ZARR_DTYPES[array.dtype.name],
        "order": "C",
        # Uncompressed, so that offsets are known in advance and chunks can be written in place.
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
        # OCDBT packs arrays into shared files, which cannot be written chunk by chunk by other code.
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
