"""The safetensors format: validation of headers, and headers that are written before the data.

A file is eight bytes with the length of the header, the header, a JSON object with type, shape and position
of every tensor, and the data. Nothing else is in it, and nothing is executed.

The safetensors package reads slices (`safe_open(...).get_slice`), but this module reads files itself,
because:

- the package maps files into memory, and mapped pages count towards a container's memory limit;
- it reports a hostile header by an exception of Rust without the tensor's name, and it accepts shapes whose
  size is slow to compute;
- it can only write whole dictionaries of tensors, while a conversion in bounded memory must write the header
  before the data.
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

from zaya_jax.errors import UserError
from zaya_jax.files.content_type import HEAD_BYTES, describe_content
from zaya_jax.files.json_files import parse_object

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format."""
MAX_AXES = 64
"""NumPy's limit. A hostile header could have a million axes, whose product would take hours."""
MAX_SIZE = 2**63 - 1
"""Largest size and offset in 64 bits; a hostile header could have numbers with thousands of digits."""
METADATA = "__metadata__"

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
"""Supported types of weights, by their name in a file."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
} | {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Position of a tensor.

    Attributes:
      file: path of the file.
      dtype: name of its type in the format, such as "BF16".
      shape: sizes of its axes.
      offset: offset of its first byte in the file.
      size: number of bytes.
    """

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def name_of(dtype: Any) -> str:
    """Name in the format of a NumPy type in `DTYPES`."""
    return next(name for name, known in DTYPES.items() if known == np.dtype(dtype))


def num_values(tensor: StoredTensor) -> int:
    """Number of values of a tensor; packed ones in bytes count as bytes."""
    return tensor.size * 8 // _BITS[tensor.dtype]


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
    """Reads the positions of all tensors of a file, by name.

    Every length is compared with the size of the file before that many bytes are read.

    Raises:
      UserError: if the file is not a valid safetensors file.
    """
    file_size = file.stat().st_size
    with file.open("rb") as stream:
        # Enough to recognize other formats, such as HTML of an error page or a Git LFS pointer.
        head = stream.read(HEAD_BYTES)
        # Only if no brace follows: the length of a valid header may look like the magic bytes of another
        # format.
        if head[8:9] != b"{" and (content := describe_content(head)) is not None:
            raise UserError(f"{file} is not a safetensors file: it is {content}")
        begin = head[:8]
        if len(begin) < 8:
            raise UserError(
                f"{file} has {len(begin)} bytes; a safetensors file starts with 8 bytes of length"
            )
        header_size = int.from_bytes(begin, "little")
        # Checked before reading, so that a forged length does not allocate memory.
        if header_size > min(file_size - 8, MAX_HEADER_BYTES):
            raise UserError(
                f"{file} is not a safetensors file, or is truncated: its header would have {header_size:,} "
                f"bytes; the file has {file_size:,} (a header has at most {MAX_HEADER_BYTES:,})"
            )
        stream.seek(8)
        text = stream.read(header_size)
    data = 8 + header_size
    entries = parse_object(text, str(file))
    # Free text, which is not needed.
    entries.pop(METADATA, None)
    tensors = {name: _stored(file, data, name, entry) for name, entry in entries.items()}
    _check_positions(file, data, file_size, tensors)
    return tensors


def _stored(file: pathlib.Path, data: int, name: str, entry: Any) -> StoredTensor:
    where = f"{file}: tensor {name}"
    if not isinstance(entry, dict) or entry.keys() < {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where} must have dtype, shape and data_offsets; it is {_short(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise UserError(f"{where} has type {_short(dtype)}, which the format does not have")
    # Checked before any arithmetic, because JSON numbers may be negative or fractional.
    if not _are_counts(shape):
        raise UserError(f"{where} has shape {_short(shape)}; it must be a list of integers from 0")
    if len(shape) > MAX_AXES:
        raise UserError(f"{where} has {len(shape):,} axes; at most {MAX_AXES} are supported")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(f"{where} has data_offsets {_short(offsets)}; they must be its start and end")
    start, end = offsets
    # Bits, because types of 4 and 6 bits are packed.
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or end - start != bits // 8:
        raise UserError(
            f"{where} has {end - start:,} bytes of data; its shape {_short(shape)} of {dtype} needs "
            f"{bits // 8:,}"
        )
    return StoredTensor(file, dtype, tuple(shape), data + start, end - start)


def _check_positions(file: pathlib.Path, data: int, file_size: int, tensors: dict[str, StoredTensor]) -> None:
    """Checks that the tensors cover the data without gaps or overlaps, up to the end of the file."""
    end = data
    # In the order of their data; empty tensors first among equal offsets.
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset + tensor.size > file_size:
            raise UserError(
                f"{file} is truncated: it has {file_size:,} bytes, and {name} ends at "
                f"{tensor.offset + tensor.size:,}"
            )
        if tensor.offset != end:
            problem = "overlaps the previous one" if tensor.offset < end else "follows a gap"
            raise UserError(f"{file}: tensor {name} {problem}; the format does not allow that")
        end += tensor.size
    # Extra bytes could hide data, and hint at a damaged download.
    if end != file_size:
        raise UserError(f"{file} has {file_size - end:,} bytes that belong to no tensor")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        # `type` instead of `isinstance`, because bool is a subclass of int.
        type(number) is int and 0 <= number <= MAX_SIZE
        for number in value
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Encodes the header of a file with tensors in this order, each given by name, type and shape."""
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}  # transformers requires it
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * _BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    return len(text).to_bytes(8, "little") + text


def read_bytes(descriptor: int, offset: int, size: int) -> np.ndarray:
    """Reads bytes of an open file, shape [size] of uint8.

    Raises:
      UserError: if the file ends earlier.
    """
    # Memory of this process, not a mapping, so that its use is bounded and known.
    buffer = np.empty(size, np.uint8)
    view, done = buffer.data, 0
    while done < size:
        # May return fewer bytes than requested, for example at 2 GiB.
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise UserError(f"a file ended at byte {offset + done:,} while it was read; was it replaced?")
        done += count
    return buffer
