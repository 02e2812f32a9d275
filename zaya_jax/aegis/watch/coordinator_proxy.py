"""A TCP proxy on the loopback between a process and the coordinator, which drops or damages what it forwards.

Everything that a child of process 0 exchanges with it outside of collectives passes it: the rendezvous, whose
connection stays that of its messages, and the heartbeats of jax. In runs of at most 17 processes all are.
Connections of gloo cannot: each process listens on a port that the kernel chooses, and publishes its address
in binary form inside of jaxlib, so that no address passes where it could be replaced.
"""

import contextlib
import socket
import threading

FORWARD, PARTITION, DAMAGE = "forward", "partition", "damage"
MODES = PARTITION, DAMAGE
"""Faults of the network: nothing arrives and no connection closes; or a bit in each message is flipped."""
_LOOPBACK = "127.0.0.1"
_CHUNK = 2**16


class CoordinatorProxy:
    """Forwards all connections to the coordinator, in threads of this process.

    Args:
      coordinator: address of the coordinator, HOST:PORT.

    Attributes:
      address: address of the proxy, HOST:PORT.
      mode: "forward", "partition" or "damage".
    """

    def __init__(self, coordinator: str):
        host, _, port = coordinator.rpartition(":")
        self._upstream = host.strip("[]"), int(port)
        self._listener = socket.create_server((_LOOPBACK, 0))
        self.address = f"{_LOOPBACK}:{self._listener.getsockname()[1]}"
        self.mode = FORWARD
        _start(self._accept)

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._upstream)
            except OSError:  # the coordinator has not started yet; the process tries again
                near.close()
                continue
            # One thread for each direction: either may wait for the other end.
            _start(self._forward, near, far)
            _start(self._forward, far, near)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either end has closed the connection
            while data := source.recv(_CHUNK):
                if self.mode == DAMAGE:
                    middle = len(data) // 2
                    data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
                # A partition is silent: a link that is down sends no reset.
                if self.mode != PARTITION:
                    target.sendall(data)
        # When one direction ends, the connection does: gRPC does not use half of one.
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _start(work, *arguments: socket.socket) -> None:
    threading.Thread(target=work, args=arguments, name="coordinator proxy", daemon=True).start()
