"""A server on a real socket: invalid HTTP, slow clients, disconnects, and shutdown."""

import concurrent.futures
import contextlib
import json
import signal
import socket
import time

import httpx
import pytest
from fake_engine import TOKENIZER, tokens_of
from serving_process import with_fake_engine

from zaya_jax.inference.engine.request import Request
from zaya_jax.inference.engine.sampling_params import SamplingParams

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
        # The last check of this file: a signal during a response lets it finish, and the exit code is 0.
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
        assert time.monotonic() < end, "timed out"
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
    with contextlib.suppress(ConnectionResetError):  # an aborted connection has ended too
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_missing_headers_end_the_connection(server):
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
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),  # TLS on a port without it
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"y" * 100_000, b"400"),
        (post(b"zz\r\n", "Transfer-Encoding: chunked"), b"400"),  # an invalid length
        (post(b"ffffffffffffffffffff\r\n", "Transfer-Encoding: chunked"), b"40"),
        (post(b"2\r\n{}\r\n" * 3, "Transfer-Encoding: chunked"), b"408"),  # no last chunk
        (post(b"{}", "Content-Length: 50"), b"408"),  # less than the declared length
        (post(b"", "Content-Length: 99999999"), b"413"),
        (post(b"{}", "Content-Length: -1"), b"400"),
        (post(b"{}", "Content-Length: 2", "Content-Length: 3"), b"400"),
        (post(b"{}", "Content-Length: 2", "Transfer-Encoding: chunked"), b"40"),
    ],
    ids=lambda value: str(value[-40:]),
)
def test_invalid_http(server, sent, says):
    with connected(server) as connection:
        connection.sendall(sent)
        connection.settimeout(15)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 " + says)
    assert httpx.get(server.address + "/health").status_code == 200


def test_requests_in_a_row_on_one_connection(server):
    """Pipelined requests: the second is sent before the first response."""
    bodies = [json.dumps({"prompt": text, "max_tokens": 8, "seed": 0}).encode() for text in ("a", "b")]
    with connected(server) as connection:
        connection.sendall(b"".join(post(body, f"Content-Length: {len(body)}") for body in bodies))
        answer = read_all(connection)
    for text in ("a", "b"):
        prompt = tuple(TOKENIZER.delimiters.begin(TOKENIZER.encode(text)))
        request = Request(prompt, SamplingParams(max_new_tokens=8, stop_token_ids=(TOKENIZER.eos_id,)))
        written = json.dumps(TOKENIZER.decode(tokens_of(request)))
        assert written.encode() in answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_slot(server, stream):
    body = json.dumps({"prompt": "abc", "max_tokens": 500, "seed": 1, "stream": stream}).encode()
    with connected(server) as connection:
        connection.sendall(post(body, f"Content-Length: {len(body)}"))
        wait_until(lambda: metric(server, "running") == 1)
    wait_until(lambda: metric(server, "running") == 0, 2)


# As a stream it is 10,000 messages. `test_endpoint.py` tests the limit on unread events in process.
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_a_client_that_does_not_read_is_disconnected(server, stream):
    """The response with log-probabilities is larger than all buffers between server and client."""
    fields = {"prompt": "abc", "max_tokens": 400, "seed": 1, "stream": stream, "n": 24, "logprobs": 20}
    body = json.dumps(fields).encode()

    def slow():
        return metric(server, 'cancelled_total{why="slow"}')

    before = slow()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((server.host, server.port))
        connection.sendall(post(body, f"Content-Length: {len(body)}"))
        # Wait for the end rather than the start of the response, which may lie between two checks.
        wait_until(lambda: slow() == before + 1, 60)
        wait_until(lambda: metric(server, "running") + metric(server, "waiting") == 0)
        connection.settimeout(15)
        assert not read_all(connection).endswith((b"[DONE]\n\n", b"}"))


def test_a_second_signal_ends_a_server_whose_engine_hangs():
    with with_fake_engine(limits={"forced_seconds": 1.0, "drain_seconds": 100}, step_seconds=300) as stuck:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pending = pool.submit(
                httpx.post, stuck.address + "/v1/completions", json={"prompt": "a"}, timeout=60
            )
            wait_until(lambda: metric(stuck, "running") + metric(stuck, "waiting") == 1)
            stuck.popen.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(stuck.address + "/health").json()["status"] == "draining")
            assert stuck.end() == 1
            assert pending.exception() or pending.result().status_code == 503
        assert "a thread is still busy after a second signal" in stuck.lines[-1]
