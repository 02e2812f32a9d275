"""Disks that fail: one sentence of what Orbax, its threads and TensorStore say with ten tracebacks."""

import contextlib
import dataclasses
import gc
import json
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from zaya_jax.parallel.failures import Shared

_STATUS = re.compile(r"[A-Z_]+: ")
"""How TensorStore's errors begin, which are ValueErrors: "RESOURCE_EXHAUSTED: "."""
_NOTES = re.compile(r" \[\w+(\[\d+\])?='")
"""How begins what it appends to them: " [os_error_code='28']"."""


class SaveFailed(Shared):
    """A checkpoint that the disk did not take."""

    def __init__(self, what: str, *, is_told_here: bool = True):
        advice = "; mend that, and the same command goes on"
        super().__init__(what, is_told_here=is_told_here, advice=advice)


@contextlib.contextmanager
def explained(failure: Callable[[str], ValueError]) -> Iterator[None]:
    """Makes a sentence of what Orbax and TensorStore raise when the disk fails; a bug stays what it is.

    Raises:
      ValueError: the failure with this cause.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if not _is_of_the_disk(error):
            raise
        cause = _cause(error)
        # What was under way with the rest hangs on the frames; at Python's exit each would complain.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise failure(cause) from error


def _cause(error: OSError | ValueError) -> str:
    if not isinstance(error, OSError):
        return _NOTES.split(str(error))[0].rpartition(": ")[2]
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}" if error.strerror else str(error)


def _is_of_the_disk(error: BaseException | None) -> bool:
    if isinstance(error, ValueError) and _STATUS.match(str(error)):
        return True
    return isinstance(error, OSError | json.JSONDecodeError)


def silence_threads() -> None:
    """Lets nobody but the main thread tell of a failing disk: Orbax's threads would, with ten tracebacks."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    # Of an array whose others failed, before its turn came.
    warnings.filterwarnings("ignore", r"coroutine '.*\.write_fragment' was never awaited", RuntimeWarning)
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_of_the_disk(record.exc_info[1]))


@dataclasses.dataclass(frozen=True)
class _Unraisable:
    """Leaves out what TensorStore says when Orbax no longer waits for the rest of what has failed."""

    told: Callable[[Any], Any]
    """The hook that was there before: Python's own, or pytest's, which makes a failure of it."""

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.told(unraisable)
