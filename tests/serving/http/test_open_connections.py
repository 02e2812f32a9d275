"""Limits on open connections: idle ones are closed for new ones, and one client cannot keep others out."""

import contextlib
import json
import socket

import httpx
import pytest
from serving_process import with_fake_engine

from zaya_jax.serving.http.open_connections import OpenConnections
from zaya_jax.serving.metrics import ServingMetrics


class FakeConnection:
    """A connection that records whether it was closed."""

    def __init__(self, connections, address):
        self.connections, self.is_closed = connections, False
        self.is_admitted = connections.admit(self, address)

    def abort(self):
        self.is_closed = True
        self.connections.remove(self)  # asyncio does this a moment later


def make(*, total=100, per_client=3):
    return OpenConnections(total=total, per_client=per_client, metrics=ServingMetrics())


def closed(connections, why):
    return connections._metrics.closed_connections.labels(why)._value.get()


def test_the_oldest_idle_connection_of_a_client_is_closed_for_a_new_one():
    connections = make()
    own = [FakeConnection(connections, "10.0.0.1") for _ in range(3)]
    other = FakeConnection(connections, "10.0.0.2")
    connections.set_idle(own[0], is_idle=False)
    late = FakeConnection(connections, "10.0.0.1")
    assert [each.is_closed for each in (*own, other, late)] == [False, True, False, False, False]
    assert late.is_admitted
    connections.set_idle(own[0], is_idle=True)  # idle again, and now the most recent idle one
    assert FakeConnection(connections, "10.0.0.1").is_admitted
    assert own[2].is_closed
    assert not own[0].is_closed
    assert (len(connections), closed(connections, "idle")) == (4, 2)


def test_busy_connections_of_a_client_keep_out_only_that_client():
    connections = make()
    own = [FakeConnection(connections, "10.0.0.1") for _ in range(3)]
    for each in own:
        connections.set_idle(each, is_idle=False)
    assert not FakeConnection(connections, "10.0.0.1").is_admitted
    assert FakeConnection(connections, "10.0.0.2").is_admitted
    assert not any(each.is_closed for each in own)
    assert closed(connections, "refused") == 1
    connections.remove(own[0])
    connections.remove(own[0])
    assert FakeConnection(connections, "10.0.0.1").is_admitted


def test_many_clients_with_idle_connections_keep_nobody_out():
    connections = make(total=8)
    crowd = [FakeConnection(connections, f"10.0.0.{number}") for number in range(20)]
    assert all(each.is_admitted for each in crowd)
    assert [each.is_closed for each in crowd] == [True] * 12 + [False] * 8
    for each in crowd:
        connections.set_idle(each, is_idle=False)
    assert not FakeConnection(connections, "10.0.1.1").is_admitted


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8:0:0:ffff::1", "2001:db8::2", True),
        ("2001:db8:0:1::1", "2001:db8::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("10.0.0.1", "10.0.0.2", False),
        (None, None, True),
    ],
)
def test_addresses_of_one_client(first, second, are_one):
    connections = make(per_client=1)
    busy = FakeConnection(connections, first)
    connections.set_idle(busy, is_idle=False)
    assert FakeConnection(connections, second).is_admitted != are_one


def test_closed_connections_are_forgotten():
    connections = make(total=50, per_client=5)
    for number in range(200):
        each = FakeConnection(connections, f"10.0.{number % 7}.1")
        connections.set_idle(each, is_idle=bool(number % 3))
        if number % 2:
            connections.remove(each)
    for each in list(connections._clients):
        connections.remove(each)
    assert len(connections) == 0
    assert [len(each) for each in (connections._counts, connections._idle, connections._idle_of)] == [0, 0, 0]


@pytest.fixture(scope="module")
def server():
    with with_fake_engine(limits={"client_connections": 40, "body_seconds": 30}) as process:
        yield process


@contextlib.contextmanager
def opened(server, number, sent=b"", source="127.0.0.1"):
    """Opens a number of connections that have sent some bytes."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(number):
            connection = socket.create_connection(
                (server.host, server.port), timeout=20, source_address=(source, 0)
            )
            stack.enter_context(connection)
            connection.sendall(sent)
            connections.append(connection)
        yield connections


def status(server, source="127.0.0.1"):
    transport = httpx.HTTPTransport(local_address=source)
    with httpx.Client(transport=transport, timeout=20) as client:
        return client.get(server.address + "/health").status_code


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET", b"GET /health HTTP/1.1\r\nX: y\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    ids=["nothing", "half a line", "half of the headers", "a request, then nothing"],
)
def test_idle_connections_keep_nobody_out(server, sent):
    """Idle connections, three times the limit, also of the client that sends the request."""
    with opened(server, 120, sent) as connections:
        # A request that is not answered yet keeps its connection busy.
        for connection in connections if sent.endswith(b"\r\n\r\n") else ():
            with contextlib.suppress(ConnectionResetError):
                connection.recv(4096)
        assert status(server) == 200
        assert status(server, "127.0.0.2") == 200


def test_busy_connections_keep_out_their_own_client(server):
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with opened(server, 60, f"{head}Content-Length: 9\r\n\r\n{{".encode(), "127.0.0.3"):
        assert status(server, "127.0.0.2") == 200
        with socket.create_connection((server.host, server.port), 20, ("127.0.0.3", 0)) as late:
            answer = late.recv(4096)
        assert answer.startswith(b"HTTP/1.1 429 ")
        message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert message == "this client has too many busy connections; the maximum is 40"
    assert status(server, "127.0.0.3") == 200
