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
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np

from zaya_jax.checkpoint import all_steps, step_folder
from zaya_jax.data.batch import Batch
from zaya_jax.fields import did_you_mean

VARIABLE = "ZAYA_FAULT"
FOLDER = "faults"
_ORDER = re.compile(
    r"(?P<kind>\w+)@step=(?P<step>\d+)"
    r"(:process=(?P<process>\d+))?(:seconds=(?P<seconds>[\d.]+))?(:steps=(?P<steps>\d+))?"
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


def _teach_nothing(batch: Batch, step: int) -> Batch:
    del step
    return dataclasses.replace(batch, weights_BT=np.full_like(batch.weights_BT, np.nan))


def _teach_noise(batch: Batch, step: int) -> Batch:
    """Targets that are tokens drawn from all that the batch has, each as likely."""
    generator = np.random.default_rng(step)
    noise_BT = generator.choice(np.unique(batch.targets_BT), batch.targets_BT.shape)
    return dataclasses.replace(batch, targets_BT=noise_BT.astype(np.int32))


def _turn_bit(state: Any) -> Any:
    """A state of which the first device of this process has one bit of its routers' biases turned."""
    bias_LX = state.router_bias_LX
    copies = [shard.data for shard in bias_LX.addressable_shards]
    flat = np.asarray(copies[0]).copy().reshape(-1)
    # Of the exponent: a lower one may be rounded away when the bias is moved, and then all are equal again.
    flat.view(np.uint32)[0] ^= 1 << 29
    copies[0] = jax.device_put(flat.reshape(copies[0].shape), bias_LX.addressable_shards[0].device)
    turned_LX = jax.make_array_from_single_device_arrays(bias_LX.shape, bias_LX.sharding, copies)
    return dataclasses.replace(state, router_bias_LX=turned_LX)


def _damage_newest(run_folder: pathlib.Path) -> None:
    """Turns a byte in the middle of the largest file of the newest checkpoint, if there is one."""
    steps = all_steps(run_folder)
    if not steps:
        return
    files = [path for path in step_folder(run_folder, steps[-1]).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


ACTS: dict[str, Callable[[float], None]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda _: os.abort(),
    "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "pause": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": _fail,
    "hang": time.sleep,
    "lock": _hold_lock,
}
"""What each does to its process before a step: it is killed, aborts, is told to end, is stopped as a whole,
raises, hangs in its main thread, or in a call that no other thread gets past."""
SPOILS: dict[str, Callable[[Batch, int], Batch]] = {"nan": _teach_nothing, "spike": _teach_noise}
"""What each makes of what the batch of a step teaches: no number, or noise, at which the loss jumps up."""
FLIP, CORRUPT = "flip", "corrupt"
"""A bit of one device's copy of what all hold is turned; a byte of the newest checkpoint is."""
KINDS = (*ACTS, *SPOILS, FLIP, CORRUPT)


def parse_faults(text: str) -> list[Fault]:
    """The faults of an order, as in the example above.

    Raises:
      ValueError: for what is none.
    """
    return [fault for word in filter(None, text.split(",")) for fault in _parse(word)]


def _parse(word: str) -> list[Fault]:
    """A fault, or as many as it has steps."""
    found = _ORDER.fullmatch(word.strip())
    if found is None:
        raise ValueError(
            f'{VARIABLE} has "{word}"; a fault is KIND@step=N, and then maybe :process=P, :seconds=S and '
            ":steps=N"
        )
    kind, step, process, seconds, steps = found.group("kind", "step", "process", "seconds", "steps")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f"known are {', '.join(KINDS)}"
        raise ValueError(f'{VARIABLE} has the fault "{kind}"; {hint}')
    number = None if process is None else int(process)
    return [Fault(kind, int(step) + k, number, float(seconds or FOR_EVER)) for k in range(int(steps or 1))]


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

    def on_state(self, step: int, state: Any) -> Any:
        """The state behind a step, in which a bit is turned where that is on order."""
        for _ in self._new(step, (FLIP,)):
            state = _turn_bit(state)
        return state

    def _strike(self, step: int, batch: Batch) -> Batch:
        for fault in self._new(step, (*ACTS, *SPOILS, CORRUPT)):
            if fault.kind in ACTS:
                ACTS[fault.kind](fault.seconds)
            elif fault.kind in SPOILS:
                batch = SPOILS[fault.kind](batch, step)
            elif self._process == 0:
                _damage_newest(self._folder.parent)
        return batch

    def _new(self, step: int, kinds: Collection[str]) -> Iterator[Fault]:
        """The faults of some kinds that strike at a step, and have not yet."""
        return (f for f in self._faults if f.step == step and f.kind in kinds and self._is_new(f))

    def _is_new(self, fault: Fault) -> bool:
        """Whether it has not struck yet; from now on it has."""
        self._folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (self._folder / f"{fault.name}-{self._process}").touch(exist_ok=False)
            return True
        return False
