"""Bodies that are expensive to read: limits on size and depth, threads, and the time limit."""

import asyncio
import contextlib
import json
import threading
import time

import pytest
import tokenizers
from fake_engine import FakeEngine
from serving_client import Client, client, serving
from tokenizers import decoders, models, pre_tokenizers, trainers

from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.serving import service as service_module
from zaya_jax.serving.api.request import read_completion
from zaya_jax.serving.http import body_structure
from zaya_jax.serving.http.body_structure import MAX_DEPTH, check_structure
from zaya_jax.serving.http.errors import ApiError
from zaya_jax.serving.http.limits import ServingLimits
from zaya_jax.serving.service import SMALL_BODY_BYTES

COMPLETIONS = "/v1/completions"
LIMIT = 1 << 20
VALUES = LIMIT // 4


def nested(opening, closing, depth):
    return opening * depth + b"1" + closing * depth


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (nested(b"[", b"]", MAX_DEPTH + 1), "nested too deeply; the maximum is 64 levels"),
        (nested(b'{"a":', b"}", MAX_DEPTH + 1), "nested too deeply"),
        (b'{"a": [' + nested(b'[{"b":', b"}]", 40) + b"]}", "nested too deeply"),
        (b"[" * 500_000, "too many values"),
        (b"[" * 1000, "nested too deeply"),
        (b'{"prompt": [' + b"1," * VALUES + b"1]}", "too many values; the maximum is 262,144"),
        (b'{"a": [' + b"[]," * VALUES + b"1]}", "too many values"),
        (b"{" + b",".join(b'"":0' for _ in range(VALUES)) + b"}", "too many values"),
        (b'{"a": "' + b"x" * 100 + b'", "b": [' + b"0," * VALUES + b"0]}", "too many values"),
        (b'["\\"",' + b"[" * 100, "nested too deeply"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_bodies_that_are_too_deep_or_too_large(body, sentence):
    with pytest.raises(ApiError, match=sentence):
        check_structure(body, max_body_bytes=LIMIT)


@pytest.mark.parametrize(
    "value",
    [
        "," * 900_000,
        "[" * 900_000,
        '"[{,' * 200_000,
        "\\" * 400_000 + "[" * 100_000,
        '\\"[' * 200_000,
        [[[1, [2]], {}] for _ in range(1000)],
        json.loads(nested(b"[", b"]", MAX_DEPTH - 1)),
        ["a,b", "c[", "{", '"', "\\"] * 1000,
    ],
    ids=lambda value: str(value)[:20],
)
def test_content_of_strings_does_not_count(value):
    """Commas, brackets, quotes and backslashes within strings, as UTF-8 and as escapes."""
    for ensure_ascii in (True, False):
        body = json.dumps({"prompt": value}, ensure_ascii=ensure_ascii).encode()
        check_structure(body, max_body_bytes=LIMIT)


def test_the_depth_equals_that_of_the_parsed_value(monkeypatch):
    """The depth of generated bodies, compared with that of the parsed value."""
    monkeypatch.setattr(body_structure, "MAX_DEPTH", 3)

    def depth(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return (1 + max(map(depth, inner), default=0)) if isinstance(value, list | dict) else 0

    leaves = [1, "a[", "{", '"', None, [], {}]
    values = [*leaves, *([leaf] for leaf in leaves), *({"[": leaf} for leaf in leaves)]
    for _ in range(2):
        values = [*values, *([value, 2] for value in values), *({",": value} for value in values)]
    outcomes = set()
    for value in values:
        body, is_deep = json.dumps(value).encode(), depth(value) > 3
        outcomes.add(is_deep)
        with pytest.raises(ApiError, match="too deeply") if is_deep else contextlib.nullcontext():
            check_structure(body, max_body_bytes=LIMIT)
    assert outcomes == {True, False}


def blocked_reading(monkeypatch):
    """Blocks the reading of large bodies. Returns the event that releases it, and the sizes of the bodies."""
    released, begun = threading.Event(), []

    def check(body, *, max_body_bytes):
        if len(body) > SMALL_BODY_BYTES:
            begun.append(len(body))
            assert released.wait(30)

    monkeypatch.setattr(service_module, "check_structure", check)
    return released, begun


LARGE = {"prompt": "a", "max_tokens": 1, "stop": ["x" * 250] * 16, "user": "u" * SMALL_BODY_BYTES}
SMALL = {"prompt": "a", "max_tokens": 1, "seed": 0}


def test_small_bodies_do_not_wait_for_large_ones(monkeypatch):
    released, begun = blocked_reading(monkeypatch)

    async def run():
        async with serving() as (_, application), client(application) as http:
            large = [Client(application, COMPLETIONS, LARGE) for _ in range(6)]
            while not begun:
                await asyncio.sleep(0.001)
            for _ in range(5):
                assert (await http.post(COMPLETIONS, json=SMALL)).status_code == 200
            assert (await http.get("/health")).status_code == 200
            assert [each.status for each in large] == [None] * 6
            assert len(begun) == 1  # the others are queued and have no thread
            released.set()
            await asyncio.gather(*(each.task for each in large))
            assert [each.status for each in large] == [200] * 6

    asyncio.run(run())


def test_a_body_that_takes_too_long_is_refused_and_frees_its_thread(monkeypatch):
    released, begun = blocked_reading(monkeypatch)

    async def run():
        limits = ServingLimits(read_seconds=0.1)
        async with serving(limits=limits) as (_, application), client(application) as http:
            answers = await asyncio.gather(*(http.post(COMPLETIONS, json=LARGE) for _ in range(4)))
            assert [answer.status_code for answer in answers] == [503] * 4
            message = answers[0].json()["error"]["message"]
            assert message == "the body could not be read within 0.1 seconds; split the request"
            assert len(begun) == 1  # never more threads than the limit
            released.set()
            while (await http.post(COMPLETIONS, json=LARGE)).status_code != 200:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_the_event_loop_does_not_read_bodies(monkeypatch):
    """Parsing, validation and tokenization of small and large bodies run in worker threads."""
    threads = set()

    def read(model, body):
        threads.add(threading.current_thread())
        return read_completion(model, body)

    async def run():
        async with serving(FakeEngine()) as (service, _):
            for body in (SMALL, LARGE):
                responses = await service.read(read, json.dumps(body).encode())
                assert responses.num_texts == 1

    asyncio.run(run())
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("specials", [False, True])
@pytest.mark.parametrize("text", ["a", " ", "x(", "\u4e2d\u6587", "def f(left):\n"], ids=ascii)
def test_other_threads_run_while_a_long_text_is_encoded(text, specials, tmp_path):
    """A thread that reads the clock every millisecond is never blocked for half of the encoding time."""
    tokenizer = trained_tokenizer(tmp_path / "tokenizer.json")
    long = (text * 60_000)[:60_000]
    looks, is_over = [], threading.Event()

    def look():
        while not is_over.wait(0.001):
            looks.append(time.monotonic())

    watcher = threading.Thread(target=look)
    watcher.start()
    begun = time.monotonic()
    ids = tokenizer.encode(long, specials=specials)
    took = time.monotonic() - begun
    is_over.set()
    watcher.join()
    assert tokenizer.decode(ids) == long
    gaps = [after - before for before, after in zip([begun, *looks], looks, strict=False)]
    assert max(gaps) < max(took / 2, 0.05)


def trained_tokenizer(file):
    """Trains a byte-level BPE tokenizer like GPT-2's, but without splitting into words."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    raw.train_from_iterator(["def f(left):\n    return left + 1\n"] * 3, trainer)
    raw.save(str(file))
    return load_tokenizer(str(file))


@pytest.mark.campaign
def test_others_are_answered_within_a_second_of_each_hostile_body():
    """A server process receives five hostile bodies of a kind at a time."""
    from concurrent.futures import ThreadPoolExecutor

    import httpx
    from serving_process import with_fake_engine

    keys = b"{" + b",".join(b'"k%d":1' % number for number in range(90_000)) + b"}"
    hostile = [
        keys,
        keys[:-1] + b',"k1":2}',
        b"[" * 1_000_000,
        b'{"prompt": [' + b"5," * 500_000 + b"5]}",
        b'{"prompt": [' + b"5," * 200_000 + b"5]}",
        b'{"prompt": "' + b"x" * 1_000_000 + b'"}',
        b'{"prompt": "' + b"\\u00e9" * 160_000 + b'"}',
        b'{"prompt": ["' + b'","'.join([b"a"] * 250_000) + b'"]}',
        b'{"messages": [' + b",".join([b'{"role": "user", "content": "a"}'] * 30_000) + b"]}",
        json.dumps({"messages": [{"role": "user", "content": "a" * 900}] * 1000}).encode(),
    ]
    headers = {"content-type": "application/json"}
    with with_fake_engine() as server, ThreadPoolExecutor(5) as pool, httpx.Client(timeout=60) as http:
        for body in hostile:
            address = server.address + (COMPLETIONS if b"messages" not in body else "/v1/chat/completions")
            responses = [
                pool.submit(httpx.post, address, content=body, headers=headers, timeout=60) for _ in range(5)
            ]
            slowest = 0.0
            while not all(each.done() for each in responses):
                begun = time.monotonic()
                assert http.post(server.address + COMPLETIONS, json=SMALL).status_code == 200
                slowest = max(slowest, time.monotonic() - begun)
            print(
                body[:30],
                {each.result().status_code for each in responses},
                f"others: {slowest:.3f} s at most",
            )
            assert {each.result().status_code for each in responses} <= {
                400,
                413,
                503,
            }  # 503 is the time limit
            assert slowest < 1
