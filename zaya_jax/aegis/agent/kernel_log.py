"""New records of the kernel's ring buffer, in which drivers report hardware failures."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

PATH = pathlib.Path("/dev/kmsg")
# Buffer size, larger than any record (kernel documentation, `dev-kmsg`).
_RECORD_BYTES = 16_384


class KernelLog:
    """Reader of records that are written after its creation.

    Args:
      path: path of the device.

    Raises:
      OSError: if this user may not read it.
    """

    def __init__(self, path: pathlib.Path = PATH):
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # tests use a pipe, which cannot seek
            os.lseek(self._file, 0, os.SEEK_END)

    def new_lines(self) -> Iterator[str]:
        """Yields the texts of records that were written since the last call."""
        while True:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                return
            # Records were overwritten before they were read; the next read returns the oldest that is left.
            except BrokenPipeError:
                continue
            if not record:
                return
            # A record is "priority,number,microseconds,flags;text", followed by lines of properties.
            _, _, text = record.decode(errors="backslashreplace").partition(";")
            yield text.split("\n", 1)[0]

    def close(self) -> None:
        """Closes the device; no more records can be read."""
        os.close(self._file)
