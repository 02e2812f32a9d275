"""One of the processes whose checkpoints `zaya bench checkpoint` times.

`python -m zaya_jax.bench.checkpoint_process FOLDER GIB ROUNDS`, started by `zaya_jax.parallel.launch`.
Process 0 writes FOLDER/times.json.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import pickle
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from zaya_jax import durable
from zaya_jax.checkpoint import Checkpoints, Retention, step_folder
from zaya_jax.parallel import hosts
from zaya_jax.parallel.mesh import data_mesh, replicated, sharded
from zaya_jax.parallel.process_group import find_process_group

GATHER, ORBAX, OURS, HASHES, PLAIN, COPY = (
    "one writer, all gathered",
    "Orbax, async",
    "ours",
    "hashes alone, of ours",
    "plain files",
    "copy in memory",
)
"""What is timed, by the name that its row has."""
TIMES_FILE = "times.json"
LIMIT_SECONDS = 600.0
"""That one process waits for the others, each time."""
WARM_UP_GIB = 2**-10
STEP = 1
NUM_LARGE, LAYERS, WIDTH, BUCKET_ROWS = 8, 16, 256, 64
QUANTUM = LAYERS * WIDTH
"""Each large array has a multiple of so many values."""
LOOPBACK = "127.0.0.1"
PLAIN_PART = 64 * 2**20

Times = tuple[float, float]
"""Seconds until training goes on, and until the checkpoint is safe."""
Save = Callable[[pathlib.Path], Callable[[], None]]
"""Writes into a new folder, and returns what waits until that is safe; between the two, training goes on."""


@dataclasses.dataclass(frozen=True)
class State:
    """Like a run's under ZeRO-1 with Muon: weights that each device has, moments of which it has a share."""

    weights: Any
    training: Any

    @property
    def tree(self) -> dict[str, Any]:
        """All of it, as one checkpoint without parts."""
        return {"weights": self.weights, "training": self.training}

    @property
    def num_bytes(self) -> int:
        """Of all arrays, each counted once."""
        return sum(array.nbytes for array in jax.tree.leaves(self.tree))


def main(argv: Sequence[str]) -> None:
    """Times all ways of saving in turn, together with the other processes."""
    folder, gib, rounds = pathlib.Path(argv[0]), float(argv[1]), int(argv[2])
    jax.config.update("jax_platforms", "cpu")
    with hosts.joined(find_process_group(os.environ), limit_seconds=LIMIT_SECONDS):
        measure(
            make_state(WARM_UP_GIB), folder, rounds=1
        )  # Orbax imports a second's worth as it first writes
        state = make_state(gib)
        times = measure(state, folder, rounds=rounds)
        if hosts.is_first():
            found = {"bytes": state.num_bytes, "times": times}
            durable.write(folder / TIMES_FILE, json.dumps(found))


def make_state(gib: float, *, seed: int = 0) -> State:
    """Arrays of so many GiB in all, made on the devices; the bits are random, so that nothing compresses."""
    mesh = data_mesh()
    size = int(gib * 2**30) // 4 // NUM_LARGE // QUANTUM * QUANTUM
    matrices = dict.fromkeys(("attention", "up", "down"), (LAYERS, size // QUANTUM, WIDTH))
    buckets = {f"bucket_{number}": (BUCKET_ROWS, size // BUCKET_ROWS) for number in range(NUM_LARGE // 2)}
    weights = {"embedding": (size // WIDTH, WIDTH), "layers": {**matrices, "norm": (LAYERS, WIDTH)}}
    training = {"buckets": buckets, "router_bias": (LAYERS, LAYERS)}

    def fill(shapes: Any, key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
        keys = jax.random.split(key, len(leaves))
        bits = [jax.random.bits(key, shape) for key, shape in zip(keys, leaves, strict=True)]
        return structure.unflatten([jax.lax.bitcast_convert_type(each, jnp.float32) for each in bits])

    def make() -> tuple[Any, Any]:
        first, second = jax.random.split(jax.random.key(seed))
        return fill(weights, first), fill(training, second)

    places = replicated(mesh), {"buckets": sharded(mesh), "router_bias": replicated(mesh)}
    return State(*jax.block_until_ready(jax.jit(make, out_shardings=places)()))


def measure(state: State, folder: pathlib.Path, *, rounds: int) -> dict[str, list[Times]]:
    """Times of each way by round, of the process that took longest. What is written is removed at once."""
    with linked() as links:
        saves = {
            GATHER: lambda place: save_gathered(state, place, links),
            ORBAX: orbax_saver(state),
            OURS: our_saver(state),
            PLAIN: lambda place: write_plain(state.num_bytes, place),
            COPY: copier(state),
        }
        times: dict[str, list[Times]] = {name: [] for name in (*saves, HASHES)}
        for number in range(rounds):
            for name, save in saves.items():
                place = folder / f"{number}-{name.partition(',')[0].replace(' ', '-')}"
                times[name].append(timed(save, place))
                if name == OURS:
                    times[HASHES].append(timed(hash_own, step_folder(place, STEP)))
                hosts.first_does(
                    "remove", lambda place=place: shutil.rmtree(place), limit_seconds=LIMIT_SECONDS
                )
    return times


def timed(save: Save, place: pathlib.Path) -> Times:
    """Seconds that a save blocks, and that it takes, of the slowest process; all begin together."""

    def prepare() -> None:
        place.mkdir(parents=True, exist_ok=True)
        os.sync()  # what others wrote before is not to be written on this one's time

    hosts.first_does("prepare", prepare, limit_seconds=LIMIT_SECONDS)
    start = time.perf_counter()
    wait = save(place)
    blocked = time.perf_counter() - start
    wait()
    safe = time.perf_counter() - start
    said = hosts.gather("times", [blocked, safe], limit_seconds=LIMIT_SECONDS)
    return max(each[0] for each in said), max(each[1] for each in said)


def orbax_saver(state: State) -> Save:
    """Orbax's own checkpointer as its guide has it, of the whole state."""
    checkpointer = ocp.StandardCheckpointer()

    def save(place: pathlib.Path) -> Callable[[], None]:
        checkpointer.save(place.absolute() / "state", state.tree)
        return checkpointer.wait_until_finished

    return save


def our_saver(state: State) -> Save:
    """What a run calls: hashes, manifest, all on the disk, committed."""

    def save(place: pathlib.Path) -> Callable[[], None]:
        checkpoints = Checkpoints(place, retention=Retention(newest=1))
        checkpoints.save(STEP, weights=state.weights, training=state.training)
        return checkpoints.wait

    return save


def save_gathered(state: State, place: pathlib.Path, links: Sequence[socket.socket]) -> Callable[[], None]:
    """Brings all shards to process 0, which writes one file as `torch.save` does: training waits for it."""
    arrays = [gathered(array, links) for array in jax.tree.leaves(state.tree)]
    if hosts.is_first():
        file = place / "state.pickle"
        with file.open("wb") as stream:
            pickle.dump(arrays, stream, protocol=5)
        durable.sync(file)
        durable.sync(place)
    hosts.gather("written", None, limit_seconds=LIMIT_SECONDS)
    return _nothing


def gathered(array: jax.Array, links: Sequence[socket.socket]) -> np.ndarray | None:
    """An array whole in process 0, None in the others, which send it their rows: no byte travels twice."""
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0)) if hosts.is_first() else None
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start)
    if not hosts.is_first():
        for shard in shards:
            links[0].sendall(_bytes_of(np.asarray(shard.data)))
        return None
    whole = np.empty(array.shape, array.dtype)
    for shard in shards:
        whole[shard.index] = shard.data
    own, *others = np.split(whole, hosts.num_processes())  # a mesh has the devices of a process side by side
    assert own.nbytes == sum(shard.data.nbytes for shard in shards)
    for link, rows in zip(links, others, strict=True):
        _receive(link, _bytes_of(rows))
    return whole


@contextlib.contextmanager
def linked() -> Iterator[list[socket.socket]]:
    """Connections between process 0 and each of the others, in their order."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        server.settimeout(LIMIT_SECONDS)
        ports = hosts.gather("ports", server.getsockname()[1])
        if hosts.is_first():
            links = [socket.create_connection((LOOPBACK, port), LIMIT_SECONDS) for port in ports[1:]]
        else:
            links = [server.accept()[0]]
        for link in links:
            stack.enter_context(link).settimeout(LIMIT_SECONDS)
        yield links


def _receive(link: socket.socket, into: memoryview) -> None:
    while into:
        received = link.recv_into(into)
        if not received:
            raise ConnectionError("another process has ended before its time")
        into = into[received:]


def _bytes_of(rows: np.ndarray) -> memoryview:
    return memoryview(rows.data).cast("B")


def hash_own(folder: pathlib.Path) -> Callable[[], None]:
    """Hashes this process' share of the files, which the system still has in memory, as in a save."""
    paths = [folder / name for name in durable.list_files(folder)]
    files = sorted(paths, key=lambda file: file.stat().st_size, reverse=True)
    for file in files[hosts.process() :: hosts.num_processes()]:
        durable.content_hash(file)
    return _nothing


def write_plain(num_bytes: int, place: pathlib.Path) -> Callable[[], None]:
    """The disk alone: each process writes its share of the bytes from one buffer, as dd does."""
    size = num_bytes // hosts.num_processes()
    part = memoryview(_random_bytes())
    file = place / f"plain_{hosts.process()}"
    with file.open("wb", buffering=0) as stream:
        for start in range(0, size, len(part)):
            stream.write(part[: size - start])
    durable.sync(file)
    return _nothing


@functools.cache
def _random_bytes() -> bytes:
    return os.urandom(PLAIN_PART)


def copier(state: State) -> Save:
    """Memory alone: each process copies its share of the state once, to memory that it has already."""
    shares = list(own_shares(state))
    target = np.ones(
        max(share.size for share in shares), np.float32
    )  # of zeros, Linux would give no page yet

    def save(place: pathlib.Path) -> Callable[[], None]:
        del place
        for share in shares:
            np.copyto(target[: share.size], share)
        return _nothing

    return save


def own_shares(state: State) -> Iterator[np.ndarray]:
    """The arrays of this process, flat, so that all processes together have each value once."""
    for array in jax.tree.leaves(state.tree):
        if array.is_fully_replicated:
            whole = np.asarray(array.addressable_data(0)).reshape(-1)
            yield np.array_split(whole, hosts.num_processes())[hosts.process()]
        else:
            yield from (np.asarray(shard.data).reshape(-1) for shard in array.addressable_shards)


def _nothing() -> None:
    """What is left to wait for where a save blocks until it is safe."""


if __name__ == "__main__":
    main(sys.argv[1:])
