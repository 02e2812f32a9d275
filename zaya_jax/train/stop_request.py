"""SIGTERM, SIGHUP and Ctrl-C: a run finishes the current step and saves its state before it exits."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from zaya_jax.errors import INTERRUPTED, RESUMABLE
from zaya_jax.parallel.processes.stop_agreement import StopAgreement
from zaya_jax.platform.stop_signals import announce_stop, stop_signals

SAVE_FAILED = 0
"""Used like a signal number, for a checkpoint that could not be written; no signal has this number."""


class Stopped(Exception):
    """A run was stopped. Its state is saved, and the same command resumes it.

    Attributes:
      step: last saved step.
      exit_code: exit code for the process.
    """

    def __init__(self, signal_number: int, step: int):
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.exit_code = INTERRUPTED if signal_number == signal.SIGINT else RESUMABLE


class StopRequest:
    """Catches `stop_signals` while it is entered: the first one is recorded, a second one acts at once.

    Python would raise KeyboardInterrupt wherever the main thread is, even while it holds a lock of another
    library, which would then block for ever. Here a signal sets a number that the loop reads between steps.
    """

    signal_number: int | None = None
    """Signal that this process has received; None without one."""

    def __init__(self):
        self._agreement = StopAgreement()

    def propose(self, number: int) -> None:
        """Requests a stop of all processes, as a signal would."""
        self._agreement.propose(str(number))

    def reached(self, step: int) -> int | None:
        """Returns the signal number because of which all processes stop after this step; None to continue."""
        if self.signal_number is not None:
            self.propose(self.signal_number)
        word = self._agreement.reached(step)
        return None if word is None else int(word)

    def __enter__(self) -> "StopRequest":
        self._agreement.__enter__()
        self._before: dict[int, Any] = {}
        # Python allows signal handlers in the main thread alone; a notebook may train in another one.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._record) for number in stop_signals()}
        return self

    def __exit__(self, *exception: Any) -> None:
        self._agreement.__exit__(*exception)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal_number is not None and number == signal.SIGHUP:
            return  # the kernel and the shell both send it when a terminal is closed: no hurry is meant
        if self.signal_number is not None:  # a second request: do not wait for the save
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal_number = number
        announce_stop("\nstopping when this step is saved")
