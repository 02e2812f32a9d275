"""What keeps a process from process 0: nothing, an end of that process, or the network between them."""

import contextlib
import socket
import threading

import pytest

from zaya_jax.parallel.processes import liveness
from zaya_jax.parallel.processes.liveness import Liveness
from zaya_jax.parallel.processes.process_group import ProcessGroup

ACKNOWLEDGED = bytes.fromhex("000000040100000000")
SETTINGS = bytes.fromhex("000006040000000000000500004000")
"""Frames of RFC 9113: an acknowledgment, and settings with a maximum frame size."""


def obstacle(port):
    checked = object.__new__(Liveness)
    checked._group, checked._describe = ProcessGroup(f"127.0.0.1:{port}", 2, 1), "process {}".format
    return checked._find_obstacle()


def serve(listener, answer):
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(100).startswith(b"PRI * HTTP/2.0")
        connection.sendall(answer)
        connection.recv(1)  # until the other end closes


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (SETTINGS + ACKNOWLEDGED, None),
        (SETTINGS, "process 1 does not reach the host of process 0"),
        (SETTINGS[:5] + b"\1" + SETTINGS[6:], "process 1 does not reach the host of process 0"),
    ],
)
def test_a_working_server_acknowledges_settings(answer, sentence, monkeypatch):
    monkeypatch.setattr(liveness, "_CONNECT_SECONDS", 0.3)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = threading.Thread(target=serve, args=(listener, answer))
        server.start()
        found = obstacle(listener.getsockname()[1])
        server.join()
    assert found is None if sentence is None else str(found).startswith(sentence)


def test_a_process_that_has_ended_is_gone():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    assert obstacle(port) == "process 0 is gone"
