"""A server at a real socket: clients that lie, wait and leave, and a server that is told to end."""

import concurrent.futures
import contextlib
import json
import socket
import time

import httpx
import pytest
from fake_engine import TOKENIZER, tokens_of
from serving_process import with_fake_engine

from zaya_jax.inference.engine import Request

LIMITS = {
    "header_seconds": 0.5,
    "body_seconds": 0.5,
    "send_seconds": 1.0,
    "idle_seconds": 1,
    "drain_seconds": 20,
}


@pytest.fixture(scope="module")
def server():
    with with_fake_engine(limits=LIMITS, num_slots=32, step_seconds=0.002) as process:
        yield process
        # The file's last word: told to end while it writes, it finishes that, and leaves with 0.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            body = {"prompt": "last", "max_tokens": 300, "seed": 0}
            answer = pool.submit(httpx.post, process.address + "/v1/completions", json=body, timeout=30)
            wait_until(lambda: metric(process, "running") == 1)
            assert process.end() == 0
            assert answer.result().status_code == 200
        assert len(process.lines) == 1, process.lines  # no traceback, no warning


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def metric(server, name):
    lines = httpx.get(server.address + "/metrics").text.splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"zaya_serving_{name} ")]
    return float(value)


@contextlib.contextmanager
def connected(server):
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        yield connection


def post(body, *headers):
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


def read_all(connection):
    parts = []
    with contextlib.suppress(ConnectionResetError):  # an abort is an end too
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_headers_that_do_not_come_end_the_connection(server):
    for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost:", b"GET /health HTTP/1.1\r\nX: y\r\n"):
        with connected(server) as connection:
            connection.sendall(sent)
            assert read_all(connection) == b""


def test_idle_connections_end(server):
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b'{"status":"ready"}' in read_all(connection)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),  # TLS where there is none
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"y" * 100_000, b"400"),
        (post(b"zz\r\n", "Transfer-Encoding: chunked"), b"400"),  # a length that is none
        (post(b"ffffffffffffffffffff\r\n", "Transfer-Encoding: chunked"), b"40"),
        (post(b"2\r\n{}\r\n" * 3, "Transfer-Encoding: chunked"), b"408"),  # no last chunk
        (post(b"{}", "Content-Length: 50"), b"408"),  # less than was said
        (post(b"", "Content-Length: 99999999"), b"413"),
        (post(b"{}", "Content-Length: -1"), b"400"),
        (post(b"{}", "Content-Length: 2", "Content-Length: 3"), b"400"),
        (post(b"{}", "Content-Length: 2", "Transfer-Encoding: chunked"), b"40"),
    ],
    ids=lambda value: str(value[-40:]),
)
def test_lies_about_http(server, sent, says):
    with connected(server) as connection:
        connection.sendall(sent)
        connection.settimeout(15)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 " + says)
    assert httpx.get(server.address + "/health").status_code == 200


def test_requests_in_a_row_on_one_connection(server):
    """Pipelined: the second is sent before the first is answered."""
    bodies = [json.dumps({"prompt": text, "max_tokens": 8, "seed": 0}).encode() for text in ("a", "b")]
    with connected(server) as connection:
        connection.sendall(b"".join(post(body, f"Content-Length: {len(body)}") for body in bodies))
        answer = read_all(connection)
    for text in ("a", "b"):
        prompt = tuple(TOKENIZER.borders.begin(TOKENIZER.encode(text)))
        request = Request(prompt=prompt, max_new_tokens=8, seed=0, eos_id=TOKENIZER.eos_id)
        written = json.dumps(TOKENIZER.decode(tokens_of(request)))
        assert written.encode() in answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_is_cut_frees_its_slot(server, stream):
    body = json.dumps({"prompt": "abc", "max_tokens": 500, "seed": 1, "stream": stream}).encode()
    with connected(server) as connection:
        connection.sendall(post(body, f"Content-Length: {len(body)}"))
        wait_until(lambda: metric(server, "running") == 1)
    wait_until(lambda: metric(server, "running") == 0, 2)


# In pieces it is 10,000 messages: what ends them is tried in process too, by `test_departures.py`.
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_one_that_does_not_read_is_hung_up(server, stream):
    """Its answer of log-probabilities is larger than all buffers between it and the server."""
    fields = {"prompt": "abc", "max_tokens": 400, "seed": 1, "stream": stream, "n": 24, "logprobs": 20}
    body = json.dumps(fields).encode()

    def slow():
        return metric(server, 'cancelled_total{why="slow"}')

    before = slow()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((server.host, server.port))
        connection.sendall(post(body, f"Content-Length: {len(body)}"))
        # Not that it runs at all: it may have run between two looks.
        wait_until(lambda: slow() == before + 1, 60)
        wait_until(lambda: metric(server, "running") + metric(server, "waiting") == 0)
        connection.settimeout(15)
        assert not read_all(connection).endswith((b"[DONE]\n\n", b"}"))
