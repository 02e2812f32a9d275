"""The safetensors format: headers read with suspicion, and written in advance of the data.

A file is eight bytes with the length of its header, the header, a JSON object that says of every
tensor its type, shape and place, and the data. Nothing else is in it, and nothing is executed.

The safetensors package reads whole tensors and writes whole dictionaries of them. A conversion in
bounded memory needs parts of a tensor on the way in and a header before the data on the way out; both
follow from the format in a few lines, and so the package is needed by the tests only.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from zaya_jax.json_files import parse_object

MAX_HEADER_BYTES = 100_000_000
"""What the format itself allows."""
METADATA = "__metadata__"

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
"""Types that weights of ours can have, by their name in a file."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
} | {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
      file: that holds it.
      dtype: its type as the format spells it, "BF16".
      shape: its axes.
      offset: of its first byte in the file.
      size: its bytes.
    """

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def name_of(dtype: Any) -> str:
    """How the format spells a NumPy type that is in `DTYPES`."""
    return next(name for name, known in DTYPES.items() if known == np.dtype(dtype))


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Every length is held against that of the file before anything of that length is read.

    Raises:
      ValueError: if the file is not what the format says.
    """
    file_size = file.stat().st_size
    with file.open("rb") as stream:
        begin = stream.read(8)
        if len(begin) < 8:
            raise ValueError(f"{file} has {len(begin)} bytes; a safetensors file begins with 8 of length")
        header_size = int.from_bytes(begin, "little")
        if header_size > min(file_size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{file} is no safetensors file, or is cut off: its header would have {header_size:,} bytes; "
                f"the file has {file_size:,} (a header has at most {MAX_HEADER_BYTES:,})"
            )
        text = stream.read(header_size)
    data = 8 + header_size
    entries = parse_object(text, str(file))
    entries.pop(METADATA, None)
    tensors = {name: _stored(file, data, name, entry) for name, entry in entries.items()}
    _check_places(file, data, file_size, tensors)
    return tensors


def _stored(file: pathlib.Path, data: int, name: str, entry: Any) -> StoredTensor:
    where = f"{file}: tensor {name}"
    if not isinstance(entry, dict) or entry.keys() < {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} must have dtype, shape and data_offsets; it is {_short(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{where} is of type {_short(dtype)}, which the format does not have")
    if not _are_counts(shape):
        raise ValueError(f"{where} has shape {_short(shape)}; it must be a list of whole numbers from 0 on")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where} has data_offsets {_short(offsets)}; they must be its begin and its end")
    start, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or end - start != bits // 8:
        raise ValueError(
            f"{where} has {end - start:,} bytes of data; its shape {_short(shape)} of {dtype} needs "
            f"{bits // 8:,}"
        )
    return StoredTensor(file, dtype, tuple(shape), data + start, end - start)


def _check_places(file: pathlib.Path, data: int, file_size: int, tensors: dict[str, StoredTensor]) -> None:
    """The data must be the tensors one after the other, up to the end of the file."""
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset + tensor.size > file_size:
            raise ValueError(
                f"{file} is cut off: it has {file_size:,} bytes, and {name} ends at "
                f"{tensor.offset + tensor.size:,}"
            )
        if tensor.offset != end:
            what = "overlaps the one before it" if tensor.offset < end else "comes behind a gap"
            raise ValueError(f"{file}: tensor {name} {what}; the format allows neither")
        end += tensor.size
    if end != file_size:
        raise ValueError(f"{file} has {file_size - end:,} bytes that belong to no tensor")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file of tensors, each a name, a type and a shape, that lie in this order."""
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}  # transformers asks for it
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data shall be aligned
    return len(text).to_bytes(8, "little") + text


def read_bytes(descriptor: int, offset: int, size: int) -> np.ndarray:
    """Bytes of an open file as uint8 in memory of our own: a mapped file would count as ours too.

    Raises:
      ValueError: if the file ends before.
    """
    buffer = np.empty(size, np.uint8)
    view, done = buffer.data, 0
    while done < size:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise ValueError(f"a file ended at byte {offset + done:,} while it was read; was it replaced?")
        done += count
    return buffer
