"""Fault injection: faults at given steps, to test how a run detects and survives them.

    ZAYA_FAULT="hang@step=12:process=1,kill@step=40" zaya launch --processes=2 --max-restarts=3 -- train

Each fault occurs once per run, even if its step is repeated: a file in the run folder records it.
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
from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError
from zaya_jax.fields import did_you_mean
from zaya_jax.run_folder.names import FAULTS_FOLDER
from zaya_jax.train.hooks.hook import Hook, StepContext

VARIABLE = "ZAYA_FAULT"
_ORDER = re.compile(
    r"(?P<kind>\w+)@step=(?P<step>\d+)"
    r"(:process=(?P<process>\d+))?(:seconds=(?P<seconds>[\d.]+))?(:steps=(?P<steps>\d+))?"
)
FOR_EVER = 1e9
"""Duration in seconds of a fault that does not end by itself."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
      kind: one of `KINDS`.
      step: step before which the fault occurs.
      process: process in which it occurs; None for all.
      seconds: duration, for faults that end by themselves.
    """

    kind: str
    step: int
    process: int | None = None
    seconds: float = FOR_EVER

    @property
    def name(self) -> str:
        """Name of the file that records the fault."""
        return f"{self.kind}-{self.step}"


def _hold_lock(seconds: float) -> None:
    """Sleeps while no other Python thread can run."""
    # PyDLL, unlike CDLL, holds the interpreter lock during the call.
    ctypes.PyDLL(None).sleep(int(min(seconds, 2**31 - 1)))


def _fail(seconds: float) -> None:
    del seconds
    raise RuntimeError(f"an injected fault, from {VARIABLE}")


def _nan_weights(batch: Batch, step: int) -> Batch:
    del step
    return dataclasses.replace(batch, weights_BT=np.full_like(batch.weights_BT, np.nan))


def _random_targets(batch: Batch, step: int) -> Batch:
    """Replaces the targets by tokens drawn uniformly from those of the batch."""
    # Seeded by the step: the same noise in every repetition.
    generator = np.random.default_rng(step)
    noise_BT = generator.choice(np.unique(batch.targets_BT), batch.targets_BT.shape)
    return dataclasses.replace(batch, targets_BT=noise_BT.astype(np.int32))


def _flip_bit(state: Any) -> Any:
    """Returns a state in which this process's first device has one flipped bit in its router biases."""
    bias_LX = state.router_bias_LX
    copies = [shard.data for shard in bias_LX.addressable_shards]
    # A copy, because arrays that JAX lends to NumPy are read-only.
    flat = np.asarray(copies[0]).copy().reshape(-1)
    # A bit of the exponent: an update may round a lower bit away, and then all devices are equal again.
    flat.view(np.uint32)[0] ^= 1 << 29
    copies[0] = jax.device_put(flat.reshape(copies[0].shape), bias_LX.addressable_shards[0].device)
    flipped_LX = jax.make_array_from_single_device_arrays(bias_LX.shape, bias_LX.sharding, copies)
    return dataclasses.replace(state, router_bias_LX=flipped_LX)


def _damage_newest(run_folder: pathlib.Path) -> None:
    """Flips a bit in the middle of the largest file of the newest checkpoint, if there is one."""
    steps = all_steps(run_folder)
    if not steps:
        return
    files = [path for path in step_folder(run_folder, steps[-1]).rglob("*") if path.is_file()]
    # The largest file has the arrays, whose hashes a restore verifies.
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


PROCESS_FAULTS: dict[str, Callable[[float], None]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda _: os.abort(),
    "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "pause": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": _fail,
    "hang": time.sleep,
    "lock": _hold_lock,
}
"""Faults of a process before a step: it is killed, aborts, receives SIGTERM, is stopped as a whole, raises an
exception, hangs in its main thread, or hangs while it holds the interpreter lock."""
BATCH_FAULTS: dict[str, Callable[[Batch, int], Batch]] = {"nan": _nan_weights, "spike": _random_targets}
"""Faults of a batch: NaN weights, or random targets, at which the loss spikes."""
FLIP, CORRUPT = "flip", "corrupt"
"""A flipped bit in one device's replica of the state, and one in the newest checkpoint."""
KINDS = (*PROCESS_FAULTS, *BATCH_FAULTS, FLIP, CORRUPT)


def parse_faults(text: str) -> list[Fault]:
    """Parses a list of faults, as in the example above.

    Raises:
      UserError: for a fault that does not parse.
    """
    return [fault for word in filter(None, text.split(",")) for fault in _parse(word)]


def _parse(word: str) -> list[Fault]:
    """Parses one word, which is a fault for each of its steps."""
    match = _ORDER.fullmatch(word.strip())
    if match is None:
        raise UserError(
            f'{VARIABLE} has "{word}"; a fault is KIND@step=N, optionally with :process=P, :seconds=S and '
            ":steps=N"
        )
    kind, step, process, seconds, steps = match.group("kind", "step", "process", "seconds", "steps")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f"it must be one of {', '.join(KINDS)}"
        raise UserError(f'{VARIABLE} has the unknown fault "{kind}"; {hint}')
    number = None if process is None else int(process)
    return [Fault(kind, int(step) + k, number, float(seconds or FOR_EVER)) for k in range(int(steps or 1))]


class FaultInjection(Hook):
    """Injects faults at their steps.

    Args:
      faults: faults to inject.
      run_folder: folder of the run.
      process: number of this process.
    """

    def __init__(self, faults: list[Fault], run_folder: str, process: int):
        self._faults = [each for each in faults if each.process in (None, process)]
        self._folder, self._process = pathlib.Path(run_folder) / FAULTS_FOLDER, process

    def wrap_batches(self, context: StepContext, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Injects each fault before the batch of its step is used."""
        return self.among(batches, first_step=context.step + 1)

    def on_step(self, context: StepContext) -> None:
        """Flips a bit of the state after a step with such a fault."""
        for _ in self._new(context.step, (FLIP,)):
            context.state = _flip_bit(context.state)

    def among(self, batches: Iterator[Batch], *, first_step: int) -> Iterator[Batch]:
        """Returns the batches of the steps from `first_step` on, with faults injected."""
        # Without faults the batches pass unchanged, at no cost.
        if not self._faults:
            return batches
        return (self._inject(step, batch) for step, batch in enumerate(batches, start=first_step))

    def _inject(self, step: int, batch: Batch) -> Batch:
        for fault in self._new(step, (*PROCESS_FAULTS, *BATCH_FAULTS, CORRUPT)):
            if fault.kind in PROCESS_FAULTS:
                PROCESS_FAULTS[fault.kind](fault.seconds)
            elif fault.kind in BATCH_FAULTS:
                batch = BATCH_FAULTS[fault.kind](batch, step)
            elif self._process == 0:  # once, although all processes see the same checkpoint
                _damage_newest(self._folder.parent)
        return batch

    def _new(self, step: int, kinds: Collection[str]) -> Iterator[Fault]:
        """Returns the faults of some kinds at a step that have not occurred yet."""
        # A generator, so that each fault is recorded only right before it occurs.
        return (f for f in self._faults if f.step == step and f.kind in kinds and self._is_new(f))

    def _is_new(self, fault: Fault) -> bool:
        """Returns whether the fault has not occurred yet, and records that it has."""
        # A file per process, created before the fault: after a restart the fault does not occur again.
        self._folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (self._folder / f"{fault.name}-{self._process}").touch(exist_ok=False)
            return True
        return False
