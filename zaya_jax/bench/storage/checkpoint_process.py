"""One of the processes whose checkpoints `zaya bench checkpoint` times.

`zaya_jax.parallel.processes.launch` starts it as `python -m zaya_jax.bench.storage.checkpoint_process FOLDER
GIB ROUNDS`. Process 0 writes FOLDER/times.json.
"""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from zaya_jax.checkpoint import Checkpoints, Retention
from zaya_jax.files import durable
from zaya_jax.parallel.mesh import data_mesh, replicated, sharded
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import find_process_group

ORBAX, OURS, PLAIN = "Orbax, async", "ours", "plain files"
"""Names of what is timed, as in the table's rows."""
TIMES_FILE = "times.json"
LIMIT_SECONDS = 600.0
"""Timeout for each wait for the other processes."""
WARM_UP_GIB = 2**-10
STEP = 1
NUM_LARGE, LAYERS, WIDTH, BUCKET_ROWS = 8, 16, 256, 64
QUANTUM = LAYERS * WIDTH
"""The number of values of each large array is a multiple of this."""
PLAIN_PART = 64 * 2**20

Times = tuple[float, float]
"""Seconds until training continues, and until the checkpoint is durable."""
Save = Callable[[pathlib.Path], Callable[[], None]]
"""Writes into a new folder, and returns a function that waits until the checkpoint is durable. Training
continues between the two."""


@dataclasses.dataclass(frozen=True)
class State:
    """A state like that of a run with ZeRO-1 and Muon: replicated weights, partitioned moments."""

    weights: Any
    training: Any

    @property
    def tree(self) -> dict[str, Any]:
        """The whole state, as one checkpoint without parts."""
        return {"weights": self.weights, "training": self.training}

    @property
    def num_bytes(self) -> int:
        """Total bytes of all arrays, each counted once."""
        return sum(array.nbytes for array in jax.tree.leaves(self.tree))


def main(argv: Sequence[str]) -> None:
    """Times all methods in turn, together with the other processes."""
    folder, gib, rounds = pathlib.Path(argv[0]), float(argv[1]), int(argv[2])
    jax.config.update("jax_platforms", "cpu")
    with hosts.joined(find_process_group(os.environ), limit_seconds=LIMIT_SECONDS):
        # Orbax spends about a second on imports at its first write: warm up.
        measure(make_state(WARM_UP_GIB), folder, rounds=1)
        state = make_state(gib)
        times = measure(state, folder, rounds=rounds)
        if hosts.is_first():
            results = {"bytes": state.num_bytes, "times": times}
            durable.write(folder / TIMES_FILE, json.dumps(results))


def make_state(gib: float, *, seed: int = 0) -> State:
    """Creates arrays of the given total size on the devices, with random bits that do not compress."""
    mesh = data_mesh()
    # 4 bytes per float32; each of the large arrays has the same size.
    size = int(gib * 2**30) // 4 // NUM_LARGE // QUANTUM * QUANTUM
    matrices = dict.fromkeys(("attention", "up", "down"), (LAYERS, size // QUANTUM, WIDTH))
    buckets = {f"bucket_{number}": (BUCKET_ROWS, size // BUCKET_ROWS) for number in range(NUM_LARGE // 2)}
    weights = {"embedding": (size // WIDTH, WIDTH), "layers": {**matrices, "norm": (LAYERS, WIDTH)}}
    training = {"buckets": buckets, "router_bias": (LAYERS, LAYERS)}

    def fill(shapes: Any, key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
        keys = jax.random.split(key, len(leaves))
        # Random bits instead of random numbers: they are faster to make and do not compress either.
        bits = [jax.random.bits(key, shape) for key, shape in zip(keys, leaves, strict=True)]
        return structure.unflatten([jax.lax.bitcast_convert_type(each, jnp.float32) for each in bits])

    def make() -> tuple[Any, Any]:
        first, second = jax.random.split(jax.random.key(seed))
        return fill(weights, first), fill(training, second)

    places = replicated(mesh), {"buckets": sharded(mesh), "router_bias": replicated(mesh)}
    return State(*jax.block_until_ready(jax.jit(make, out_shardings=places)()))


def measure(state: State, folder: pathlib.Path, *, rounds: int) -> dict[str, list[Times]]:
    """Returns the times of each method by round, from the slowest process; removes each checkpoint."""
    # The methods alternate, so that a slow period of the disk affects all of them.
    saves = {
        ORBAX: orbax_saver(state),
        OURS: our_saver(state),
        PLAIN: lambda place: write_plain(state.num_bytes, place),
    }
    times: dict[str, list[Times]] = {name: [] for name in saves}
    for number in range(rounds):
        for name, save in saves.items():
            place = folder / f"{number}-{name.partition(',')[0].replace(' ', '-')}"
            times[name].append(timed(save, place))
            hosts.run_on_first(
                "remove", lambda place=place: shutil.rmtree(place), limit_seconds=LIMIT_SECONDS
            )
    return times


def timed(save: Save, place: pathlib.Path) -> Times:
    """Returns how long a save blocks and takes in the slowest process; all processes start together."""

    def prepare() -> None:
        place.mkdir(parents=True, exist_ok=True)
        os.sync()  # flush earlier writes, so that this save does not pay for them

    hosts.run_on_first("prepare", prepare, limit_seconds=LIMIT_SECONDS)
    # The call above ends in all processes at about the same time.
    start = time.perf_counter()
    wait = save(place)
    blocked = time.perf_counter() - start
    wait()
    safe = time.perf_counter() - start
    times = hosts.gather("times", [blocked, safe], limit_seconds=LIMIT_SECONDS)
    # Two maxima: the process that is blocked longest need not be the last one whose data is safe.
    return max(each[0] for each in times), max(each[1] for each in times)


def orbax_saver(state: State) -> Save:
    """Orbax's own checkpointer, used as in its guide, for the whole state."""
    checkpointer = ocp.StandardCheckpointer()

    def save(place: pathlib.Path) -> Callable[[], None]:
        # Orbax accepts absolute paths only.
        checkpointer.save(place.absolute() / "state", state.tree)
        return checkpointer.wait_until_finished

    return save


def our_saver(state: State) -> Save:
    """The save of a training run: hashes, manifest, sync, commit."""

    def save(place: pathlib.Path) -> Callable[[], None]:
        checkpoints = Checkpoints(place, retention=Retention(newest=1))
        checkpoints.save(STEP, weights=state.weights, training=state.training)
        return checkpoints.wait

    return save


def write_plain(num_bytes: int, place: pathlib.Path) -> Callable[[], None]:
    """Measures the disk alone: each process writes its share of the bytes from one buffer, as dd does."""
    size = num_bytes // hosts.num_processes()
    part = memoryview(_random_bytes())
    file = place / f"plain_{hosts.process()}"
    # Python's own buffer would copy every part once more.
    with file.open("wb", buffering=0) as stream:
        for start in range(0, size, len(part)):
            stream.write(part[: size - start])
    durable.sync(file)
    return lambda: None


# Once per process: otherwise a save would be timed together with the making of random bytes.
@functools.cache
def _random_bytes() -> bytes:
    return os.urandom(PLAIN_PART)


if __name__ == "__main__":
    main(sys.argv[1:])
