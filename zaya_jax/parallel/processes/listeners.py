"""Listeners and connections of the processes of a run among each other."""

import json
import resource
import socket
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from zaya_jax.errors import UserError

BACKLOG = 8192
"""Number of connections that may wait to be accepted; the kernel reduces it to net.core.somaxconn."""
# Files that a process has open without connections of other processes: shards, logs, devices.
_OTHER_FILES = 512
_LOCAL = ("127.0.0.1", "localhost")
PARENT_PORTS = range(24576, 28672)
"""Ports at which processes with children listen, if the hosts of all are known. They are below those that the
kernel chooses, and differ from all coordinator ports of SLURM jobs, which another run could need."""
_CHUNK_BYTES = 2**16


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the parts of HOST:PORT; an IPv6 address has brackets there."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def bind_address(coordinator: str) -> str:
    """Returns the address that process 0 binds: all interfaces, or only the loopback for a local run."""
    host, _, port = coordinator.rpartition(":")
    return coordinator if host in _LOCAL else f"[::]:{port}"


def is_local(coordinator: str) -> bool:
    """Returns whether all processes are on this machine and reach each other by the loopback."""
    return bind_address(coordinator) == coordinator


def listen(coordinator: str, port: int = 0) -> socket.socket:
    """Listens on all interfaces, or only on the loopback for a local run.

    Args:
      coordinator: HOST:PORT of process 0, which tells whether the run is local.
      port: port number; 0 for any that is free.
    """
    host = coordinator.rpartition(":")[0] if is_local(coordinator) else ""
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)


def parent_port(coordinator: str, process: int) -> int:
    """Returns the port at which a process with children listens, if another program does not.

    Processes of one host have different ports, because their numbers are consecutive; runs with neighboring
    coordinator ports have unrelated ones.
    """
    return PARENT_PORTS[(zlib.crc32(coordinator.encode()) + process) % len(PARENT_PORTS)]


def allow_connections(num_processes: int) -> None:
    """Raises the limit of open files, which is often 1,024, as far as a user may.

    Process 0 may have a connection per process during the rendezvous, and jax's service has one afterwards.

    Raises:
      UserError: if that is not enough.
    """
    # A service manager or a container may set other limits than a shell.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_processes + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"{num_processes} processes need {needed} open files in process 0, and its limit is {hard}; "
            "raise it with ulimit -Hn"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def resolution_failure(name: str) -> str | None:
    """Returns why the name of a host does not resolve; None if it does."""
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f'the coordinator\'s name "{name}" does not resolve ({reason}); check --coordinator'
    return None


def encode_line(message: Mapping[str, Any]) -> bytes:
    """Returns a message as a line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class PeerConnection:
    """A TCP connection with another process, which exchanges lines.

    Lines that have arrived and were not read yet stay with it when another part of the program reads on.

    Attributes:
      socket: socket of the connection.
    """

    def __init__(self, connected: socket.socket):
        self.socket, self._received = connected, bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message as one line of JSON; waits while the other end does not read."""
        self.socket.sendall(encode_line(message))

    def fill(self, *, waits: bool = True) -> int:
        """Receives data; returns the number of bytes that belong to lines that were not read yet.

        Args:
          waits: whether to wait for data.

        Raises:
          BlockingIOError: if there is no data, and it does not wait.
          OSError: if the connection has ended.
        """
        data = self.socket.recv(_CHUNK_BYTES, 0 if waits else socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionResetError("its other end has closed the connection")
        self._received += data
        return len(self._received)

    def has_ended(self) -> bool:
        """Returns whether the other end has closed the connection and nothing is left to read."""
        seconds = self.socket.gettimeout()
        # With a time limit, Python would wait for data before it calls recv.
        self.socket.settimeout(0.0)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(seconds)

    def next_line(self) -> bytes | None:
        """Returns a line that has arrived; None if there is no complete one."""
        end = self._received.find(b"\n") + 1
        if not end:
            return None
        line = bytes(self._received[:end])
        del self._received[:end]
        return line

    def next_message(self) -> dict[str, Any] | None:
        """Returns a message that has arrived; None if there is no complete one.

        Raises:
          ConnectionError: if a line is no message of a run.
        """
        line = self.next_line()
        try:
            message = {} if line is None else json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("what arrives is no message of a run")
        return None if line is None else message

    def lines(self) -> Iterator[bytes]:
        """Yields all lines until the connection ends.

        Raises:
          OSError: when it has ended.
        """
        while True:
            while (line := self.next_line()) is not None:
                yield line
            self.fill()

    def close(self) -> None:
        """Closes the socket; lines that were not read yet are lost."""
        self.socket.close()
