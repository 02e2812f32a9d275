"""Signs of life of the processes of a run, so that an error can name the process that is lost.

jax detects by itself that a process is lost, but does not say which. So each process sends signs of life to
its neighbors in the tree of processes at regular intervals. Which of them are silent goes up to process 0,
and from there to all.
"""

import socket
import threading
import time
from collections.abc import Callable

from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.tree.links import TreeLinks

_SIGNS_PER_LIMIT = 10
_TICK_SECONDS = 1.0
# A gap between two ticks from which on this process was paused: by SIGSTOP, or with its machine.
_PAUSE_SECONDS = 10.0
_CONNECT_SECONDS = 2.0
# The first bytes of a client, RFC 9113 section 3.4: a fixed text, and an empty frame of settings (type 4);
# and the frame that acknowledges it.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_HTTP2_ACKNOWLEDGED = b"\0\0\0\4\1\0\0\0\0"


class Liveness:
    """Sends signs of life and watches those of the other processes, in its own threads.

    Args:
      links: connections with the neighbors in the tree.
      group: processes of the run.
      describe: function from a process number to text with its host's name.
      limit_seconds: time in seconds without a sign of life after which jax reports a process as lost.
    """

    def __init__(
        self, links: TreeLinks, group: ProcessGroup, describe: Callable[[int], str], *, limit_seconds: float
    ):
        self._links, self._group, self._describe = links, group, describe
        self._limit_seconds = limit_seconds
        self._interval = max(_TICK_SECONDS, limit_seconds / _SIGNS_PER_LIMIT)
        self._ticked, self._pause = time.monotonic(), 0.0
        self._ended = threading.Event()
        loops = (self._tick, self._send_signs)
        self._threads = [threading.Thread(target=loop, name="liveness", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends both threads, and waits for them: this process sends no more signs of life."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def describe_loss(self) -> str:
        """Returns why jax reports a process as lost, as far as this process knows."""
        pause = max(self._pause, time.monotonic() - self._ticked)
        if pause > _PAUSE_SECONDS:
            return (
                f"{self._describe(self._group.process)} was paused for {pause:.0f} s, as by SIGSTOP, and "
                "lost its connection with the other processes of the run"
            )
        if self._group.process and (obstacle := self._find_obstacle()) is not None:
            return obstacle
        who = ", ".join(map(self._describe, sorted(self._links.node.silent))) or "another process of this run"
        return f"{who} sent no sign of life for up to {self._limit_seconds:.0f} s"

    def _find_obstacle(self) -> str | None:
        """Returns what keeps this process from process 0, by a new connection; None if that one works.

        jax's service answers at that address as long as process 0 has not ended.
        """
        host, _, port = self._group.coordinator.rpartition(":")
        unreachable = (
            f"{self._describe(self._group.process)} does not reach the host of process 0: that one is "
            "stopped, or the network between them fails"
        )
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS) as connection:
                connection.sendall(_HTTP2_PREFACE)
                answer = b""
                # A server of HTTP/2, which gRPC uses, acknowledges the settings of a client at once.
                while _HTTP2_ACKNOWLEDGED not in answer:
                    if not (received := connection.recv(2**12)):
                        return unreachable
                    answer += received
                return None
        except (TimeoutError, ConnectionResetError):
            return unreachable
        except OSError:
            return f"{self._describe(0)} is gone"

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            now = time.monotonic()
            # The pause is kept until the next long gap: jax notices the loss that it causes some time later.
            if now - self._ticked > _PAUSE_SECONDS:
                self._pause = now - self._ticked
            self._ticked = now

    def _send_signs(self) -> None:
        is_begun = False
        while not self._ended.wait(self._interval if is_begun else 0.0):
            is_begun = True
            # Half of the limit: all processes must know who is silent when jax reaches the limit.
            self._links.beat(self._limit_seconds / 2)
