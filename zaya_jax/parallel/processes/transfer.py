"""Transfers of files between the processes of a run, over TCP.

`hosts` exchanges messages of a few bytes through one process; shards of a train state go directly from one
process to another. A connection serves one request, a line of JSON with the token of the attempt; the content
of a file precedes or follows the reply, which is a line of JSON too. Content has its own checksums.
"""

import hmac
import json
import pathlib
import secrets
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from typing import Any, BinaryIO

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes import coordination_service, hosts
from zaya_jax.parallel.processes.listeners import is_local, listen

CHUNK_BYTES = 4 * 2**20
# Of one connect, send or receive; a process that has ended closes its connections at once.
_SOCKET_SECONDS = 60.0
_MAX_LINE_BYTES = 65_536

Chunks = Iterator[bytes]
Put = Callable[[dict[str, Any], Chunks], None]
"""Stores a file that another process sends: its description, and its content in chunks."""
Get = Callable[[dict[str, Any]], pathlib.Path]
"""Returns the path of a file that another process requests, by its description."""


class Transfers:
    """Sends files to other processes and receives theirs. All processes create it at the same time.

    Only processes of this attempt are served: they share a random token, which process 0 distributes. Use it
    as a context manager, and leave the context when no process needs this one any more.

    Args:
      max_bytes: maximum size of a file.
      put: called in a thread for each file that is received.
      get: called in a thread for each file that is requested.
    """

    def __init__(self, *, max_bytes: int, put: Put | None = None, get: Get | None = None):
        self._server, self._addresses, self._max_bytes = None, [], max_bytes
        self._token = hosts.broadcast_from_first("transfer token", secrets.token_hex(16))
        if hosts.num_processes() > 1:
            coordinator = coordination_service.state().coordinator_address
            self._server = _Server(listen(coordinator), self._token, max_bytes, put, get)
            threading.Thread(target=self._server.serve_forever, name="transfers", daemon=True).start()
            address = _own_host(coordinator), self._server.server_address[1]
            self._addresses = hosts.gather("transfer addresses", address)

    def __enter__(self) -> "Transfers":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def send(self, process: int, about: dict[str, Any], path: pathlib.Path) -> None:
        """Sends a file, and waits until the other process has stored it.

        Raises:
          OSError: if it was not sent or not stored.
        """
        with path.open("rb") as file, self._connect(process) as connection:
            size = path.stat().st_size
            connection.sendall(self._request("put", about, size))
            # By the kernel, without a copy in this process.
            connection.sendfile(file)
            with connection.makefile("rb") as replies:
                _read_reply(replies)

    def fetch(self, process: int, about: dict[str, Any]) -> bytearray:
        """Returns the content of a file of another process.

        Raises:
          OSError: if it was not received.
        """
        with self._connect(process) as connection:
            connection.sendall(self._request("get", about, 0))
            with connection.makefile("rb") as replies:
                # Allocated once, because a shard may be as large as the memory that is left.
                content = bytearray(_checked_size(_read_reply(replies), self._max_bytes))
                view = memoryview(content)
                while view and (count := replies.readinto(view)):
                    view = view[count:]
        if view:
            raise ConnectionError(f"{hosts.describe(process)} has ended during the transfer")
        return content

    def _connect(self, process: int) -> socket.socket:
        host, port = self._addresses[process]
        return socket.create_connection((host, port), timeout=_SOCKET_SECONDS)

    def _request(self, action: str, about: dict[str, Any], size: int) -> bytes:
        request = {"token": self._token, "action": action, "about": about, "bytes": size}
        return json.dumps(request).encode() + b"\n"


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, token: str, max_bytes: int, put: Put | None, get: Get | None):
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        # Replaced, because a server that binds by itself accepts only one family of addresses.
        self.socket.close()
        self.socket, self.server_address = listener, listener.getsockname()
        self.token, self.max_bytes, self.put, self.get = token, max_bytes, put, get

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a connection that breaks, which the process at its other end reports; prints bugs."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = _SOCKET_SECONDS

    def handle(self) -> None:
        """Serves one request; a client without the token, such as a port scanner, gets no answer."""
        request = _parse(self.rfile.readline(_MAX_LINE_BYTES))
        # Compared in constant time, as all secrets.
        if not hmac.compare_digest(str(request.get("token")).encode(), self.server.token.encode()):
            return
        try:
            if request["action"] == "put" and self.server.put is not None:
                size = _checked_size(request, self.server.max_bytes)
                self.server.put(request["about"], _chunks(self.rfile, size))
                self._reply({})
            elif request["action"] == "get" and self.server.get is not None:
                self._send(self.server.get(request["about"]))
        except (OSError, UserError) as error:
            self._reply({"error": hosts.error_message(error)})

    def _send(self, path: pathlib.Path) -> None:
        with path.open("rb") as file:
            self._reply({"bytes": path.stat().st_size})
            self.connection.sendfile(file)

    def _reply(self, values: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(values).encode() + b"\n")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _read_reply(replies: BinaryIO) -> dict[str, Any]:
    """Reads the reply to a request.

    Raises:
      ConnectionError: if the other process has failed or ended.
    """
    line = replies.readline(_MAX_LINE_BYTES)
    if not line:
        raise ConnectionError("the other process has closed the connection")
    reply = _parse(line)
    if "error" in reply:
        raise ConnectionError(reply["error"])
    return reply


def _checked_size(values: dict[str, Any], max_bytes: int) -> int:
    size = values.get("bytes")
    # Checked before memory is allocated for it.
    if not isinstance(size, int) or not 0 <= size <= max_bytes:
        raise ConnectionError(f"a transfer announces {size} bytes; the maximum is {max_bytes}")
    return size


def _chunks(stream: BufferedIOBase, size: int) -> Chunks:
    while size:
        chunk = stream.read(min(size, CHUNK_BYTES))
        if not chunk:
            raise ConnectionError("the other process has ended during the transfer")
        size -= len(chunk)
        yield chunk


def _own_host(coordinator: str) -> str:
    """Returns the name or address at which other processes reach this one."""
    host, _, port = coordinator.rpartition(":")
    if is_local(coordinator):
        return "127.0.0.1"
    if hosts.is_first():
        return host.strip("[]")
    # The address of the interface that leads to process 0. A connected UDP socket sends nothing.
    family, kind, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
