"""TCP connections of a process with its parent and children in the tree, and the threads that read them.

A message is one line: a checksum of 8 hexadecimal digits, since that of TCP misses one in 65,536 damaged
packets, and JSON. The connections are those of the rendezvous.
"""

import collections
import contextlib
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from zaya_jax.parallel.processes.listeners import PeerConnection
from zaya_jax.parallel.processes.tree.protocol import ALIVE, Message, TreeNode
from zaya_jax.parallel.processes.tree.shape import Place

# Time for a thread to notice that its connection is closed.
_CLOSE_SECONDS = 2.0
ENDED, DAMAGED = "ended", "damaged"
"""Why a connection is of no use any more: its other end was closed, or a message had a wrong checksum."""


def encode(value: Any) -> bytes:
    """Returns a JSON value as a line with a checksum."""
    content = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x%s\n" % (zlib.crc32(content), content)


def decode(line: bytes) -> Any:
    """Returns the value of a line.

    Raises:
      ValueError: if the line is damaged.
    """
    content = line[8:].removesuffix(b"\n")
    if b"%08x" % zlib.crc32(content) != line[:8]:
        raise ValueError("a message is damaged")
    return json.loads(content)


class TreeLinks:
    """Runs the protocol of this process over its connections, in one thread per connection.

    Args:
      place: place of this process.
      connections: connections with the parent and the children, by process number.

    Attributes:
      node: protocol state of this process. Use it only within `changed`.
      changed: lock of all state, and condition that is notified of each change.
      broken: why connections have ended, by process number: `ENDED` or `DAMAGED`.
      num_sent: number of messages sent; as the following numbers without signs of life, which do not depend
        on what the processes do.
      num_received: number of messages received.
      bytes_sent: bytes sent.
      bytes_received: bytes received.
    """

    def __init__(self, place: Place, connections: Mapping[int, PeerConnection]):
        self.changed = threading.Condition()
        self.node = TreeNode(place, send=self._send, after=self._after)
        self.broken: dict[int, str] = {}
        self.num_sent = self.num_received = self.bytes_sent = self.bytes_received = 0
        self._connections = dict(connections)
        self._outboxes = {number: _Outbox(each.socket) for number, each in connections.items()}
        self._last_signs = dict.fromkeys(connections, time.monotonic())
        self._threads: list[threading.Thread] = []
        # The same value goes to all children: its line is made once.
        self._encoded: tuple[Message, bytes] | None = None
        for number, connection in connections.items():
            connection.socket.settimeout(None)
            # Small messages would otherwise wait for the acknowledgement of earlier ones.
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arguments = number, connection
            self._threads.append(
                threading.Thread(target=self._read, args=arguments, name="tree link", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def beat(self, silent_seconds: float) -> None:
        """Sends a sign of life to the neighbors.

        Args:
          silent_seconds: time in seconds after which a neighbor without a sign of life is silent.
        """
        now = time.monotonic()
        # Any message counts as a sign: a busy neighbor is not silent.
        with self.changed:
            silent = [number for number, at in self._last_signs.items() if now - at > silent_seconds]
            self.node.beat(silent)

    def close(self) -> None:
        """Closes the connections; the threads end."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                # Wakes the thread that reads, which would keep the reader open.
                connection.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        for connection in self._connections.values():
            connection.close()

    def _read(self, number: int, connection: PeerConnection) -> None:
        reason = ENDED
        try:
            for line in connection.lines():
                self._receive(number, line)
        except ValueError:
            reason = DAMAGED
            # The other end then notices, too: it must leave the run, which cannot continue without it.
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        with self.changed:
            self.broken.setdefault(number, reason)
            self.changed.notify_all()

    def _receive(self, number: int, line: bytes) -> None:
        message = decode(line)
        with self.changed:
            if message["kind"] != ALIVE:
                self.num_received += 1
                self.bytes_received += len(line)
            self._last_signs[number] = time.monotonic()
            self.node.receive(number, message)
            self.changed.notify_all()

    def _send(self, number: int, message: Message) -> None:
        """Sends a message; one to a lost neighbor is dropped, and waits in exchanges report the loss."""
        if number in self.broken:
            return
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = message, encode(message)
        if message["kind"] != ALIVE:
            self.num_sent += 1
            self.bytes_sent += len(self._encoded[1])
        self._outboxes[number].put(self._encoded[1])

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        def run() -> None:
            with self.changed:
                work()
                self.changed.notify_all()

        timer = threading.Timer(seconds, run)
        # It must not keep a process from its exit.
        timer.daemon = True
        timer.start()


class _Outbox:
    """Sends lines in order without waiting, so that a stopped neighbor does not stop this process.

    Two processes that waited with their locks for each other's buffers would never continue.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._waiting: collections.deque[bytes] = collections.deque()
        self._lock = threading.Lock()

    def put(self, line: bytes) -> None:
        """Sends a line; what does not fit into the buffer of the kernel is sent by a thread."""
        with self._lock:
            if self._waiting:
                self._waiting.append(line)
                return
            try:
                sent = self._connection.send(line, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:  # the thread that reads reports the end of the connection
                return
            if sent < len(line):
                self._waiting.append(line[sent:])
                threading.Thread(target=self._flush, name="tree outbox", daemon=True).start()

    def _flush(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                # Without the lock: this may wait for as long as the neighbor does not read.
                self._connection.sendall(self._waiting[0])
                with self._lock:
                    self._waiting.popleft()
                    if not self._waiting:
                        return
