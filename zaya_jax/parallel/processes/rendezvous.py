"""Rendezvous of a run's processes before jax connects them.

If peers do not come, jax's client aborts the process with a C++ stack trace that names no process. So the
processes first meet over plain TCP at the coordinator's address: each sends its number and host, process 0
registers them, and at the time limit every process learns which ones are late. Messages are lines of JSON.
"""

import contextlib
import dataclasses
import json
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.errors import PeerTimeout
from zaya_jax.parallel.processes.process_group import ProcessGroup

# Messages, each one line:
#   process N -> 0   {"process": N, "num_processes": M, "host": "..."}
#   process 0 -> N   {"missing": "processes 3, 5"}     every second while it waits
#                    {"hosts": ["...", ...]}            all are registered; continue
#                    {"late": "..."}                    time limit reached; raise PeerTimeout
#                    {"refused": "..."}                 inconsistent numbers; raise UserError
_LOCAL = ("127.0.0.1", "localhost")
_POLL_SECONDS = 0.2
# Interval at which process 0 sends the numbers of the missing processes.
_REPORT_SECONDS = 1.0
# Time that a process waits, after its own limit, for the message of process 0 that names the late ones.
_GRACE_SECONDS = 5.0
# Time for which process 0 tries to bind its port, which a process of the previous attempt may still hold.
_BIND_SECONDS = 10.0
_SEND_SECONDS = 10.0
_MAX_HELLO_BYTES = 4096
# Maximum size of a message; the largest one lists the hosts of all processes.
_MAX_LINE_BYTES = 2**22
# Number of late processes that a message lists; the rest are counted.
_MAX_NAMED = 8


@contextlib.contextmanager
def assembled(group: ProcessGroup, *, host: str, limit_seconds: float) -> Iterator[tuple[str, ...]]:
    """Waits until all processes of a run have started; yields their host names, by process number.

    The other processes are released when the context of process 0 ends. By then jax's service must listen at
    the same address.

    Args:
      group: processes of the run.
      host: name of this process' host.
      limit_seconds: time limit in seconds.

    Raises:
      PeerTimeout: if some processes do not come in time; it names them.
      UserError: if two processes have the same number, or were started with different numbers of processes.
    """
    if group.num_processes == 1:
        yield (host,)
    elif group.process != 0:
        yield _join(group, host, limit_seconds)
    else:
        registry = _Registry(group, host)
        try:
            registry.wait(limit_seconds)
            yield registry.hosts()
        except BaseException as error:
            registry.send_to_all({"refused" if isinstance(error, UserError) else "late": str(error)})
            raise
        else:
            registry.send_to_all({"hosts": registry.hosts()})
        finally:
            registry.close()


def bind_address(coordinator: str) -> str:
    """Returns the address that process 0 binds: all interfaces, or only the loopback for a local run."""
    host, _, port = coordinator.rpartition(":")
    return coordinator if host in _LOCAL else f"[::]:{port}"


def _host_and_port(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _names(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:_MAX_NAMED]))
    more = f" and {len(processes) - _MAX_NAMED} more" if len(processes) > _MAX_NAMED else ""
    return f"process{'es' if len(processes) > 1 else ''} {shown}{more}"


# Process 0


@dataclasses.dataclass
class _Connection:
    """A connection to process 0; `process` and `host` are set once the other end has identified itself."""

    sock: socket.socket
    received: bytes = b""
    process: int | None = None
    host: str = ""


class _Registry:
    """Process 0's end of the rendezvous: registers the other processes and sends them the outcome."""

    def __init__(self, group: ProcessGroup, host: str):
        self._group, self._host = group, host
        self._present: dict[int, _Connection] = {}
        self._listener = _listen(group.coordinator)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def hosts(self) -> tuple[str, ...]:
        """Returns the host names of all processes, by process number."""
        others = range(1, self._group.num_processes)
        return (self._host, *(self._present[number].host for number in others))

    def wait(self, limit_seconds: float) -> None:
        """Waits until all processes are registered, and then stops to listen.

        Raises:
          PeerTimeout: with the late processes.
          UserError: for a process that was started with another number of processes.
        """
        deadline, reported = time.monotonic() + limit_seconds, 0.0
        while missing := self._missing():
            now = time.monotonic()
            if now > deadline:
                raise PeerTimeout(self._describe_late(missing, limit_seconds))
            if now - reported > _REPORT_SECONDS:
                self.send_to_all({"missing": _names(missing)})
                reported = now
            for key, _ in self._selector.select(_POLL_SECONDS):
                self._handle(key.data)
        self._selector.unregister(self._listener)
        self._listener.close()

    def send_to_all(self, message: Mapping[str, Any]) -> None:
        """Sends a message to all registered processes; those that have disconnected become missing again."""
        # A new list, because `_send` removes connections that are closed.
        for connection in list(self._present.values()):
            self._send(connection, message)

    def close(self) -> None:
        """Closes all connections."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._selector.close()
        self._listener.close()

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._group.num_processes) if number not in self._present]

    def _describe_late(self, missing: Sequence[int], limit_seconds: float) -> str:
        name, _ = _host_and_port(self._group.coordinator)
        sentence = (
            f"process 0 of {self._group.num_processes} on {self._host} waited {limit_seconds:.0f} s at "
            f"{self._group.coordinator} for {_names(missing)}"
        )
        failure = _resolution_failure(name)
        return f"{sentence}; {failure}" if failure else sentence

    def _handle(self, connection: _Connection | None) -> None:
        if connection is None:
            with contextlib.suppress(OSError):  # the other end has closed the connection again
                accepted, _ = self._listener.accept()
                # One thread serves all connections, and a slow one must not delay the others.
                accepted.setblocking(False)
                self._selector.register(accepted, selectors.EVENT_READ, _Connection(accepted))
            return
        try:
            received = connection.sock.recv(_MAX_HELLO_BYTES)
        except OSError:
            received = b""
        # A message may arrive in several parts, and a stranger may send without ever ending its line.
        connection.received += received
        if not received or len(connection.received) > _MAX_HELLO_BYTES:
            self._drop(connection)
        elif connection.process is None and b"\n" in connection.received:
            self._register(connection)

    def _register(self, connection: _Connection) -> None:
        try:
            hello = json.loads(connection.received)
            number, count, host = int(hello["process"]), int(hello["num_processes"]), str(hello["host"])
        except (ValueError, TypeError, KeyError):  # a port scanner, or a client of another service
            self._drop(connection)
            return
        if count != self._group.num_processes or not 0 < number < count:
            refusal = (
                f"process {number} on {host} was started as one of {count} processes, and process 0 on "
                f"{self._host} as one of {self._group.num_processes}; start all with the same --num-processes"
            )
            self._send(connection, {"refused": refusal})
            raise UserError(refusal)
        if number in self._present:
            refusal = (
                f"process {number} was started twice, on {self._present[number].host} and on {host}; start "
                "each --process-id once"
            )
            self._send(connection, {"refused": refusal})
            self._drop(connection)
            return
        connection.process, connection.host = number, host
        self._present[number] = connection

    def _send(self, connection: _Connection, message: Mapping[str, Any]) -> None:
        try:
            connection.sock.settimeout(_SEND_SECONDS)
            connection.sock.sendall(json.dumps(message).encode() + b"\n")
            connection.sock.setblocking(False)
        except OSError:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.process is not None and self._present.get(connection.process) is connection:
            del self._present[connection.process]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()


def _listen(coordinator: str) -> socket.socket:
    host, port = _host_and_port(coordinator)
    is_local = bind_address(coordinator) == coordinator
    dual = not is_local and socket.has_dualstack_ipv6()
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return socket.create_server(
                (host if is_local else "", port),
                family=socket.AF_INET6 if dual else socket.AF_INET,
                backlog=1024,
                dualstack_ipv6=dual,
            )
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"process 0 cannot listen at port {port} of {coordinator} ({error.strerror}); choose "
                    "another port for --coordinator"
                ) from error
            time.sleep(_POLL_SECONDS)


# Other processes


def _join(group: ProcessGroup, host: str, limit_seconds: float) -> tuple[str, ...]:
    """Announces this process to process 0, and waits for the host names of all processes."""
    announcement = _Announcement(group, host)
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        hosts = announcement.attempt(deadline)
        if hosts is not None:
            return hosts
        time.sleep(_POLL_SECONDS)
    raise PeerTimeout(
        f"process {group.process} of {group.num_processes} on {host} waited {limit_seconds:.0f} s for "
        f"process 0: {announcement.obstacle}"
    )


class _Announcement:
    """The other processes' end of the rendezvous.

    Args:
      group: processes of the run.
      host: name of this process' host.

    Attributes:
      obstacle: why the last attempt failed, for an error message.
    """

    def __init__(self, group: ProcessGroup, host: str):
        self._group = group
        self._hello = {"process": group.process, "num_processes": group.num_processes, "host": host}
        self.obstacle = ""

    def attempt(self, deadline: float) -> tuple[str, ...] | None:
        """Connects to process 0 once.

        Returns:
          Host names of all processes; None if the attempt failed.

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
            with socket.create_connection((name, port), timeout=min(remaining, _SEND_SECONDS)) as connection:
                self.obstacle = f"the service at {self._group.coordinator} is not process 0 of this run"
                connection.sendall(json.dumps(self._hello).encode() + b"\n")
                return self._listen(connection, deadline + _GRACE_SECONDS)
        except TimeoutError:
            self.obstacle = self.obstacle or f"{self._group.coordinator} does not answer"
        # Process 0 has ended, or this was a process of the previous attempt: the next attempt shows which.
        except ConnectionResetError:
            pass
        except OSError as error:
            self.obstacle = f"nothing listens at {self._group.coordinator} ({error.strerror or error})"
        return None

    def _listen(self, connection: socket.socket, deadline: float) -> tuple[str, ...] | None:
        with connection.makefile("rb") as lines:
            while (remaining := deadline - time.monotonic()) > 0:
                connection.settimeout(remaining)
                message = _parse(lines.readline(_MAX_LINE_BYTES))
                if message is None:
                    return None
                if "hosts" in message:
                    return tuple(message["hosts"])
                if "refused" in message:
                    raise UserError(message["refused"])
                if "late" in message:
                    raise PeerTimeout(message["late"])
                self.obstacle = (
                    f"it is running at {self._group.coordinator} and waiting for {message.get('missing')}"
                )
        return None


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parses a message of process 0; returns None if the connection was closed or another service sent it."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _resolution_failure(name: str) -> str | None:
    """Returns why the name of a host does not resolve; None if it does."""
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f'the coordinator\'s name "{name}" does not resolve ({reason}); check --coordinator'
    return None
