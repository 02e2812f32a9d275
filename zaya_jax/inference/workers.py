"""The devices of all processes, each with the whole weights: who computes what of an evaluation.

What is to be computed is cut into batches before anyone is asked, by shapes that do not depend on how many
devices there are, and each batch is computed by one device alone. So figures are the same, bit by bit, on one
device and on a hundred.
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

from zaya_jax.inference.generate import cast_matrices
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.orders import Orders

AHEAD = 2
"""Batches that are handed to a device at a time: while it computes one, the host sees to the other."""


@dataclasses.dataclass(frozen=True)
class Replica:
    """A network on one device.

    Attributes:
      model: the network.
      variables: its weights, the matrices in the type of products.
      lock: of who gives the device work: two that met there at first would each compile for it.
    """

    model: Zaya
    variables: Mapping
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@runtime_checkable
class DeviceWork(Protocol):
    """A batch, for one device."""

    kind: ClassVar[str]
    """Its name among all kinds, by which another process knows what to make of it."""

    def run(self, replica: Replica) -> Any:
        """What comes of it: JSON, as it goes from one process to another."""

    def to_json(self) -> Any:
        """What another process needs to know of it."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """The devices that answer.

    Attributes:
      replicas: of this process.
      processes: of every device of all processes the number of its process; batches go round them.
      orders: by which those of other processes get theirs; None where there are none.
    """

    replicas: tuple[Replica, ...]
    processes: tuple[int, ...]
    orders: Orders | None = None

    @property
    def model(self) -> Zaya:
        """The network, which all have."""
        return self.replicas[0].model

    def answers(self, works: Iterable[DeviceWork]) -> Iterator[Any]:
        """What comes of batches, in their order; of many a few are on the way at a time.

        Raises:
          Exception: as the first batch that fails.
        """
        with Desk(self.replicas) as desk:
            running: collections.deque[Callable[[], Any]] = collections.deque()
            for number, work in enumerate(works):
                running.append(self._begin(desk, self.processes[number % len(self.processes)], work))
                if len(running) == AHEAD * len(self.processes):
                    yield running.popleft()()
            while running:
                yield running.popleft()()

    def _begin(self, desk: "Desk", process: int, work: DeviceWork) -> Callable[[], Any]:
        """Has a batch computed; what comes of it is there when it is asked for."""
        if process == 0:
            return desk.submit(work).result
        assert self.orders is not None, "devices of other processes are asked by orders"
        number = self.orders.give(process, [work.kind, work.to_json()])
        return functools.partial(self.orders.answer, process, number)


class Desk:
    """The devices of this process, and batches that wait for one. Use it as a context."""

    def __init__(self, replicas: Sequence[Replica]):
        self._pool = concurrent.futures.ThreadPoolExecutor(AHEAD * len(replicas))
        self._free: queue.SimpleQueue[Replica] = queue.SimpleQueue()
        for replica in AHEAD * tuple(replicas):
            self._free.put(replica)

    def __enter__(self) -> "Desk":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, work: DeviceWork) -> concurrent.futures.Future:
        """Has a batch computed as soon as a device is free."""
        return self._pool.submit(self.run, work)

    def run(self, work: DeviceWork) -> Any:
        """Computes a batch, in the thread that asks."""
        with self._one() as replica:
            return work.run(replica)

    @contextlib.contextmanager
    def _one(self) -> Iterator[Replica]:
        replica = self._free.get()
        try:
            yield replica
        finally:
            self._free.put(replica)


def make_replicas(
    model: Zaya, variables: Mapping, devices: Sequence[Any] | None = None
) -> tuple[Replica, ...]:
    """A network on some devices of this process, whole on each.

    Args:
      model: the network.
      variables: its weights, on one device.
      devices: None for that one.
    """
    cast = cast_matrices(model, variables)
    if devices is None:
        return (Replica(model, cast),)
    # What a device has already is not copied.
    return tuple(Replica(model, jax.device_put(cast, device)) for device in devices)


def deal(counts: Sequence[int]) -> tuple[int, ...]:
    """In which order devices get batches, as numbers of their processes: those of a process far apart.

    Args:
      counts: of each process its devices.
    """
    return tuple(
        process for device in range(max(counts)) for process, count in enumerate(counts) if device < count
    )
