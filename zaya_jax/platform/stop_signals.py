"""Signals that stop a command: SIGTERM, SIGINT (Ctrl-C), and SIGHUP, which a closing terminal sends."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals on which a command saves its work and exits.

    SIGHUP is included unless it is already ignored: `nohup` ignores it so that a command outlives its
    terminal.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def announce_stop(message: str) -> None:
    """Writes a line to standard error. Safe in a signal handler, and must be called for every stop signal.

    Every write to a closed terminal fails with EIO. Output to one is redirected to /dev/null: otherwise the
    next print would end the command before it has saved its work.

    Args:
      message: line to write; empty for none.
    """
    # `print` could deadlock: the handler may interrupt another print, which holds its lock. Even an empty
    # write fails on a closed terminal.
    line = f"{message}\n".encode() if message else b""
    for output, text in ((_STANDARD_OUTPUT, b""), (_STANDARD_ERROR, line)):
        try:
            os.write(output, text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)


@contextlib.contextmanager
def on_stop_signals(function: Callable[[int], None]) -> Iterator[None]:
    """Calls a function with the number of each stop signal that arrives within the context."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        announce_stop("")
        function(number)

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
