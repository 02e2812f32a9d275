"""Two hundred clients at once, many of which misbehave: correct responses, no leaks, bounded memory.

`-m campaign -s` prints the latency of the well-behaved clients.
"""

import asyncio
import collections
import dataclasses
import json
import os
import random
import socket
import sys
import time

import httpx
import pytest
from fake_engine import END, FORMAT, TOKENIZER, tokens_of
from serving_process import started, with_fake_engine
from small_runs import make_chat_run

from zaya_jax.data.chats.records import Message
from zaya_jax.inference.completion import complete
from zaya_jax.inference.engine.request import Request
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.loading import load_for_generation

NUM_CLIENTS = 200
SLOW_SECONDS = 20
WORDS = ["def f(left):", "é", "return", "right = left + 1", "total", "\n"]
HOSTILE = [
    b"", b"{", b"\xff" * 1000, b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": "' + b"x" * 900_000 + b'"}',
    b'{"prompt": "\\ud800"}', b'{"temperature": NaN, "prompt": "a"}', b'{"n": 1e400}', b'{"stop": [""]}',
    b'{"prompt": [' + b"5," * 200_000 + b"5]}", b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    b'{"max_tokens": ' + b"9" * 4000 + b"}", b'{"prompt": "a", "n": 128, "logprobs": 20, "stream": "yes"}',
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Known:
    """A request with its expected response."""

    path: str
    body: dict
    text: str
    thought: str = ""


@dataclasses.dataclass
class ClientResults:
    """Measurements of all clients."""

    seconds: list = dataclasses.field(default_factory=list)
    first_seconds: list = dataclasses.field(default_factory=list)
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)


def known_of_fake(draw, number):
    """Returns a request to the fake engine with its expected text."""
    seed, longest = draw.randrange(1000), draw.randrange(20, 300)
    text = " ".join(draw.choices(WORDS, k=3)) + str(number)
    if draw.random() < 0.5:
        prompt = TOKENIZER.delimiters.begin(TOKENIZER.encode(text))
        params = SamplingParams(max_new_tokens=longest, seed=seed, stop_token_ids=(TOKENIZER.eos_id,))
        request = Request(tuple(prompt), params)
        body = {"prompt": text, "max_tokens": longest, "seed": seed}
        return Known("/v1/completions", body, TOKENIZER.decode(tokens_of(request)))
    prompt = FORMAT.answer_prompt([Message("user", text)])
    request = Request(tuple(prompt), SamplingParams(max_new_tokens=longest, seed=seed, stop_token_ids=(END,)))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": longest, "seed": seed}
    return Known("/v1/chat/completions", body, TOKENIZER.decode(tokens_of(request)[4:]), "hm")


async def well_behaved_client(http, known, crowd, *, stream):
    """A client that checks its response, and retries after 429."""
    while True:
        begun = time.monotonic()
        text, thought, first = "", "", None
        async with http.stream("POST", known.path, json=known.body | {"stream": stream}) as answer:
            if answer.status_code == 429:
                crowd.counts["429"] += 1
                await answer.aread()
                await asyncio.sleep(float(answer.headers["retry-after"]) * random.random())
                continue
            assert answer.status_code == 200, await answer.aread()
            if stream:
                lines = []
                async for line in answer.aiter_lines():
                    first = first or time.monotonic() - begun
                    lines.append(line)
                events = [line.removeprefix("data: ") for line in lines if line]
                assert events.pop() == "[DONE]"
                for event in events:
                    choice = json.loads(event)["choices"][0]
                    part = choice.get("delta", choice)
                    text += part.get("content") or part.get("text") or ""
                    thought += part.get("reasoning_content") or ""
                crowd.first_seconds.append(first)
            else:
                choice = json.loads(await answer.aread())["choices"][0]
                part = choice.get("message", choice)
                text, thought = (
                    part.get("content") or part.get("text") or "",
                    part.get("reasoning_content", ""),
                )
        assert (text, thought) == (known.text, known.thought)
        crowd.seconds.append(time.monotonic() - begun)
        crowd.counts["right"] += 1
        return


async def disconnecting_client(server, known, crowd, draw):
    """A client that disconnects a moment after its request."""
    _, writer = await asyncio.open_connection(server.host, server.port)
    await send(writer, known.path, json.dumps(known.body | {"stream": draw.random() < 0.5}).encode())
    await asyncio.sleep(draw.random() * 0.3)
    writer.transport.abort()
    crowd.counts["left"] += 1


async def slow_client(server, known, crowd):
    """A client that requests more than socket buffers hold, and does not read until it is disconnected."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (server.host, server.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    writer.transport.pause_reading()
    more = {"top_logprobs": 20, "logprobs": True} if "messages" in known.body else {"logprobs": 20}
    await send(writer, known.path, json.dumps(known.body | more | {"stream": True, "n": 12}).encode())
    await asyncio.sleep(SLOW_SECONDS)
    writer.transport.resume_reading()
    try:
        whole = await asyncio.wait_for(reader.read(), 120)
    except ConnectionResetError:
        whole = b""
    writer.close()
    crowd.counts["slow, whole" if b"[DONE]" in whole else "slow, cut off"] += 1


async def hostile(http, crowd, draw):
    path = draw.choice(["/v1/completions", "/v1/chat/completions"])
    headers = {"content-type": "application/json"}
    answer = await http.post(path, content=draw.choice(HOSTILE), headers=headers)
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["message"]
    crowd.counts["hostile, refused"] += 1


async def send(writer, path, body):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


async def run_clients(server, knowns, seed):
    """Runs all clients of a round at once; three in five behave well."""
    draw, crowd = random.Random(seed), ClientResults()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.address, limits=limits, timeout=300) as http:
        clients = []
        for number in range(NUM_CLIENTS):
            known, kind = draw.choice(knowns), number % 20
            if kind < 12:
                clients.append(well_behaved_client(http, known, crowd, stream=kind % 2 == 0))
            elif kind < 15:
                clients.append(disconnecting_client(server, known, crowd, draw))
            elif kind < 17:
                clients.append(slow_client(server, known, crowd))
            else:
                clients.append(hostile(http, crowd, draw))
        await asyncio.gather(*clients)
    return crowd


def settle(server):
    """Waits until no request and no connection is left, and returns the server's resources."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        lines = httpx.get(server.address + "/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        if values["zaya_serving_running"] == values["zaya_serving_waiting"] == "0.0":
            break
        time.sleep(0.1)
    else:
        raise AssertionError("texts are left")
    time.sleep(1.5)  # longer than the time limit of idle connections
    return values, server.num_files, server.num_threads, server.megabytes


def percentiles(seconds):
    ordered = sorted(seconds)
    return ", ".join(
        f"p{p} {ordered[min(len(ordered) - 1, len(ordered) * p // 100)]:.2f} s" for p in (50, 90, 99)
    )


def check_rounds(server, knowns, *, num_rounds, cuts_off=True):
    """Runs rounds of clients: after each, the server uses the same resources as after the first."""
    asyncio.run(run_clients(server, knowns, 0))  # the first round allocates what is allocated once
    _, files, threads, megabytes = settle(server)
    for number in range(1, num_rounds + 1):
        begun = time.monotonic()
        crowd = asyncio.run(run_clients(server, knowns, number))
        seconds = time.monotonic() - begun
        values, files_now, threads_now, megabytes_now = settle(server)
        print(
            f"\nround {number}, {seconds:.1f} s: {dict(crowd.counts)}; "
            f"whole answers {percentiles(crowd.seconds)}; first parts {percentiles(crowd.first_seconds)}; "
            f"{files_now} files, {threads_now} threads, {megabytes_now:.0f} MB (first {megabytes:.0f})"
        )
        assert crowd.counts["right"] == NUM_CLIENTS * 12 // 20
        assert (files_now, threads_now) == (files, threads)
        assert megabytes_now < megabytes + 50
    assert crowd.counts["slow, cut off"] or not cuts_off
    cancelled = {why: values[f'zaya_serving_cancelled_total{{why="{why}"}}'] for why in ("gone", "slow")}
    print(f"ended by the server: {cancelled}")
    assert float(cancelled["gone"]) > 0
    assert not [name for name in values if "requests_total" in name and 'code="500"' in name]


@pytest.mark.campaign
def test_many_clients_of_a_fake_engine():
    draw = random.Random(0)
    knowns = [known_of_fake(draw, number) for number in range(300)]
    limits = {"send_seconds": 2, "idle_seconds": 1}
    with with_fake_engine(limits=limits, num_slots=64, max_waiting=400, step_seconds=0.002) as server:
        check_rounds(server, knowns, num_rounds=2)
        assert server.end(seconds=60) == 0
        assert len(server.lines) == 1, server.lines


def known_of_run(run, draw, number):
    """Returns a request to a run with its expected text, from `complete`."""
    seed, text = number, "def f(left):\n    right = left + " + str(draw.randrange(10))
    prompt = run.tokenizer.delimiters.begin(run.tokenizer.encode(text))
    settings = SamplingParams(
        max_new_tokens=24, temperature=0.8, seed=seed, stop_token_ids=(run.tokenizer.eos_id,)
    )
    (actual,) = complete(run.model, run.variables, run.tokenizer, [prompt], settings)
    body = {"prompt": text, "max_tokens": 24, "seed": seed, "temperature": 0.8}
    return Known("/v1/completions", body, actual.text)


@pytest.mark.campaign
def test_many_clients_of_a_run(tmp_path):
    """Responses of the small model are too short to detect clients that do not read."""
    make_chat_run(tmp_path / "run")
    run, draw = load_for_generation(str(tmp_path / "run")), random.Random(0)
    knowns = [known_of_run(run, draw, number) for number in range(40)]
    options = ("--port", "0", "--slots", "16", "--max-waiting", "400", "--prefix-mib", "1")
    command = [sys.executable, "-m", "zaya_jax.cli", "serve", str(tmp_path / "run"), *options]
    with started(command, environment=dict(os.environ)) as server:
        check_rounds(server, knowns, num_rounds=2, cuts_off=False)
        assert server.end(seconds=60) == 0
        assert len(server.lines) == 1, server.lines
