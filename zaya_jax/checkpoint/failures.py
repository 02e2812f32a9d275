"""Disks that fail: one sentence of what Orbax, its threads and TensorStore say with ten tracebacks."""

import contextlib
import dataclasses
import gc
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_STATUS = re.compile(r"[A-Z_]+: ")
"""How TensorStore's errors begin, which are ValueErrors: "RESOURCE_EXHAUSTED: "."""
_NOTES = re.compile(r" \[\w+(\[\d+\])?='")
"""How begins what it appends to them: " [os_error_code='28']"."""

_SENTENCE = re.compile(r"\.?\s*\n|\. ")
"""What ends the first sentence of an error; others are advice to who writes the program."""
_LONGEST = 200
"""Characters of a cause: some have a whole tree in them."""


@contextlib.contextmanager
def explained(sentence: Callable[[str], str], *, reading: bool = False) -> Iterator[None]:
    """Makes a sentence of what Orbax and TensorStore raise when the disk fails; a bug stays what it is.

    Args:
      sentence: of a cause.
      reading: takes whatever is raised for the fault of what is read. Orbax has no exception for a checkpoint
        that is of another network, or that somebody wrote by hand: it raises what its parsing comes upon.

    Raises:
      ValueError: with the sentence about the cause.
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
        raise ValueError(sentence(cause)) from error


def _cause(error: Exception) -> str:
    if isinstance(error, ValueError) and _STATUS.match(str(error)):
        return _NOTES.split(str(error))[0].rpartition(": ")[2]
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
