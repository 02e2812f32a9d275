"""Discrete-event simulation of the control plane of thousands of processes.

Each simulated process runs the protocol of a real one (`zaya_jax.parallel.processes.tree.protocol`) with the
same exchanges, names and values, so that messages and bytes are counted, not derived. Only time is a model: a
process handles one message after another, each message costs its sender and its receiver CPU time, and
arrives some time after it was sent.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from zaya_jax.bench.control.phases import (
    COMMIT,
    DEVICES,
    FILES,
    MERGE,
    PHASES,
    SAME,
    SERVICE,
    START,
    STOP,
    WRITERS,
    PhaseCost,
    described_files,
    writing_processes,
)
from zaya_jax.parallel.processes.consistency import count_digests
from zaya_jax.parallel.processes.tree.exchanges import first_known, join
from zaya_jax.parallel.processes.tree.links import encode
from zaya_jax.parallel.processes.tree.protocol import Merge, Message, TreeNode
from zaya_jax.parallel.processes.tree.shape import FAN_OUT, place_of

_HOST_CHARACTERS = 12
"""Length of the name of a host in the list that goes down the tree."""
_DIGEST = "0" * 32


@dataclasses.dataclass(frozen=True)
class Costs:
    """What messages cost, in seconds.

    Attributes:
      message: CPU time of a process for a message, at either end.
      per_byte: CPU time of a process per byte of a message, at either end.
      latency: time between two processes, without the CPU time of both.
      register: CPU time of a process for one child in the rendezvous.
      first_register: CPU time of process 0 for the rendezvous itself.
      start: CPU time of another process for its start, without jax's service.
      serve: CPU time of the process of jax's service for one process that connects.
      first_serve: CPU time of that process for its own start, while processes start.
      start_service: CPU time of process 0 to start that process and to connect with it.
      connect: CPU time of another process to connect with jax's service.
      describe: CPU time of process 0 for the devices of one process, which jax collects and lists.
      first_describe: CPU time of each process to initialize its own device.
      file: CPU time of process 0 for a file in the manifest of a checkpoint.
      publish: time of process 0 to write a manifest and rename the folder, without that.
      merge: CPU time of process 0 to merge the indexes of one process.
      first_merge: CPU time of process 0 for the merge itself.
    """

    message: float
    per_byte: float
    latency: float
    register: float
    first_register: float
    start: float
    serve: float
    first_serve: float
    start_service: float
    connect: float
    describe: float
    first_describe: float
    file: float
    publish: float
    merge: float
    first_merge: float


class Simulation:
    """Simulates phases of a run one after the other.

    Args:
      num_processes: number of processes.
      costs: costs of messages.
      cores: number of cores that all processes share; None if each has its own.
      fan_out: maximum number of children of a process in the tree.
      writers: about how many processes write a checkpoint, of more.
    """

    def __init__(
        self,
        num_processes: int,
        costs: Costs,
        *,
        cores: int | None = None,
        fan_out: int = FAN_OUT,
        writers: int = WRITERS,
    ):
        self._count, self._costs, self._fan_out = num_processes, costs, fan_out
        self._writers = writing_processes(num_processes, writers)
        # Times at which each core and each process has done its work.
        self._cores = None if cores is None else [0.0] * cores
        # The process of jax's service has the number after the last one.
        self._free = [0.0] * (num_processes + 1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = self._begin = 0.0
        self._messages = self._bytes = 0
        self._cpu = self._service_cpu = 0.0
        self._encoded: tuple[Message, int] | None = None
        # What a process does when a result or a posted message has arrived.
        self._waiting: list[Callable[[TreeNode], bool] | None] = [None] * num_processes
        self._nodes = [self._make_node(number) for number in range(num_processes)]

    def run(self, names: Sequence[str] = PHASES) -> dict[str, PhaseCost]:
        """Returns the costs of phases by name."""
        phases = {START: self._start, SERVICE: self._service, DEVICES: self._devices, SAME: self._same}
        phases |= {COMMIT: self._commit, STOP: self._stop, MERGE: self._merge}
        return {name: self._measure(phases[name]) for name in names}

    # Phases

    def _start(self) -> None:
        """All connect with their parents, whose addresses they derive."""
        self._incomplete = [len(node.place.children) for node in self._nodes]
        self._work(0, self._costs.first_register, _nothing)
        for number in range(1, self._count):
            come = functools.partial(self._come, number)
            self._work(number, self._costs.start, functools.partial(self._deliver, come))

    def _come(self, child: int) -> None:
        parent = self._nodes[child].place.parent
        assert parent is not None
        self._messages += 0 if parent else 1
        # Measured in process 0, which its children know. Another parent answers that it is the right one.
        cost = self._costs.register + (self._costs.message if parent else 0.0)
        # A first message says all of a process without children.
        is_complete = not self._nodes[child].place.children
        then = functools.partial(self._complete_child, parent) if is_complete else _nothing
        self._work(parent, cost, then)

    def _complete_child(self, parent: int) -> None:
        self._incomplete[parent] -= 1
        if self._incomplete[parent]:
            return
        place = self._nodes[parent].place
        if place.parent is None:
            self._hand_down(0)
            return
        # The hosts of the subtree go up.
        above, cost = place.parent, self._cost_of_hosts(place.end - parent)
        self._messages += 0 if above else 1
        complete = functools.partial(self._complete_child, above)
        arrive = functools.partial(self._work, above, cost, complete)
        self._work(parent, cost, functools.partial(self._deliver, arrive))

    def _hand_down(self, number: int) -> None:
        cost = self._cost_of_hosts(self._count)
        for child in self._nodes[number].place.children:
            self._messages += 0 if number else 1
            receive = functools.partial(self._work, child, cost, functools.partial(self._hand_down, child))
            self._work(number, cost, functools.partial(self._deliver, receive))

    def _cost_of_hosts(self, count: int) -> float:
        # In JSON a name has quotes and a comma. The cost of a short message is in that of a child.
        return count * (_HOST_CHARACTERS + 3) * self._costs.per_byte

    def _service(self) -> None:
        """All connect with jax's service, which answers when the last one has."""
        self._missing = self._count
        self._service_cpu += self._costs.first_serve
        for number in range(self._count):
            seconds = self._costs.connect if number else self._costs.start_service
            self._work(number, seconds, lambda: self._deliver(self._serve))

    def _serve(self) -> None:
        self._work(self._count, self._costs.serve, self._end_of_service)

    def _end_of_service(self) -> None:
        self._missing -= 1
        for _ in range(self._count) if self._missing == 0 else ():
            self._deliver(_nothing)

    def _devices(self) -> None:
        """Each initializes its device, and process 0 then collects the descriptions of all."""
        # The others list all devices too, while process 0 does, in less time.
        collect = functools.partial(self._work, 0, self._costs.describe * self._count, _nothing)
        for number in range(self._count):
            self._work(number, self._costs.first_describe, _nothing if number else collect)

    def _same(self) -> None:
        for number in range(self._count):
            self._arrive(number, "same config", {_DIGEST: [1, number]}, count_digests)

    def _stop(self) -> None:
        def agree(node: TreeNode) -> bool:
            if "zaya/stop" not in node.notices:
                return False
            self._waiting[node.place.process] = None
            node.arrive("stop", 0, node.place.process, max)
            return True

        self._waiting = [agree] * self._count
        last = self._count - 1
        self._work(last, 0.0, lambda: self._act(last, lambda: self._nodes[last].post("zaya/stop", "signal")))

    def _commit(self) -> None:
        for number in range(self._count):
            self._arrive(number, "written", None, first_known, then=self._describe)

    def _describe(self, number: int) -> None:
        # Of processes without files nothing comes to process 0.
        described = [described_files(number)] if number in self._writers else []
        self._arrive(number, "hashes", described, join, to_all=False, then=self._publish)

    def _publish(self, number: int) -> None:
        if number:
            self._arrive(number, "commit", None, first_known)
            return
        # Process 0 waits for the disk without working.
        committed = functools.partial(self._arrive, 0, "commit", None, first_known)
        waiting = functools.partial(self._at_later, self._costs.publish, committed)
        self._work(0, self._costs.file * FILES * len(self._writers), waiting)

    def _merge(self) -> None:
        self._work(0, self._costs.first_merge + self._costs.merge * len(self._writers), _nothing)

    # Events

    def _measure(self, begin: Callable[[], None]) -> PhaseCost:
        # All processes are idle when a phase begins.
        self._begin = self._now
        self._free = [self._now] * (self._count + 1)
        self._cores = None if self._cores is None else [self._now] * len(self._cores)
        self._messages = self._bytes = 0
        self._cpu = self._service_cpu = 0.0
        begin()
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        # What the last messages cost their receivers.
        self._now = max(self._now, *self._free)
        seconds = self._now - self._begin
        return PhaseCost(seconds, self._messages, self._bytes, self._cpu, self._service_cpu)

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _at_later(self, seconds: float, event: Callable[[], None]) -> None:
        self._at(self._now + seconds, event)

    def _work(self, number: int, seconds: float, then: Callable[[], None]) -> None:
        """Lets a process work, when it has done what it had to do before and a core is free."""
        start = max(self._now, self._free[number])
        if self._cores is not None:
            start = max(start, heapq.heappop(self._cores))
            heapq.heappush(self._cores, start + seconds)
        self._free[number] = start + seconds
        self._cpu += seconds if number == 0 else 0.0
        self._service_cpu += seconds if number == self._count else 0.0
        self._at(start + seconds, then)

    def _deliver(self, event: Callable[[], None]) -> None:
        # All pairs of processes are equally far from each other.
        self._at_later(self._costs.latency, event)

    def _make_node(self, number: int) -> TreeNode:
        place = place_of(number, self._count, fan_out=self._fan_out)
        # A timer would be that of a late process; there are none.
        return TreeNode(place, send=lambda to, message: self._send(number, to, message), after=_no_timer)

    def _arrive(
        self,
        number: int,
        name: str,
        value: Any,
        merge: Merge,
        *,
        to_all: bool = True,
        then: Callable[[int], None] | None = None,
    ) -> None:
        """Lets a process take part in an exchange, and continue when its result is there."""

        def go_on(node: TreeNode) -> bool:
            if node.take(name, 0) is None:
                return False
            self._waiting[number] = None
            if then is not None:
                then(number)
            return True

        self._waiting[number] = go_on
        self._act(number, lambda: self._nodes[number].arrive(name, 0, value, merge, to_all=to_all))

    def _act(self, number: int, action: Callable[[], None]) -> None:
        action()
        # The main thread wakes up if what it waits for is there.
        waiting = self._waiting[number]
        if waiting is not None:
            waiting(self._nodes[number])

    def _send(self, sender: int, to: int, message: Message) -> None:
        # The same message goes to all children.
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = message, len(encode(message))
        size = self._encoded[1]
        if 0 in (sender, to):
            self._messages += 1
            self._bytes += size
        cost = self._costs.message + size * self._costs.per_byte
        # The network is not a bottleneck: only its ends are busy.
        self._work(sender, cost, lambda: self._deliver(lambda: self._receive(sender, to, message, cost)))

    def _receive(self, sender: int, to: int, message: Message, cost: float) -> None:
        node = self._nodes[to]
        self._work(to, cost, lambda: self._act(to, lambda: node.receive(sender, message)))


def _nothing() -> None:
    """Ends work after which nothing happens."""


def _no_timer(seconds: float, work: Callable[[], None]) -> None:
    raise AssertionError(f"no process is late, and none waits for {seconds} s")
