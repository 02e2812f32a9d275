"""What injected faults do: to the process, its threads, its batches, its state, and its checkpoints."""

import ctypes
import dataclasses
import os
import pathlib
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.checkpoint import all_steps, step_folder
from zaya_jax.data.reading.batch import Batch
from zaya_jax.parallel.mesh import device_number
from zaya_jax.train.step.integrity import row_checksums
from zaya_jax.train.step.state import TrainState
from zaya_jax.train.step.train_step import Tamper

_BLOCK = 2**24
"""Number of bytes that a process allocates at a time when it exhausts its memory."""


def _hold_lock(seconds: float) -> None:
    """Sleeps while no other Python thread can run."""
    # PyDLL, unlike CDLL, holds the interpreter lock during the call.
    ctypes.PyDLL(None).sleep(int(min(seconds, 2**31 - 1)))


def _crash(seconds: float) -> None:
    """Writes to address 0, which no process may."""
    del seconds
    ctypes.memset(0, 1, 1)


def _fail(seconds: float) -> None:
    del seconds
    raise RuntimeError("an injected fault")


def _fail_in_thread(seconds: float) -> None:
    """Raises an exception in a thread that nothing waits for."""
    threading.Thread(target=_fail, args=(seconds,), name="injected fault").start()


def _exhaust_memory(seconds: float) -> None:
    """Allocates memory until the kernel refuses more."""
    del seconds
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    # A limit of this process alone: the kernel would otherwise end the largest process of the machine.
    limit = pages * resource.getpagesize() + 8 * _BLOCK
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    # Referenced, so that no block is freed.
    blocks = []
    while True:
        blocks.append(bytearray(_BLOCK))


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


def _flip_byte(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def damage_newest(run_folder: pathlib.Path, kind: str) -> int | None:
    """Damages the largest file of the newest checkpoint; returns its step, or None without checkpoints.

    Args:
      run_folder: folder of the run.
      kind: one of `CHECKPOINT_FAULTS`.
    """
    steps = all_steps(run_folder)
    if not steps:
        return None
    files = [path for path in step_folder(run_folder, steps[-1]).rglob("*") if path.is_file()]
    # The largest file has the arrays, whose hashes a restore verifies.
    CHECKPOINT_FAULTS[kind](max(files, key=lambda path: path.stat().st_size))
    return steps[-1]


PROCESS_FAULTS: dict[str, Callable[[float], None]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda _: os.abort(),
    "segfault": _crash,
    "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "pause": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": _fail,
    "fail_thread": _fail_in_thread,
    "exhaust": _exhaust_memory,
    "hang": time.sleep,
    "lock": _hold_lock,
}
"""Faults of a process before a step: it is killed, aborts, writes to invalid memory, receives SIGTERM, is
stopped as a whole, raises an exception in its main thread or in another one, runs out of memory, hangs in its
main thread, or hangs while it holds the interpreter lock."""
CHECKPOINT_FAULTS: dict[str, Callable[[pathlib.Path], None]] = {
    "corrupt": _flip_byte,
    "truncate": lambda path: os.truncate(path, path.stat().st_size // 2),
    "remove": pathlib.Path.unlink,
}
"""Damages of the newest checkpoint: a flipped bit, a truncated file and a missing one."""
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
