"""Rendezvous of a run's processes before jax connects them.

If peers do not come, jax's client aborts the process with a C++ stack trace that names no process. So the
processes first meet over plain TCP at the coordinator's address, the only one that all of them know: each
sends its number and host, process 0 registers them, and at the time limit every process learns which ones are
late.

Then process 0 keeps the connections of its children in the tree, and tells each other process in one short
message where its parent listens. What all must know, such as the names of all hosts, goes down the tree.
Messages are lines of JSON.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.errors import PeerTimeout
from zaya_jax.parallel.processes.listeners import (
    BACKLOG,
    ChildListener,
    PeerConnection,
    allow_connections,
    listen,
    read_object,
)
from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.tree.shape import FAN_OUT, Place, parents, place_of

# Messages, each one line:
#   process N -> 0       {"process": N, "num_processes": M, "host": "...", "port": P, "token": "..."}
#                        port and token, with which its children in the tree connect; without children none
#   process 0 -> N       {"missing": "processes 3, 5"}     while it waits
#                        {"parent": [HOST, PORT, TOKEN]}    all are registered; connect to the parent
#                        {"late": "..."}                    time limit reached; raise PeerTimeout
#                        {"refused": "..."}                 inconsistent numbers; raise UserError
#   process N -> parent  {"process": N, "token": "..."}
#   parent -> process N  {"hosts": ["...", ...]}            continue; the connection stays open
_POLL_SECONDS = 0.2
# Time after which process 0 sends the numbers of the missing processes; it doubles with each report, so that
# thousands of processes that wait do not keep it busy.
_REPORT_SECONDS = 1.0
# Time that a process waits, after its own limit, for the message of process 0 that names the late ones.
_GRACE_SECONDS = 5.0
# Time for which process 0 tries to bind its port, which a process of the previous attempt may still hold.
_BIND_SECONDS = 10.0
_SEND_SECONDS = 10.0
_FLUSH_SECONDS = 0.005
_MAX_HELLO_BYTES = 4096
# Number of late processes that a message lists; the rest are counted.
_MAX_NAMED = 8


@dataclasses.dataclass
class Assembly:
    """The processes of a run after they have met.

    Attributes:
      place: place of this process in the tree.
      hosts: host names of all processes, by process number.
      connections: connections with the parent and the children, by process number; in process 0 complete
        only after the context of `assembled`.
      num_messages: number of messages that this process has sent and received so far.
    """

    place: Place
    hosts: tuple[str, ...]
    connections: dict[int, PeerConnection]
    num_messages: int = 0

    def close(self) -> None:
        """Closes the connections with the parent and all children."""
        for connection in self.connections.values():
            connection.close()


@contextlib.contextmanager
def assembled(
    group: ProcessGroup, *, host: str, limit_seconds: float, fan_out: int = FAN_OUT
) -> Iterator[Assembly]:
    """Waits until all processes of a run have started; yields their host names and this one's connections.

    The other processes are released when the context of process 0 ends. By then jax's service must listen at
    the same address.

    Args:
      group: processes of the run.
      host: name of this process' host.
      limit_seconds: time limit in seconds.
      fan_out: maximum number of children of a process in the tree.

    Raises:
      PeerTimeout: if some processes do not come in time; it names them.
      UserError: if two processes have the same number, or were started with different numbers of processes.
    """
    place = place_of(group.process, group.num_processes, fan_out=fan_out)
    if group.num_processes == 1:
        yield Assembly(place, (host,), {})
    elif group.process != 0:
        yield _join(group, place, host, limit_seconds)
    else:
        registry = _Registry(group, place, host, fan_out)
        # Its event loop runs until the processes are there, and again to send them the outcome.
        with asyncio.Runner() as runner:
            try:
                runner.run(registry.wait(limit_seconds))
                assembly = Assembly(place, registry.hosts(), {})
                yield assembly
            except BaseException as error:
                name = "refused" if isinstance(error, UserError) else "late"
                runner.run(registry.dismiss({name: str(error)}))
                raise
            assembly.connections = runner.run(registry.release(assembly.hosts))
            assembly.num_messages = registry.num_messages


def _host_and_port(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _names(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:_MAX_NAMED]))
    more = f" and {len(processes) - _MAX_NAMED} more" if len(processes) > _MAX_NAMED else ""
    return f"process{'es' if len(processes) > 1 else ''} {shown}{more}"


# Process 0


@dataclasses.dataclass(frozen=True)
class _Registered:
    """A process that has announced itself: its host, its connection, and where its children connect."""

    host: str
    transport: asyncio.Transport
    parent_address: tuple[str, int, str]


class _Client(asyncio.Protocol):
    """A connection of process 0 with another process, until the end of the rendezvous.

    A callback per event instead of a task per connection: process 0 has one connection per process.
    """

    def __init__(self, registry: "_Registry"):
        self._registry, self._received, self._number = registry, b"", None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Registers the process by its first line; what follows is ignored."""
        if self._number is not None:
            return
        # A line may arrive in several pieces.
        self._received += data
        if b"\n" in self._received:
            # What is no registration is a port scanner, or a client of another service.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                hello = json.loads(self._received)
                self._number = self._registry.register(self._transport, hello)
        elif len(self._received) < _MAX_HELLO_BYTES:
            return
        if self._number is None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the process, which is missing again."""
        if self._number is not None:
            self._registry.remove(self._number)


class _Registry:
    """Process 0's end of the rendezvous: registers the other processes and sends them the outcome.

    Attributes:
      num_messages: number of messages sent and received.
    """

    def __init__(self, group: ProcessGroup, place: Place, host: str, fan_out: int):
        self._group, self._place, self._host, self._fan_out = group, place, host, fan_out
        self._present: dict[int, _Registered] = {}
        self._refusal: str | None = None
        # Set when nothing is missing, or a process is refused.
        self._ended = asyncio.Event()
        self.num_messages = 0

    def hosts(self) -> tuple[str, ...]:
        """Returns the host names of all processes, by process number."""
        others = range(1, self._group.num_processes)
        return (self._host, *(self._present[number].host for number in others))

    async def wait(self, limit_seconds: float) -> None:
        """Waits until all processes are registered, and then stops to listen.

        Raises:
          PeerTimeout: with the late processes.
          UserError: for a process that was started with another number of processes.
        """
        allow_connections(self._group.num_processes)
        listener = _bind(self._group.coordinator)
        # With asyncio's default of 100, the kernel would drop what a few hundred processes that come at once
        # send, and they would try again after 1, 3 and 7 seconds.
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Client(self), sock=listener, backlog=BACKLOG)
        start, report = time.monotonic(), _REPORT_SECONDS
        with contextlib.closing(server):
            while self._is_incomplete():
                waited = time.monotonic() - start
                if waited >= limit_seconds:
                    raise PeerTimeout(self._describe_late(limit_seconds))
                if waited >= report:
                    self._send(self._to_all({"missing": _names(self._missing())}))
                    report = 2 * waited
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), min(report, limit_seconds) - waited)
                # A process may have disconnected since it completed them.
                self._ended.clear()

    async def dismiss(self, message: Mapping[str, Any]) -> None:
        """Sends a message to all registered processes, and closes their connections."""
        self._send(self._to_all(message))
        await self._close()

    async def release(self, hosts: Sequence[str]) -> dict[int, PeerConnection]:
        """Sends all processes on; returns the connections with the children of process 0, which stay."""
        to_children = json.dumps({"hosts": hosts}).encode() + b"\n"
        lines, connections = {}, {}
        for number, parent in parents(self._group.num_processes, fan_out=self._fan_out).items():
            each, above = self._present.get(number), self._present.get(parent)
            if each is None:  # it has ended since
                continue
            if parent == 0:
                # Else asyncio might read the first message that follows.
                each.transport.pause_reading()
                connections[number] = PeerConnection(each.transport.get_extra_info("socket").dup())
                lines[each.transport] = to_children
            else:
                late = {"late": f"process {parent} has ended while the processes of this run started"}
                message = late if above is None else {"parent": above.parent_address}
                lines[each.transport] = json.dumps(message).encode() + b"\n"
        # Short lines: what all processes must know goes down the tree.
        self._send(lines)
        await self._close()
        return connections

    def _to_all(self, message: Mapping[str, Any]) -> dict[asyncio.Transport, bytes]:
        line = json.dumps(message).encode() + b"\n"
        return {each.transport: line for each in self._present.values()}

    def _send(self, lines: Mapping[asyncio.Transport, bytes]) -> None:
        self.num_messages += len(lines)
        for transport, line in lines.items():
            transport.write(line)

    async def _close(self) -> None:
        """Closes all connections when their messages were sent; those that cannot be in time are dropped."""
        transports = [each.transport for each in self._present.values()]
        deadline = time.monotonic() + _SEND_SECONDS
        # The kernel takes short lines at once, so that this usually waits for nothing.
        while any(each.get_write_buffer_size() for each in transports) and time.monotonic() < deadline:
            await asyncio.sleep(_FLUSH_SECONDS)
        # The connections of the children have a second descriptor by now, which stays open.
        for transport in transports:
            transport.abort()
        # The loop closes the sockets in its next round.
        await asyncio.sleep(0)

    def _is_incomplete(self) -> bool:
        if self._refusal is not None:
            raise UserError(self._refusal)
        return len(self._present) < self._group.num_processes - 1

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._group.num_processes) if number not in self._present]

    def _describe_late(self, limit_seconds: float) -> str:
        name, _ = _host_and_port(self._group.coordinator)
        sentence = (
            f"process 0 of {self._group.num_processes} on {self._host} waited {limit_seconds:.0f} s at "
            f"{self._group.coordinator} for {_names(self._missing())}"
        )
        failure = _resolution_failure(name)
        return f"{sentence}; {failure}" if failure else sentence

    def register(self, transport: asyncio.Transport, hello: Mapping[str, Any]) -> int | None:
        """Registers a process by its first message; returns None if its numbers are inconsistent."""
        process, count, host = int(hello["process"]), int(hello["num_processes"]), str(hello["host"])
        address = self._address_of(transport), int(hello["port"]), str(hello["token"])
        self.num_messages += 1
        if count != self._group.num_processes or not 0 < process < count:
            refusal = self._refusal = (
                f"process {process} on {host} was started as one of {count} processes, and process 0 on "
                f"{self._host} as one of {self._group.num_processes}; start all with the same --num-processes"
            )
            self._ended.set()
        elif process in self._present:
            refusal = (
                f"process {process} was started twice, on {self._present[process].host} and on {host}; start "
                "each --process-id once"
            )
        else:
            self._present[process] = _Registered(host, transport, address)
            if len(self._present) == self._group.num_processes - 1:
                self._ended.set()
            return process
        self._send({transport: json.dumps({"refused": refusal}).encode() + b"\n"})
        return None

    def remove(self, number: int) -> None:
        """Removes a process that has closed its connection."""
        del self._present[number]

    def _address_of(self, transport: asyncio.Transport) -> str:
        """Returns the address at which other processes reach the one at the other end."""
        host, _ = _host_and_port(self._group.coordinator)
        address = ipaddress.ip_address(transport.get_extra_info("peername")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        # On the host of process 0 its name may be an address of the loopback, which other hosts cannot use.
        return host if address.is_loopback else str(address)


def _bind(coordinator: str) -> socket.socket:
    port = _host_and_port(coordinator)[1]
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return listen(coordinator, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"process 0 cannot listen at port {port} of {coordinator} ({error.strerror}); choose "
                    "another port for --coordinator"
                ) from error
            time.sleep(_POLL_SECONDS)


# Other processes


def _join(group: ProcessGroup, place: Place, host: str, limit_seconds: float) -> Assembly:
    """Announces this process to process 0, waits for its parent's message, and connects its children."""
    deadline = time.monotonic() + limit_seconds
    with ChildListener(group.coordinator, place.children) as listener:
        announcement = _Announcement(group, host, listener)
        while (joined := announcement.attempt(deadline)) is None:
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"process {group.process} of {group.num_processes} on {host} waited "
                    f"{limit_seconds:.0f} s for process 0: {announcement.obstacle}"
                )
            time.sleep(_POLL_SECONDS)
        # Process 0 has sent the children of this process here at the same time.
        parent, hosts = joined
        assert place.parent is not None
        connections = {place.parent: parent}
        try:
            connections |= listener.accept(deadline + _GRACE_SECONDS)
            line = json.dumps({"hosts": hosts}).encode() + b"\n"
            for child in place.children:
                connections[child].socket.sendall(line)
        except OSError as error:
            raise PeerTimeout(
                f"process {group.process} of {group.num_processes} on {host} waited for "
                f"{_names(place.children)}, which it connects with process 0: {error}"
            ) from error
    # The hello and one message of process 0, and with each child what its hello and the hosts are here.
    num_messages = 2 + 2 * len(place.children) + (0 if place.parent == 0 else 2)
    return Assembly(place, tuple(hosts), connections, num_messages)


class _Announcement:
    """The other processes' end of the rendezvous.

    Args:
      group: processes of the run.
      host: name of this process' host.
      listener: where the children of this process connect.

    Attributes:
      obstacle: why the last attempt failed, for an error message.
    """

    def __init__(self, group: ProcessGroup, host: str, listener: ChildListener):
        self._group = group
        self._hello = {
            "process": group.process,
            "num_processes": group.num_processes,
            "host": host,
            "port": listener.port,
            "token": listener.token,
        }
        self.obstacle = ""

    def attempt(self, deadline: float) -> tuple[PeerConnection, list[str]] | None:
        """Connects to process 0 once.

        Returns:
          PeerConnection with the parent, and host names of all processes; None if the attempt failed.

        Raises:
          PeerTimeout: with the message of process 0, if processes are late.
          UserError: with the message of process 0, if it rejects this process.
        """
        name, port = _host_and_port(self._group.coordinator)
        failure = _resolution_failure(name)
        if failure is not None:
            self.obstacle = failure
            return None
        try:
            remaining = max(_POLL_SECONDS, deadline - time.monotonic())
            connection = PeerConnection(socket.create_connection((name, port), min(remaining, _SEND_SECONDS)))
            self.obstacle = f"the service at {self._group.coordinator} is not process 0 of this run"
            with contextlib.ExitStack() as stack:
                stack.callback(connection.close)
                connection.socket.sendall(json.dumps(self._hello).encode() + b"\n")
                message = self._listen(connection, deadline + _GRACE_SECONDS)
                if message is not None and "hosts" in message:
                    stack.pop_all()
                    return connection, message["hosts"]
        except TimeoutError:
            self.obstacle = self.obstacle or f"{self._group.coordinator} does not answer"
            return None
        # Process 0 has ended, or this was a process of the previous attempt: the next attempt shows which.
        except ConnectionResetError:
            return None
        except OSError as error:
            self.obstacle = f"nothing listens at {self._group.coordinator} ({error.strerror or error})"
            return None
        return None if message is None else self._connect_to_parent(message["parent"], deadline)

    def _listen(self, connection: PeerConnection, deadline: float) -> dict[str, Any] | None:
        while (remaining := deadline - time.monotonic()) > 0:
            connection.socket.settimeout(remaining)
            message = read_object(connection.lines)
            if message is None or "hosts" in message or "parent" in message:
                return message
            if "refused" in message:
                raise UserError(message["refused"])
            if "late" in message:
                raise PeerTimeout(message["late"])
            self.obstacle = (
                f"it is running at {self._group.coordinator} and waiting for {message.get('missing')}"
            )
        return None

    def _connect_to_parent(self, address: Sequence[Any], deadline: float) -> tuple[PeerConnection, list[str]]:
        """Connects to the parent, and waits until that has received the host names.

        Args:
          address: host, port and token of the parent.
          deadline: time at which this process gives up.

        Raises:
          PeerTimeout: if the parent has ended, or sends nothing in time.
        """
        host, port, token = address
        reason = "it has ended"
        try:
            connection = PeerConnection(socket.create_connection((host, port), _SEND_SECONDS))
            connection.socket.settimeout(max(0.0, deadline - time.monotonic()) + _GRACE_SECONDS)
            hello = {"process": self._group.process, "token": token}
            connection.socket.sendall(json.dumps(hello).encode() + b"\n")
            message = read_object(connection.lines)
            if message is not None and "hosts" in message:
                return connection, message["hosts"]
            connection.close()
        except OSError as error:
            reason = error.strerror or str(error)
        raise PeerTimeout(
            f"process {self._group.process} of {self._group.num_processes} on {self._hello['host']} does not "
            f"reach the process at {host}:{port}, which connects it with process 0: {reason}"
        )


def _resolution_failure(name: str) -> str | None:
    """Returns why the name of a host does not resolve; None if it does."""
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f'the coordinator\'s name "{name}" does not resolve ({reason}); check --coordinator'
    return None
