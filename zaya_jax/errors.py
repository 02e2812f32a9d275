"""Errors that a command reports in one sentence, and the exit code of each. Imports no package of ours."""

from typing import Final

USER_ERROR: Final = 2
DAMAGED: Final = 65
"""EX_DATAERR of sysexits.h."""
RESUMABLE: Final = 75
"""EX_TEMPFAIL of sysexits.h: the same command continues the run."""
DIVERGED: Final = 76
TIMED_OUT: Final = 124
"""As coreutils' `timeout` has it."""
INTERRUPTED: Final = 130
"""128 plus SIGINT."""
PIPE_CLOSED: Final = 141
"""128 plus SIGPIPE."""


class UserError(ValueError):
    """A mistake that the user can fix: the message says what is wrong, where, and how to fix it.

    Only code that has such a message raises it. A plain ValueError, also one that Python or a library raises
    inside this package, is a bug and keeps its traceback.

    Attributes:
      exit_code: exit code of a command that ends with this error.
    """

    exit_code: int = USER_ERROR


class DamagedError(UserError):
    """A file does not hold what was written to it: restore a copy; no option helps."""

    exit_code = DAMAGED


def exit_code_of(error: BaseException) -> int | None:
    """Exit code of a command that ends with an error that has a message for the user; None for a bug.

    A failure of the operating system, such as a full disk or a missing file, is the user's to fix.
    """
    if isinstance(error, OSError):
        return USER_ERROR
    return getattr(error, "exit_code", None)
