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

_SENTENCE = re.compile(r"\.?\s*\n|\. ")
"""What ends the first sentence of an error; others are advice to who writes the program."""
_LONGEST = 200
"""Characters of a cause: some have a whole tree in them."""


class SaveFailed(Shared):
    """A checkpoint that the disk did not take."""

    def __init__(self, what: str, *, is_told_here: bool = True):
        advice = "; mend that, and the same command goes on"
        super().__init__(what, is_told_here=is_told_here, advice=advice)


@contextlib.contextmanager
def explained(failure: Callable[[str], ValueError], *, reading: bool = False) -> Iterator[None]:
    """Makes a sentence of what Orbax and TensorStore raise when the disk fails; a bug stays what it is.

    Args:
      failure: the error for a cause.
      reading: takes whatever is raised for the fault of what is read. Orbax has no exception for a checkpoint
        that is of another network, or that somebody wrote by hand: it raises what its parsing comes upon.

    Raises:
      ValueError: the failure with this cause.
    """
    try:
        yield
    except Exception as error:
        if not (reading or _is_of_the_disk(error)):
            raise
        cause = _cause(error)
        # What was under way with the rest hangs on the frames; at Python's exit each would complain.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise failure(cause) from error


def _cause(error: Exception) -> str:
    if isinstance(error, ValueError) and _STATUS.match(str(error)):
        return _NOTES.split(str(error))[0].rpartition(": ")[2]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    first = _SENTENCE.split(str(error).strip())[0]
    if not isinstance(error, OSError | ValueError):  # a KeyError says nothing but the key
        first = f"{type(error).__name__}: {first}"
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."


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
    # What a thread of Orbax raises, whoever waits for its future hears.
    is_told_twice = "_SignalingThread" in record.getMessage()
    return not (is_told_twice or (record.exc_info and _is_of_the_disk(record.exc_info[1])))


@dataclasses.dataclass(frozen=True)
class _Unraisable:
    """Leaves out what TensorStore says when Orbax no longer waits for the rest of what has failed."""

    told: Callable[[Any], Any]
    """The hook that was there before: Python's own, or pytest's, which makes a failure of it."""

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.told(unraisable)
