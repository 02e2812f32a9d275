"""Rendezvous of a run's processes before jax connects them.

If peers do not come, jax's client aborts the process with a C++ stack trace that names no process. So the
processes first meet over plain TCP at the coordinator's address: each sends its number and host, process 0
registers them, and at the time limit every process learns which ones are late. Messages are lines of JSON.
"""

import asyncio
import contextlib
import json
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
_REGISTRY_POLL_SECONDS = 0.02
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
        # Its event loop runs until the processes are there, and again to send them the outcome.
        with asyncio.Runner() as runner:
            try:
                runner.run(registry.wait(limit_seconds))
                yield registry.hosts()
            except BaseException as error:
                name = "refused" if isinstance(error, UserError) else "late"
                runner.run(registry.send_to_all({name: str(error)}))
                raise
            runner.run(registry.send_to_all({"hosts": registry.hosts()}))


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


class _Registry:
    """Process 0's end of the rendezvous: registers the other processes and sends them the outcome."""

    def __init__(self, group: ProcessGroup, host: str):
        self._group, self._host = group, host
        self._present: dict[int, tuple[str, asyncio.StreamWriter]] = {}
        self._refusal: str | None = None

    def hosts(self) -> tuple[str, ...]:
        """Returns the host names of all processes, by process number."""
        others = range(1, self._group.num_processes)
        return (self._host, *(self._present[number][0] for number in others))

    async def wait(self, limit_seconds: float) -> None:
        """Waits until all processes are registered, and then stops to listen.

        Raises:
          PeerTimeout: with the late processes.
          UserError: for a process that was started with another number of processes.
        """
        listener = _listen(self._group.coordinator)
        server = await asyncio.start_server(self._serve, sock=listener, limit=_MAX_HELLO_BYTES)
        deadline, reported = time.monotonic() + limit_seconds, 0.0
        with contextlib.closing(server):
            while missing := self._missing():
                now = time.monotonic()
                if now > deadline:
                    raise PeerTimeout(self._describe_late(missing, limit_seconds))
                if now - reported > _REPORT_SECONDS:
                    await self.send_to_all({"missing": _names(missing)})
                    reported = now
                await asyncio.sleep(_REGISTRY_POLL_SECONDS)

    async def send_to_all(self, message: Mapping[str, Any]) -> None:
        """Sends a message to all registered processes."""
        await asyncio.gather(*(_send(writer, message) for _, writer in self._present.values()))

    def _missing(self) -> list[int]:
        if self._refusal is not None:
            raise UserError(self._refusal)
        return [number for number in range(1, self._group.num_processes) if number not in self._present]

    def _describe_late(self, missing: Sequence[int], limit_seconds: float) -> str:
        name, _ = _host_and_port(self._group.coordinator)
        sentence = (
            f"process 0 of {self._group.num_processes} on {self._host} waited {limit_seconds:.0f} s at "
            f"{self._group.coordinator} for {_names(missing)}"
        )
        failure = _resolution_failure(name)
        return f"{sentence}; {failure}" if failure else sentence

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection until its other end closes it."""
        number = None
        try:
            hello = json.loads(await reader.readline())
            process, count, host = int(hello["process"]), int(hello["num_processes"]), str(hello["host"])
            number = await self._register(writer, process, count, host)
            # A process that disconnects becomes missing again.
            while await reader.read(_MAX_HELLO_BYTES):
                pass
        except (ValueError, TypeError, KeyError, OSError):  # a port scanner, or a client of another service
            pass
        # The rendezvous is over. asyncio of Python 3.11 logs a traceback for a server's task that ends so.
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()
            if number is not None:
                del self._present[number]

    async def _register(
        self, writer: asyncio.StreamWriter, process: int, count: int, host: str
    ) -> int | None:
        """Registers a process by its first message; returns None if its numbers are inconsistent."""
        if count != self._group.num_processes or not 0 < process < count:
            refusal = self._refusal = (
                f"process {process} on {host} was started as one of {count} processes, and process 0 on "
                f"{self._host} as one of {self._group.num_processes}; start all with the same --num-processes"
            )
        elif process in self._present:
            refusal = (
                f"process {process} was started twice, on {self._present[process][0]} and on {host}; start "
                "each --process-id once"
            )
        else:
            # Without a buffer, so that a message was sent when `_send` returns.
            writer.transport.set_write_buffer_limits(0)
            self._present[process] = host, writer
            return process
        await _send(writer, {"refused": refusal})
        return None


async def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    """Sends a message; one that cannot be sent in time is dropped."""
    with contextlib.suppress(OSError):
        writer.write(json.dumps(message).encode() + b"\n")
        await asyncio.wait_for(writer.drain(), _SEND_SECONDS)


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
