"""Writer for TensorBoard event files with scalars and texts: TFRecord records of Event protobufs.

Other packages that write them import torch if it is installed, which takes two seconds per start. The field
numbers are those of `event.proto` and `summary.proto` in tensorflow/core.
"""

import struct

import numpy as np

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # protobuf's wire types
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7  # of Event
_SUMMARY_VALUE, _TAG, _SIMPLE_VALUE, _STATUS, _START = 1, 1, 2, 1, 1
_TENSOR, _METADATA, _PLUGIN, _PLUGIN_NAME = 8, 9, 1, 1  # of Summary.Value and SummaryMetadata
_DTYPE, _SHAPE, _STRING_VALUE, _DT_STRING = 1, 2, 8, 7  # of TensorProto
_CASTAGNOLI = 0x82F63B78  # polynomial of CRC-32C, bit-reversed
_MASK_DELTA = 0xA282EAD8


def version(time: float) -> bytes:
    """Returns the first record of an event file."""
    return _record(_when(time) + _field(_FILE_VERSION, b"brain.Event:2"))


def restart(time: float, step: int) -> bytes:
    """Returns a record that makes TensorBoard drop its values of this step and later ones."""
    log = _key(_STATUS, _VARINT) + _varint(_START)
    return _record(_when(time, step) + _field(_SESSION_LOG, log))


def scalar(time: float, step: int, tag: str, value: float) -> bytes:
    """Returns a record of one value of a step."""
    with np.errstate(over="ignore"):  # a value beyond float32 is shown as infinite
        rounded = np.float32(value)
    value_fields = _field(_TAG, tag.encode()) + _key(_SIMPLE_VALUE, _FLOAT) + struct.pack("<f", rounded)
    return _record(_when(time, step) + _field(_SUMMARY, _field(_SUMMARY_VALUE, value_fields)))


def text(time: float, step: int, tag: str, value: str) -> bytes:
    """Returns a record of a text, which TensorBoard shows as Markdown."""
    plugin = _field(_METADATA, _field(_PLUGIN, _field(_PLUGIN_NAME, b"text")))
    # A scalar string tensor: its shape is present and has no dimensions.
    tensor = _key(_DTYPE, _VARINT) + _varint(_DT_STRING) + _field(_SHAPE, b"")
    content = tensor + _field(_STRING_VALUE, value.encode())
    value_fields = _field(_TAG, tag.encode()) + _field(_TENSOR, content)
    return _record(_when(time, step) + _field(_SUMMARY, _field(_SUMMARY_VALUE, value_fields + plugin)))


def _when(time: float, step: int = 0) -> bytes:
    seconds = _key(_WALL_TIME, _DOUBLE) + struct.pack("<d", time)
    return seconds + _key(_STEP, _VARINT) + _varint(step)


def _field(number: int, data: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(data)) + data


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(number: int) -> bytes:
    """Encodes seven bits per byte, lowest first; the eighth bit is set if more follow."""
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*low, number])


def _record(data: bytes) -> bytes:
    # A TFRecord: length, its checksum, data, their checksum.
    size = struct.pack("<Q", len(data))
    return size + _masked_checksum(size) + data + _masked_checksum(data)


def _masked_checksum(data: bytes) -> bytes:
    """Returns the rotated CRC-32C plus a constant: data may contain CRCs, which would weaken a plain one."""
    # Table-driven, one byte at a time: rows are short.
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    checksum ^= 0xFFFFFFFF
    rotated = checksum >> 15 | checksum << 17
    return struct.pack("<I", (rotated + _MASK_DELTA) & 0xFFFFFFFF)


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_table_entry, range(256)))
