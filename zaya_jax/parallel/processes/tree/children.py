"""Children of a process in the tree while the processes of a run start: which are there, and which not."""

import bisect
import contextlib
import functools
import ipaddress
import itertools
import selectors
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zaya_jax.parallel.processes.listeners import PeerConnection, encode_line, host_and_port
from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.tree.shape import Place

SEND_SECONDS = 10.0
"""Time for a message to another process, which reads at once."""
_MAX_HELLO_BYTES = 4096
# Time after which the kernel hands over a connection on which nothing has arrived.
_DEFER_SECONDS = 5

Ranges = list[list[int]]
"""Processes, as pairs of the first number and the number after the last."""


class Hello(NamedTuple):
    """First message of a process: to its parent, or to process 0 and each process on the way from there.

    A process accepts only those of its run, which they name by the coordinator's address. That is no secret.
    A secret would have to come from process 0, which answers without one, so that it protects from nobody who
    reaches process 0; and a process that derives its parent's address has not been there. The name keeps runs
    and programs apart that use the same ports; a firewall has to keep strangers out.

    Attributes:
      process: number of the process.
      num_processes: number of processes with which it was started.
      host: name of its host.
      port: port at which it listens for its children; 0 without children.
      receiver: host at which it has reached the receiver.
      coordinator: address of process 0 as this process was given it, which its children must name.
      run: address of process 0 as the receiver was given it, which may be another name of the host; empty for
        process 0.
    """

    process: int
    num_processes: int
    host: str
    port: int
    receiver: str
    coordinator: str
    run: str = ""


class ChildRegistry:
    """Registers the children of this process, and sends others of its subtree to the child next for them.

    Use it as a context manager, which ends listening; the connections with children stay.

    Args:
      group: processes of the run.
      place: place of this process in the tree.
      host: name of this process' host.
      listener: where they connect; None without children.
      selector: calls back when something arrives.

    Attributes:
      connections: connections with the children that are there, by process number.
      refusal: why the run cannot start; None if it can.
      obstacle: what keeps this process from process 0, for error messages of its children.
      port: port at which this process listens; 0 without children.
      num_messages: number of messages exchanged with others of the subtree.
    """

    def __init__(
        self,
        group: ProcessGroup,
        place: Place,
        host: str,
        listener: socket.socket | None,
        selector: selectors.BaseSelector,
    ):
        self._group, self._place, self._host = group, place, host
        self._listener, self._selector = listener, selector
        self.connections: dict[int, PeerConnection] = {}
        self.refusal: str | None = None
        self.obstacle, self.port, self.num_messages = "", 0, 0
        # By child: where it listens, its host, the hosts of its subtree if that is complete, and what is
        # missing in it.
        self._addresses: dict[int, bytes] = {}
        self._child_hosts: dict[int, str] = {}
        self._hosts: dict[int, list[str]] = {}
        self._missing: dict[int, Ranges] = {}
        # Clients that have sent no complete message yet. They cost nothing until they do.
        self._strangers: set[PeerConnection] = set()
        # Processes whose next process is missing, and which of their subtrees are there.
        self._waiting: dict[PeerConnection, int] = {}
        self._present: dict[PeerConnection, Ranges] = {}
        if listener is not None:
            self.port = listener.getsockname()[1]
            listener.setblocking(False)
            if sys.platform == "linux":
                # The first message is then there when a connection is accepted.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_SECONDS)
            selector.register(listener, selectors.EVENT_READ, self._accept)

    def __enter__(self) -> "ChildRegistry":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        if exception[0] is None:
            return
        for connection in self.connections.values():
            # With unread data the kernel would reset the connection, and the other end could lose the reason.
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
                connection.fill(waits=False)
            connection.close()

    def stop(self) -> None:
        """Ends listening, and reading from the children."""
        if self._listener is None:
            return
        for connection in (*self._strangers, *self._waiting, *self.connections.values()):
            self._selector.unregister(connection.socket)
        for connection in (*self._strangers, *self._waiting):
            connection.close()
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None

    def hosts(self) -> list[str] | None:
        """Returns the host names of this process and its subtree; None if processes are missing."""
        if len(self._hosts) < len(self._place.children):
            return None
        below = (self._hosts[child] for child in self._place.children)
        return [self._host, *itertools.chain.from_iterable(below)]

    def missing(self) -> Ranges:
        """Returns the processes of the subtree that are missing, as far as this process knows."""
        waiting = set(numbers_in(list(itertools.chain.from_iterable(self._present.values()))))
        found: Ranges = []
        for child in self._place.children:
            if child not in self.connections:
                numbers = range(child, child + self._place.child_size(child))
                found += ranges_of([number for number in numbers if number not in waiting])
            elif child not in self._hosts:
                # A child that has just come knows nothing of those below it yet.
                unknown = [[child + 1, child + self._place.child_size(child)]]
                found += self._missing.get(child, unknown)
        return found

    def present(self) -> Ranges:
        """Returns this process and those of its subtree that are there, as far as it knows."""
        missing = set(numbers_in(self.missing()))
        return ranges_of(
            [each for each in range(self._place.process, self._place.end) if each not in missing]
        )

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the children, and to the processes that wait for one."""
        line = encode_line(message)
        for number, connection in list(self.connections.items()):
            try:
                connection.socket.sendall(line)
                self.num_messages += 1
            except OSError:
                self._remove(number)
        for connection in self._waiting:
            self._send_line(connection, line)

    # First messages

    def _accept(self) -> None:
        assert self._listener is not None
        # All that are there: at the start of a large run that is cheaper than an event for each.
        with contextlib.suppress(BlockingIOError):
            while True:
                self._read_hello(PeerConnection(self._listener.accept()[0]))

    def _read_hello(self, connection: PeerConnection) -> None:
        """Handles the first message of a process; other clients, such as a port scanner, are sent away."""
        if connection in self._strangers:
            self._strangers.remove(connection)
            self._selector.unregister(connection.socket)
        size, hello = 0, None
        try:
            size = connection.fill(waits=False)
            message = connection.next_message()
            hello = None if message is None else self._parse(message)
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError):
            size = _MAX_HELLO_BYTES
        if hello is not None:
            self._receive(connection, hello)
        elif size < _MAX_HELLO_BYTES:
            self._strangers.add(connection)
            self._listen(connection, functools.partial(self._read_hello, connection))
        else:
            connection.close()

    def _parse(self, message: Mapping[str, Any]) -> Hello:
        """Returns a first message.

        Raises:
          ValueError: if it is none of this run.
        """
        hello = Hello(**message)
        if not (isinstance(hello.process, int) and isinstance(hello.port, int)):
            raise ValueError("it has no numbers")
        if self._place.parent is None:
            return hello
        # One that was started with other numbers then connects with process 0, which reports that to all.
        is_below = self._place.process < hello.process < self._place.end
        if hello.run != self._group.coordinator or not is_below or not self._has_count(hello):
            raise ValueError("it is of another run")
        return hello

    def _has_count(self, hello: Hello) -> bool:
        return hello.num_processes == self._group.num_processes

    def _receive(self, connection: PeerConnection, hello: Hello) -> None:
        self.num_messages += 1
        number = hello.process
        if self.refusal is not None:
            self._refuse(connection, self.refusal)
            return
        if not self._has_count(hello) or not self._place.process < number < self._place.end:
            self.refusal = (
                f"process {number} on {hello.host} was started as one of {hello.num_processes} processes, "
                f"and process 0 on {self._host} as one of {self._group.num_processes}; start all with the "
                "same --num-processes"
            )
            self._refuse(connection, self.refusal)
            return
        child = self._place.children[bisect.bisect_right(self._place.children, number) - 1]
        # Its end may not have been read yet: a process that was not accepted in time comes again.
        if number == child and child in self.connections and self.connections[child].has_ended():
            self._remove(child)
        if child not in self.connections and number == child:
            self._register(connection, hello)
        elif child not in self.connections:
            self._waiting[connection], self._present[connection] = number, [[number, number + 1]]
            self._listen(connection, functools.partial(self._read_waiting, connection))
        elif number == child:
            twins = f"on {self._child_hosts[child]} and on {hello.host}"
            refusal = f"process {number} was started twice, {twins}; start each --process-id once"
            self._refuse(connection, refusal)
        else:
            self._send_line(connection, self._addresses[child])
            connection.close()

    def _register(self, connection: PeerConnection, hello: Hello) -> None:
        connection.socket.settimeout(SEND_SECONDS)
        child, address = hello.process, (self._address_of(connection, hello), hello.port, hello.coordinator)
        self.connections[child], self._child_hosts[child] = connection, hello.host
        self._addresses[child] = encode_line({"next": address, "process": child})
        end = child + self._place.child_size(child)
        # Without children a first message says all.
        if end == child + 1:
            self._hosts[child] = [hello.host]
        self._listen(connection, functools.partial(self._read, child))
        # At a derived address the other end cannot know what listens there. All know process 0's.
        if self._place.parent is not None:
            self._send_line(connection, encode_line({"accepted": self.obstacle}))
        # Those that came before the process that is next for them.
        for each, number in list(self._waiting.items()):
            if child < number < end:
                self._send_line(each, self._addresses[child])
                self._stop_waiting(each)
        # What follows the first message may have arrived with it.
        self._read(child, fills=False)

    def _read_waiting(self, connection: PeerConnection) -> None:
        try:
            connection.fill()
            while (message := connection.next_message()) is not None:
                self.num_messages += 1
                self._present[connection] = message["present"]
        except OSError:
            self._stop_waiting(connection)

    def _stop_waiting(self, connection: PeerConnection) -> None:
        """Closes the connection of a waiting process, which has ended or knows where to go."""
        del self._waiting[connection], self._present[connection]
        self._selector.unregister(connection.socket)
        connection.close()

    def _refuse(self, connection: PeerConnection, refusal: str) -> None:
        self._send_line(connection, encode_line({"refused": refusal}))
        connection.close()

    def _send_line(self, connection: PeerConnection, line: bytes) -> None:
        # The kernel takes the only line of a connection at once; a lost process comes again.
        with contextlib.suppress(OSError):
            connection.socket.send(line, socket.MSG_DONTWAIT)
            self.num_messages += 1

    def _address_of(self, connection: PeerConnection, hello: Hello) -> str:
        """Returns the address at which other processes reach a child."""
        address = ipaddress.ip_address(connection.socket.getpeername()[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if not address.is_loopback:
            return str(address)
        # On a host its name may be an address of the loopback, which other hosts cannot use. They reach this
        # host, where the child is too, by the name of process 0, or as the child has reached another process.
        return host_and_port(self._group.coordinator)[0] if self._place.parent is None else hello.receiver

    # Children

    def _listen(self, connection: PeerConnection, read: Callable[[], None]) -> None:
        self._selector.register(connection.socket, selectors.EVENT_READ, read)

    def _read(self, child: int, *, fills: bool = True) -> None:
        connection = self.connections[child]
        try:
            if fills:
                connection.fill()
            while (message := connection.next_message()) is not None:
                self.num_messages += 1
                if "hosts" in message:
                    self._hosts[child] = message["hosts"]
                else:
                    self._hosts.pop(child, None)
                    self._missing[child] = message["missing"]
        except OSError:
            self._remove(child)

    def _remove(self, child: int) -> None:
        """Removes a child that has ended, which is missing again."""
        connection = self.connections.pop(child)
        if self._listener is not None:
            self._selector.unregister(connection.socket)
        connection.close()
        for each in (self._addresses, self._child_hosts, self._hosts, self._missing):
            each.pop(child, None)


def ranges_of(numbers: Sequence[int]) -> Ranges:
    """Returns ascending numbers as ranges."""
    ranges: Ranges = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges


def numbers_in(ranges: Ranges) -> list[int]:
    """Returns the numbers of all processes in ranges."""
    return list(itertools.chain.from_iterable(range(first, end) for first, end in ranges))


def wait_for_events(selector: selectors.BaseSelector, seconds: float) -> None:
    """Waits until something arrives or the time is over, and handles it."""
    for key, _ in selector.select(max(0.0, seconds)):
        # Another one of this round may have ended the connection.
        if selector.get_map().get(key.fd) == key:
            key.data()
