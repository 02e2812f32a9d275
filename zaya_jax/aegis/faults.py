"""Faults on order, for whoever wants to see what a run makes of them.

    ZAYA_FAULT="hang@step=12:process=1,kill@step=40" zaya launch --processes=2 --restarts=3 -- train

Each strikes once in the life of a run, whoever repeats the step; a file in the run folder says so.
"""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np

from zaya_jax.data.batch import Batch
from zaya_jax.fields import did_you_mean

VARIABLE = "ZAYA_FAULT"
FOLDER = "faults"
_ORDER = re.compile(
    r"(?P<kind>\w+)@step=(?P<step>\d+)(:process=(?P<process>\d+))?(:seconds=(?P<seconds>[\d.]+))?"
)
FOR_EVER = 1e9
"""Seconds."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault on order.

    Attributes:
      kind: one of `KINDS`.
      step: before which it strikes.
      process: that it strikes; None for all.
      seconds: that it lasts, of those that end by themselves.
    """

    kind: str
    step: int
    process: int | None = None
    seconds: float = FOR_EVER

    @property
    def name(self) -> str:
        """Of the file that says that it has struck."""
        return f"{self.kind}-{self.step}"


def _hold_lock(seconds: float) -> None:
    """No other thread of Python runs meanwhile: PyDLL, other than CDLL, keeps the interpreter's lock."""
    ctypes.PyDLL(None).sleep(int(min(seconds, 2**31 - 1)))


def _fail(seconds: float) -> None:
    del seconds
    raise RuntimeError(f"a fault on order, by {VARIABLE}")


KINDS: dict[str, Callable[[float], None] | None] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda _: os.abort(),
    "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "pause": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": _fail,
    "hang": time.sleep,
    "lock": _hold_lock,
    "nan": None,
}
"""What each does to its process: it is killed, aborts, is told to end, is stopped as a whole, raises, hangs
in its main thread, or in a call that no other thread gets past; `nan` spoils what a batch teaches."""


def parse_faults(text: str) -> list[Fault]:
    """The faults of an order, as in the example above.

    Raises:
      ValueError: for what is none.
    """
    return [_parse(word) for word in filter(None, text.split(","))]


def _parse(word: str) -> Fault:
    found = _ORDER.fullmatch(word.strip())
    if found is None:
        raise ValueError(
            f'{VARIABLE} has "{word}"; a fault is KIND@step=N, and then maybe :process=P and :seconds=S'
        )
    kind, step, process, seconds = found.group("kind", "step", "process", "seconds")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f"known are {', '.join(KINDS)}"
        raise ValueError(f'{VARIABLE} has the fault "{kind}"; {hint}')
    return Fault(kind, int(step), None if process is None else int(process), float(seconds or FOR_EVER))


class Faults:
    """Strikes with the faults of an order.

    Args:
      faults: that are on order.
      run_folder: of the run.
      process: that this is.
    """

    def __init__(self, faults: list[Fault], run_folder: str, process: int):
        self._faults = [each for each in faults if each.process in (None, process)]
        self._folder, self._process = pathlib.Path(run_folder) / FOLDER, process

    def among(self, batches: Iterator[Batch], *, first_step: int) -> Iterator[Batch]:
        """The batches of the steps from a first one on; before its own each fault strikes."""
        if not self._faults:
            return batches
        return (self._strike(step, batch) for step, batch in enumerate(batches, start=first_step))

    def _strike(self, step: int, batch: Batch) -> Batch:
        for fault in self._faults:
            if fault.step == step and self._is_new(fault):
                act = KINDS[fault.kind]
                if act is None:
                    spoilt = np.full_like(batch.weights_BT, np.nan)
                    batch = dataclasses.replace(batch, weights_BT=spoilt)
                else:
                    act(fault.seconds)
        return batch

    def _is_new(self, fault: Fault) -> bool:
        """Whether it has not struck yet; from now on it has."""
        self._folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (self._folder / f"{fault.name}-{self._process}").touch(exist_ok=False)
            return True
        return False
