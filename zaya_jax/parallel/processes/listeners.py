"""Listeners and connections of the processes of a run among each other."""

import hmac
import json
import resource
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from zaya_jax.errors import UserError

BACKLOG = 8192
"""Number of connections that may wait to be accepted; the kernel reduces it to net.core.somaxconn."""
# Files that a process has open without connections of other processes: shards, logs, devices.
_OTHER_FILES = 512
_LOCAL = ("127.0.0.1", "localhost")
# Maximum size of a message of the rendezvous; the largest one lists the hosts of all processes.
_MAX_LINE_BYTES = 2**22
# Time for a client to send its first line. Processes of the run send it at once.
_HELLO_SECONDS = 5.0


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


def allow_connections(num_processes: int) -> None:
    """Raises the limit of open files, which is often 1,024, as far as a user may.

    Process 0 has a connection per process during the rendezvous, and one in jax's service afterwards.

    Raises:
      UserError: if that is not enough.
    """
    # A service manager or a container may set other limits than a shell.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * num_processes + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"{num_processes} processes need {needed} open files in process 0, and its limit is {hard}; "
            "raise it with ulimit -Hn"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class PeerConnection:
    """A TCP connection with a reader of its lines, whose buffer may already contain the next ones.

    Attributes:
      socket: socket of the connection.
      lines: buffered reader of the socket.
    """

    def __init__(self, connected: socket.socket):
        self.socket, self.lines = connected, connected.makefile("rb")

    def close(self) -> None:
        """Closes the reader first and then the socket, which both hold the connection open."""
        self.lines.close()
        self.socket.close()


def read_object(lines: BinaryIO) -> dict[str, Any] | None:
    """Reads a line of JSON; returns None if the connection was closed, or another service sent it."""
    try:
        message = json.loads(lines.readline(_MAX_LINE_BYTES))
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


class ChildListener:
    """Listens for the children of this process in the tree. Use it as a context manager.

    Args:
      coordinator: HOST:PORT of process 0.
      children: process numbers.

    Attributes:
      port: port at which it listens; 0 without children.
      token: secret of the children, which get it from process 0.
    """

    def __init__(self, coordinator: str, children: Sequence[int]):
        self._children = children
        # Most processes have no children, and need no port.
        self._listener = listen(coordinator) if children else None
        self.port = self._listener.getsockname()[1] if self._listener else 0
        self.token = secrets.token_hex(16)

    def __enter__(self) -> "ChildListener":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._listener is not None:
            self._listener.close()

    def accept(self, deadline: float) -> dict[int, PeerConnection]:
        """Returns the connections of all children, by process number.

        Raises:
          TimeoutError: if some do not connect until the deadline.
        """
        accepted: dict[int, PeerConnection] = {}
        while self._listener is not None and len(accepted) < len(self._children):
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = PeerConnection(self._listener.accept()[0])
            except OSError:
                for each in accepted.values():
                    each.close()
                raise
            # One after the other: children send their first line at once.
            number = self._identify(connection)
            if number is None or number in accepted:
                connection.close()
            else:
                accepted[number] = connection
        return accepted

    def _identify(self, connection: PeerConnection) -> int | None:
        """Returns the number of a child; None for another client, such as a port scanner."""
        connection.socket.settimeout(_HELLO_SECONDS)
        try:
            hello = read_object(connection.lines) or {}
        except OSError:
            return None
        # Compared in constant time, as all secrets.
        is_ours = hmac.compare_digest(str(hello.get("token")).encode(), self.token.encode())
        return hello["process"] if is_ours and hello.get("process") in self._children else None
