"""The kernel's ring buffer, as far as it is new: what drivers say when something fails."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

PATH = pathlib.Path("/dev/kmsg")
_RECORD_BYTES = 16_384
"""More than a record can have (kernel documentation, `dev-kmsg`)."""


class KernelLog:
    """Reads records that are written from now on.

    Args:
      path: of the device.

    Raises:
      OSError: where it may not be read.
    """

    def __init__(self, path: pathlib.Path = PATH):
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # a pipe, in tests, has nothing to skip
            os.lseek(self._file, 0, os.SEEK_END)

    def new_lines(self) -> Iterator[str]:
        """The texts of records that were not read before."""
        while True:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # older ones were overwritten before they were read: the next is there
                continue
            if not record:
                return
            # "priority,number,microseconds,flags;text", and lines of properties behind it.
            _, _, text = record.decode(errors="backslashreplace").partition(";")
            yield text.split("\n", 1)[0]

    def close(self) -> None:
        """Closes the device, and reads no more."""
        os.close(self._file)
