"""Fault injection: faults at given steps, to test how a run detects and survives them.

    ZAYA_FAULT="hang@step=12:process=1,kill@step=40" zaya launch --processes=2 --max-restarts=3 -- train

Each fault occurs once per run, even if its step is repeated: a file in the run folder records it. A slowness
(`slow@step=10:process=1:percent=30`) lasts until the end, or for `:steps=N`.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.aegis.watch.slowness import SLOW, Slowness, parse_slowness, slow_batches
from zaya_jax.checkpoint import all_steps, step_folder
from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError
from zaya_jax.fields import did_you_mean
from zaya_jax.parallel.mesh import device_number
from zaya_jax.run_folder.names import FAULTS_FOLDER
from zaya_jax.train.compiled_programs import Programs, Step, compiled_step
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.step.integrity import row_checksums
from zaya_jax.train.step.state import TrainState
from zaya_jax.train.step.train_step import Tamper

VARIABLE = "ZAYA_FAULT"
_ORDER = re.compile(
    r"(?P<kind>\w+)@step=(?P<step>\d+)"
    r"(:process=(?P<process>\d+))?(:seconds=(?P<seconds>[\d.]+))?(:steps=(?P<steps>\d+))?"
    r"(:bit=(?P<bit>\d+))?"
)
FOR_EVER = 1e9
"""Duration in seconds of a fault that does not end by itself."""
EXPONENT_BIT = 29
"""Default of a flipped bit: an update may round a lower one away, and then all devices are equal again."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
      kind: one of `KINDS`.
      step: step before which the fault occurs.
      process: process in which it occurs; None for all.
      seconds: duration, for faults that end by themselves.
      bit: number of the flipped bit of a float32 or int32 value; 0 is the lowest, 31 the sign.
    """

    kind: str
    step: int
    process: int | None = None
    seconds: float = FOR_EVER
    bit: int = EXPONENT_BIT

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


def _flip_first(array: jax.Array, bit: int) -> jax.Array:
    """Returns an array in which this process's first device has one flipped bit in its first element."""
    copies = [shard.data for shard in array.addressable_shards]
    # A copy, because arrays that JAX lends to NumPy are read-only.
    flat = np.asarray(copies[0]).copy().reshape(-1)
    width = 8 * flat.itemsize
    unsigned = flat.view(f"uint{width}")
    # Bfloat16 has the upper half of the bits of float32.
    unsigned[0] ^= unsigned.dtype.type(1 << max(bit - 32 + width, 0))
    copies[0] = jax.device_put(flat.reshape(copies[0].shape), array.addressable_shards[0].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)


def _flip_bias(state: TrainState, bit: int) -> TrainState:
    return dataclasses.replace(state, router_bias_LX=_flip_first(state.router_bias_LX, bit))


def _flip_weight(state: TrainState, bit: int) -> TrainState:
    # The same bucket in every repetition of a drill.
    name = min(state.buckets)
    return dataclasses.replace(state, buckets=state.buckets | {name: _flip_first(state.buckets[name], bit)})


def _flip_moment(state: TrainState, bit: int) -> TrainState:
    leaves, structure = jax.tree.flatten(state.optimizer)
    largest = max(range(len(leaves)), key=lambda n: leaves[n].size)  # a bucket, and no counter
    leaves[largest] = _flip_first(leaves[largest], bit)
    return dataclasses.replace(state, optimizer=jax.tree.unflatten(structure, leaves))


def _flip_input(rows: Batch, bit: int) -> Batch:
    """Flips a bit of a target on the way to the device, after the host has computed its checksum."""
    return dataclasses.replace(rows, targets_BT=_flip_first(cast(jax.Array, rows.targets_BT), bit))


def _miscompute(rows: Batch, bit: int) -> Batch:
    """Makes a device compute with another target, which no checksum shows: only a repetition does."""
    rows = _flip_input(rows, bit)
    assert rows.origin_BC2 is not None, "a wrong computation is detected only with watch.checksums"
    origin = cast(jax.Array, rows.origin_BC2)
    shards = [shard.data for shard in origin.addressable_shards]
    own = jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data), rows)
    own_origin_BC2 = own.origin_BC2.copy()
    own_origin_BC2[:, 0, 1] = row_checksums(own)
    shards[0] = jax.device_put(own_origin_BC2, origin.addressable_shards[0].device)
    placed = jax.make_array_from_single_device_arrays(origin.shape, origin.sharding, shards)
    return dataclasses.replace(rows, origin_BC2=placed)


def flip_gradient(device: int, bit: int) -> Tamper:
    """Returns a function that flips a bit of a device's first summed gradient before the update."""

    def tamper(gradients: dict[str, jax.Array]) -> dict[str, jax.Array]:
        name = min(gradients)
        x = gradients[name]
        mask = jnp.where(device_number() == device, jnp.uint32(1 << bit), jnp.uint32(0))
        first = jax.lax.bitcast_convert_type(x.reshape(-1)[0], jnp.uint32) ^ mask
        flipped = x.reshape(-1).at[0].set(jax.lax.bitcast_convert_type(first, x.dtype))
        return gradients | {name: flipped.reshape(x.shape)}

    return tamper


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
STATE_FAULTS: dict[str, Callable[[TrainState, int], TrainState]] = {
    "flip": _flip_bias,
    "flip_weight": _flip_weight,
    "flip_moment": _flip_moment,
}
"""Flipped bits in the state of one device after a step: in its replica of the router biases, and in the
weights and the moments that it alone owns."""
INPUT_FAULTS: dict[str, Callable[[Batch, int], Batch]] = {
    "flip_input": _flip_input,
    "miscompute": _miscompute,
}
"""Flipped bits in the rows of one device: after the host's checksum, and before it."""
FLIP_GRADIENT = "flip_gradient"
"""A flipped bit in one device's summed gradients, before the update."""
STALE, LOST = "stale", "lost"
"""A batch that is the previous one again, and one that is lost, so that all later ones come too early."""
CORRUPT = "corrupt"
"""A flipped bit in the newest checkpoint."""
_SINGLE_KINDS = FLIP_GRADIENT, STALE, LOST, CORRUPT, SLOW
KINDS = (*PROCESS_FAULTS, *BATCH_FAULTS, *STATE_FAULTS, *INPUT_FAULTS, *_SINGLE_KINDS)


def parse_faults(text: str) -> list[Fault | Slowness]:
    """Parses a list of faults, as in the example above.

    Raises:
      UserError: for a fault that does not parse.
    """
    return [fault for word in filter(None, text.split(",")) for fault in _parse(word)]


def _parse(word: str) -> Sequence[Fault | Slowness]:
    """Parses one word, which is a fault for each of its steps."""
    if (slowness := parse_slowness(word.strip(), variable=VARIABLE)) is not None:
        return [slowness]
    match = _ORDER.fullmatch(word.strip())
    if match is None:
        raise UserError(
            f'{VARIABLE} has "{word}"; a fault is KIND@step=N, optionally with :process=P, :seconds=S, '
            ":steps=N and :bit=B, in this order"
        )
    kind, step, process, seconds, steps, bit = match.group(
        "kind", "step", "process", "seconds", "steps", "bit"
    )
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f"it must be one of {', '.join(KINDS)}"
        raise UserError(f'{VARIABLE} has the unknown fault "{kind}"; {hint}')
    fault = Fault(
        kind,
        int(step),
        None if process is None else int(process),
        float(seconds or FOR_EVER),
        EXPONENT_BIT if bit is None else int(bit),
    )
    if fault.bit > 31:
        raise UserError(f'{VARIABLE} has "{word}"; the bits of a value are 0 to 31')
    return [dataclasses.replace(fault, step=fault.step + k) for k in range(int(steps or 1))]


class FaultInjection(Hook):
    """Injects faults at their steps.

    Args:
      faults: faults to inject.
      run_folder: folder of the run.
      process: number of this process.
    """

    def __init__(self, faults: Sequence[Fault | Slowness], run_folder: str, process: int):
        own = [each for each in faults if each.process in (None, process)]
        self._slownesses = [each for each in own if isinstance(each, Slowness)]
        self._faults = [each for each in own if isinstance(each, Fault)]
        self._of_all = [each for each in faults if isinstance(each, Fault)]
        self._folder, self._process = pathlib.Path(run_folder) / FAULTS_FOLDER, process
        self._programs: Programs | None = None

    def wrap_batches(self, context: StepContext, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Injects each fault before the batch of its step is used."""
        batches = self.among(batches, first_step=context.step + 1)
        if not self._slownesses:
            return batches
        return slow_batches(self._slownesses, context, batches, first_step=context.step + 1)

    def on_step_begin(self, context: StepContext) -> None:
        """Replaces the program of a step that damages its rows or gradients."""
        programs, step = context.programs, context.programs.step
        for fault in self._new(context.step, INPUT_FAULTS):
            step = _with_input(step, fault)
        # In all processes, because all devices run the same program.
        for fault in self._of_all:
            if fault.kind == FLIP_GRADIENT and fault.step == context.step and self._is_new(fault):
                step = _tampered_step(context, fault)
        if step is not programs.step:
            self._programs, context.programs = programs, dataclasses.replace(programs, step=step)

    def on_step(self, context: StepContext) -> None:
        """Flips a bit of the state after a step with such a fault."""
        if self._programs is not None:
            self._programs, context.programs = None, self._programs
        for fault in self._new(context.step, STATE_FAULTS):
            context.state = STATE_FAULTS[fault.kind](context.state, fault.bit)

    def among(self, batches: Iterator[Batch], *, first_step: int) -> Iterator[Batch]:
        """Returns the batches of the steps from `first_step` on, with faults injected."""
        # Without faults the batches pass unchanged, at no cost.
        return self._among(batches, first_step) if self._faults else batches

    def _among(self, batches: Iterator[Batch], first_step: int) -> Iterator[Batch]:
        # Labels travel with the batches, so that a stale batch is recognized.
        previous = None
        for step in itertools.count(first_step):
            batch = next(batches, None)
            if any(True for _ in self._new(step, (LOST,))):
                batch = next(batches, None)
            if batch is None:
                return
            current, previous = batch, previous or batch
            if any(True for _ in self._new(step, (STALE,))):
                current = previous
            yield self._inject(step, current)
            previous = batch

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


def _with_input(step: Step, fault: Fault) -> Step:
    return lambda state, rows: step(state, INPUT_FAULTS[fault.kind](rows, fault.bit))


def _tampered_step(context: StepContext, fault: Fault) -> Step:
    """Compiles the step with a flipped bit in the gradients of the process's first device."""
    mesh, devices = context.mesh, context.mesh.devices.reshape(-1)
    of_process = (n for n, device in enumerate(devices) if device.process_index == (fault.process or 0))
    return compiled_step(
        context.state,
        setup=context.run.setup(context.phase_config),
        mesh=mesh,
        num_microbatches=context.range.num_microbatches,
        tamper=flip_gradient(next(of_process), fault.bit),
    )
