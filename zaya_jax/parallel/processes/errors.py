"""Errors that concern several processes of a run. Imports no jax, so that the command line starts fast."""

from zaya_jax.errors import DAMAGED, DIVERGED, RESUMABLE, TIMED_OUT, USER_ERROR, UserError


class PeerTimeout(Exception):
    """Other processes did not reach a point where all processes meet within the time limit."""

    exit_code = TIMED_OUT


class PeerLost(Exception):
    """Another process of the run has ended, and the state on its devices is lost."""

    exit_code = RESUMABLE


class Diverged(Exception):
    """Devices that must hold equal values hold different ones; results computed since then are invalid.

    Attributes:
      hosts: names of the hosts with wrong values; empty if it is unknown which hosts are wrong.
    """

    exit_code = DIVERGED

    def __init__(self, message: str, hosts: tuple[str, ...]):
        super().__init__(message)
        self.hosts = hosts


class CollectiveError(UserError):
    """A failure of one process that all processes raise.

    Attributes:
      message: description of the failure, without advice on what to do about it.
      is_printed_here: whether this process prints the error; usually one process prints for all.
      exit_code: DAMAGED if a file's contents differ from what was written to it, else USER_ERROR.
    """

    def __init__(self, message: str, *, is_printed_here: bool, advice: str = "", is_damage: bool = False):
        super().__init__(message + advice)
        self.message, self.is_printed_here = message, is_printed_here
        self.exit_code = DAMAGED if is_damage else USER_ERROR
