"""SIGTERM and Ctrl-C: the step under way is finished and its state saved before a run leaves."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from zaya_jax.parallel.agreement import Agreement

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REQUEUE = 75
"""The exit code behind a SIGTERM, sysexits.h's EX_TEMPFAIL: a scheduler is to give the same command again."""
INTERRUPTED = 130
"""The exit code behind Ctrl-C, as of any program in a shell."""

SAVE_FAILED = 0
"""Stands among the signals' numbers for a checkpoint that could not be written; no signal has it."""


class Stopped(Exception):
    """A run that was asked to stop. All that it did is saved, and the same command goes on.

    Attributes:
      step: that was saved last.
      exit_code: with which the process is to leave.
    """

    def __init__(self, signal_number: int, step: int):
        super().__init__(f"stopped behind step {step}")
        self.step = step
        self.exit_code = INTERRUPTED if signal_number == signal.SIGINT else REQUEUE


class StopRequest:
    """Listens to both signals while it is a context: the first is kept, a second one acts at once.

    Python would raise KeyboardInterrupt wherever the main thread is, a lock of another library's included,
    which then waits for ever; here a signal sets a number, and the loop looks at it between two steps.
    """

    signal_number: int | None = None
    """The signal that came to this process; None before one does."""

    def __init__(self):
        self._agreement = Agreement()

    def propose(self, number: int) -> None:
        """Asks all processes to stop, as a signal would."""
        self._agreement.propose(str(number))

    def reached(self, step: int) -> int | None:
        """The number for which all stop behind a step, whichever process it came to; None to go on."""
        if self.signal_number is not None:
            self.propose(self.signal_number)
        word = self._agreement.reached(step)
        return None if word is None else int(word)

    def __enter__(self) -> "StopRequest":
        self._agreement.__enter__()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python gives signals to no other
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: Any) -> None:
        self._agreement.__exit__(*exception)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal_number is not None:  # asked twice: whoever it is will not wait
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal_number = number
        # Not print: a handler may run within another print, whose lock is taken.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nstopping when this step is saved\n")
