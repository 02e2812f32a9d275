"""Distributes the batches of an evaluation over the devices of all processes, each with the whole weights.

Batches are formed before they are distributed, by shapes that do not depend on the number of devices, and one
device computes a whole batch. Results are therefore bitwise equal on one device and on a hundred.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax

from zaya_jax.inference.engine.decoder import cast_matrices
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.processes.remote_work import WorkCoordinator

AHEAD = 2
"""Batches in flight per device: while it computes one, the host prepares the other."""


@dataclasses.dataclass(frozen=True)
class Replica:
    """A model on one device.

    Attributes:
      model: the model.
      variables: its weights, matrices in the compute dtype.
      lock: lock of the device; without it two threads would compile the same program at the same time.
    """

    model: Zaya
    variables: Mapping
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@runtime_checkable
class DeviceWork(Protocol):
    """A batch of work for one device."""

    kind: ClassVar[str]
    """Name of the class of work, which tells another process how to decode it."""

    def run(self, replica: Replica) -> Any:
        """Computes the batch; returns a JSON value, which may be sent to another process."""

    def to_json(self) -> Any:
        """Returns the work as a JSON value for another process."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """The devices of all processes.

    Attributes:
      replicas: model on each device of this process.
      processes: process index of each device, in the order in which devices get batches.
      coordinator: sends work to the other processes; None if there are none.
    """

    replicas: tuple[Replica, ...]
    processes: tuple[int, ...]
    coordinator: WorkCoordinator | None = None

    @property
    def model(self) -> Zaya:
        """The model, the same on all devices."""
        return self.replicas[0].model

    def map(self, batches: Iterable[DeviceWork]) -> Iterator[Any]:
        """Computes batches and yields their results in order; a few batches are in flight at a time.

        Raises:
          Exception: the exception of the first batch that fails.
        """
        with DevicePool(self.replicas) as pool:
            # Bounded: the generator of batches must not run ahead of the devices and fill the memory with
            # requests.
            running: collections.deque[Callable[[], Any]] = collections.deque()
            for number, work in enumerate(batches):
                running.append(self._start(pool, self.processes[number % len(self.processes)], work))
                # Results are yielded in order, so that the oldest batch is waited for.
                if len(running) == AHEAD * len(self.processes):
                    yield running.popleft()()
            while running:
                yield running.popleft()()

    def _start(self, pool: "DevicePool", process: int, work: DeviceWork) -> Callable[[], Any]:
        """Starts a batch; returns a function that waits for its result."""
        # Process 0 distributes the work, so that this is the process itself.
        if process == 0:
            return pool.submit(work).result
        assert self.coordinator is not None, "other processes need a coordinator"
        number = self.coordinator.submit(process, [work.kind, work.to_json()])
        return functools.partial(self.coordinator.result, process, number)


class DevicePool:
    """The devices of this process, and a queue of batches for them. Use it as a context manager."""

    def __init__(self, replicas: Sequence[Replica]):
        # Threads suffice: JAX releases the GIL while a device computes.
        self._pool = concurrent.futures.ThreadPoolExecutor(AHEAD * len(replicas))
        self._free: queue.SimpleQueue[Replica] = queue.SimpleQueue()
        # Each replica is in the queue once per batch that it may have in flight.
        for replica in AHEAD * tuple(replicas):
            self._free.put(replica)

    def __enter__(self) -> "DevicePool":
        return self

    def __exit__(self, *exception: Any) -> None:
        # After an error, batches that have not started are not computed.
        self._pool.shutdown(cancel_futures=True)

    def submit(self, work: DeviceWork) -> concurrent.futures.Future:
        """Queues a batch for the next free device."""
        return self._pool.submit(self.run, work)

    def run(self, work: DeviceWork) -> Any:
        """Computes a batch on a free device, in the calling thread."""
        with self._free_replica() as replica:
            return work.run(replica)

    @contextlib.contextmanager
    def _free_replica(self) -> Iterator[Replica]:
        replica = self._free.get()
        try:
            yield replica
        finally:
            self._free.put(replica)


def make_replicas(
    model: Zaya, variables: Mapping, devices: Sequence[Any] | None = None
) -> tuple[Replica, ...]:
    """Copies a model to devices of this process.

    Args:
      model: the model.
      variables: its weights, on one device.
      devices: the devices; None for the one that has the weights.
    """
    cast = cast_matrices(model, variables)
    if devices is None:
        return (Replica(model, cast),)
    # `device_put` copies nothing that is on the device already.
    return tuple(Replica(model, jax.device_put(cast, device)) for device in devices)


def round_robin(counts: Sequence[int]) -> tuple[int, ...]:
    """Returns the process index of each device, in an order that alternates between processes.

    Args:
      counts: number of devices of each process.
    """
    return tuple(
        process for device in range(max(counts)) for process, count in enumerate(counts) if device < count
    )
