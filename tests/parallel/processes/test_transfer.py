"""Transfers of files between processes, which are simulated by several servers in one process."""

import errno
import json
import pathlib
import socket

import pytest

from zaya_jax.parallel.processes import coordination_service, hosts
from zaya_jax.parallel.processes.transfer import Transfers

MAX_BYTES = 10_000_000


class Node:
    """A server of process 1, as process 0 sees it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.transfers = Transfers(max_bytes=MAX_BYTES, put=self.put, get=self.get)

    def put(self, about, chunks):
        (self.folder / about["name"]).write_bytes(b"".join(chunks))

    def get(self, about):
        return self.folder / about["name"]


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "num_processes", lambda: 2)
    monkeypatch.setattr(hosts, "broadcast_from_first", lambda name, value: value)
    monkeypatch.setattr(hosts, "gather", lambda name, value: [value, value])
    monkeypatch.setattr(coordination_service.state(), "coordinator_address", "127.0.0.1:1")
    node = Node(tmp_path)
    with node.transfers:
        yield node


def request(node: Node, line: bytes) -> bytes:
    """Returns the answer to a request of a foreign client; none if the server resets the connection."""
    with socket.create_connection(node.transfers._addresses[1], timeout=10) as connection:
        try:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            return connection.makefile("rb").read()
        except OSError as error:
            # The server closes without reading a line that is too long: at any of these calls.
            if error.errno in {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN}:
                return b""
            raise


def test_files_of_all_sizes_arrive_as_they_are(node, tmp_path):
    source = tmp_path / "source"
    for size in (0, 1, 5_000_000):
        content = bytes(range(256)) * (size // 256) + bytes(size % 256)
        source.write_bytes(content)
        node.transfers.send(1, {"name": "there"}, source)
        assert (tmp_path / "there").read_bytes() == content
        assert node.transfers.fetch(1, {"name": "there"}) == content


def test_failures_of_the_other_process_are_raised_here(node, tmp_path):
    with pytest.raises(OSError, match="missing: No such file"):
        node.transfers.fetch(1, {"name": "missing"})
    source = tmp_path / "source"
    source.write_bytes(bytes(MAX_BYTES + 1))
    with pytest.raises(OSError, match=r"announces 10000001 bytes; the maximum is 10000000|reset|pipe"):
        node.transfers.send(1, {"name": "there"}, source)
    with pytest.raises(OSError, match="announces 10000001 bytes"):
        node.transfers.fetch(1, {"name": "source"})
    assert not (tmp_path / "there").exists()


def test_a_client_without_the_token_gets_no_answer(node, tmp_path):
    (tmp_path / "secret").write_bytes(b"weights")
    for token in ("", "0" * 32, None, 7):
        line = json.dumps({"token": token, "action": "get", "about": {"name": "secret"}, "bytes": 0})
        assert request(node, line.encode() + b"\n") == b""
    for line in (b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{" * 100_000):
        assert request(node, line) == b""
    line = {"token": node.transfers._token, "action": "get", "about": {"name": "secret"}, "bytes": 0}
    assert request(node, json.dumps(line).encode() + b"\n").endswith(b"weights")


def test_a_sender_that_ends_early_stores_nothing(node, tmp_path):
    about = {"token": node.transfers._token, "action": "put", "about": {"name": "half"}, "bytes": 100}
    assert b"has ended" in request(node, json.dumps(about).encode() + b"\n" + b"x" * 50)
    assert not (tmp_path / "half").exists()
