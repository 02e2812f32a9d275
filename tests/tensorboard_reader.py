"""Reads TensorBoard event files with tensorboardX's protobufs, and checks the checksums of their records."""

import struct

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c


def records(file):
    """Yields the events of a file, up to an incomplete one."""
    return events_in(file.read_bytes())


def events_in(data):
    """Yields the events of TFRecord data."""
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        if len(data) < size + 16:
            return
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        assert struct.unpack("<I", data[12 + size : 16 + size]) == (masked_crc32c(data[12 : 12 + size]),)
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def scalars(file):
    """Returns the scalars of a file by tag and step."""
    return {
        (value.tag, event.step): value.simple_value
        for event in records(file)
        for value in event.summary.value
    }
