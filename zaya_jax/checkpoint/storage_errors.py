"""Errors of storage: one message instead of the tracebacks of Orbax, its threads and TensorStore."""

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

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.errors import CollectiveError

_STATUS = re.compile(r"[A-Z_]+: ")
"""Prefix of TensorStore's errors, which are ValueErrors, such as "RESOURCE_EXHAUSTED: "."""
_NOTES = re.compile(r" \[\w+(\[\d+\])?='")
"""Start of the annotations that TensorStore appends, such as " [os_error_code='28']"."""
_SENTENCE = re.compile(r"\.?\s*\n|\. ")
"""End of the first sentence of an error; the following ones are advice for programmers."""
_MAX_CAUSE = 200
"""Maximum number of characters of a cause; some messages contain a whole tree."""


class SaveFailed(CollectiveError):
    """A checkpoint that could not be written."""

    def __init__(self, what: str, *, is_printed_here: bool = True):
        advice = "; fix the cause, then run the same command again to resume"
        super().__init__(what, is_printed_here=is_printed_here, advice=advice)


@contextlib.contextmanager
def explained(failure: Callable[[str], UserError], *, reading: bool = False) -> Iterator[None]:
    """Turns errors of the disk that Orbax and TensorStore raise into one message; bugs pass through.

    Args:
      failure: function that makes the error for a cause.
      reading: whether to treat every exception as an error of the files. For a checkpoint of another model,
        or one that was edited by hand, Orbax raises whatever its parser happens to run into.

    Raises:
      UserError: made by `failure`.
    """
    try:
        yield
    except Exception as error:
        if not (reading or _is_of_the_disk(error)):
            raise
        cause = _cause(error)
        # Pending futures are referenced by the frames, and each would print a complaint at Python's exit.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise failure(cause) from error


def _cause(error: Exception) -> str:
    if isinstance(error, ValueError) and _STATUS.match(str(error)):
        return _NOTES.split(str(error))[0].rpartition(": ")[2]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    # Any other exception is reduced to its first sentence.
    first = _SENTENCE.split(str(error).strip())[0]
    if not isinstance(error, OSError | ValueError):  # the text of a KeyError is only the key
        first = f"{type(error).__name__}: {first}"
    return first if len(first) <= _MAX_CAUSE else f"{first[:_MAX_CAUSE]}..."


def _is_of_the_disk(error: BaseException | None) -> bool:
    if isinstance(error, ValueError) and _STATUS.match(str(error)):
        return True
    return isinstance(error, OSError | json.JSONDecodeError)


def silence_threads() -> None:
    """Silences tracebacks of Orbax's threads for a failing disk; the main thread reports the error."""
    # Orbax logs to absl, and its event loop to asyncio.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_should_log)
    # Raised for arrays whose turn had not come when another one failed.
    warnings.filterwarnings("ignore", r"coroutine '.*\.write_fragment' was never awaited", RuntimeWarning)
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


def _should_log(record: logging.LogRecord) -> bool:
    # An exception in a thread of Orbax is raised again in the thread that waits for its future.
    is_duplicate = "_SignalingThread" in record.getMessage()
    return not (is_duplicate or (record.exc_info and _is_of_the_disk(record.exc_info[1])))


@dataclasses.dataclass(frozen=True)
class _Unraisable:
    """Hook that ignores TensorStore's complaint about arrays that were abandoned after a failure."""

    previous: Callable[[Any], Any]
    """The hook it replaces: Python's own, or pytest's, which turns the complaint into a failure."""

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.previous(unraisable)
