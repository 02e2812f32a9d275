# ruff: noqa: E501 (the table of mistakes has a line each)
"""Bodies that cannot be answered: one clear sentence in OpenAI's form, and never a bug."""

import asyncio
import collections
import json

import pytest
from fake_engine import FakeEngine, fake_served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_client import ask, client, serving

from zaya_jax.serving.limits import ServingLimits

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def said(*messages):
    return {"messages": list(messages)}


MISTAKES = [
    (COMPLETIONS, b"", "the body is not JSON"),
    (COMPLETIONS, b"\xff\xfe{}", "the body is not JSON"),
    (COMPLETIONS, b"[1]", "the body holds a list; it must be a JSON object"),
    (COMPLETIONS, b'{"n": 1, "n": 2}', 'the body has "n" twice'),
    (COMPLETIONS, b"[" * 200_000, "nested too deeply"),
    (COMPLETIONS, b'{"prompt": ' + b'{"a":' * 100_000, "nested too deeply"),
    (COMPLETIONS, b'{"n": ' + b"9" * 5000 + b"}", "the body is not JSON"),
    (COMPLETIONS, b'{"temperature": NaN}', "temperature is no finite number; it must be a number from 0 to 100"),
    (COMPLETIONS, b'{"temperature": 1e999}', "temperature is no finite number"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature is 'hot'; it must be a number from 0 to 100"),
    (COMPLETIONS, {"temperature": 10**400}, "temperature is 1000000000"),
    (COMPLETIONS, {"temperature": True}, "temperature is true"),
    (COMPLETIONS, {"top_p": 0}, "top_p is 0; it must be above 0 and at most 1"),
    (COMPLETIONS, {"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
    (COMPLETIONS, {"seed": 2**65}, "seed is 36893488147419103232; it must be a whole number"),
    (COMPLETIONS, {"n": 0}, "n is 0; it must be a whole number from 1 to 128"),
    (COMPLETIONS, {"n": 129}, "n is 129; it must be a whole number from 1 to 128"),
    (COMPLETIONS, {"n": "2"}, "n is '2'; it must be a whole number"),
    (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "65 prompts with n 2 are 130 texts; one request may have 128"),
    (COMPLETIONS, {"prompt": ["a"] * 105}, "this asks for 105 texts; the server takes 104 at once"),
    (COMPLETIONS, {"stream": "yes"}, "stream is 'yes'; it must be true or false"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options goes with stream"),
    (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, 'there is no field "x"'),
    (COMPLETIONS, {"stop": ["a"] * 17}, "stop is a list of 17; it must be at most 16 strings"),
    (COMPLETIONS, {"stop": ""}, "stop is ''; it must be of 1 to 256 characters"),
    (COMPLETIONS, {"stop": [7]}, "stop is 7; it must be text"),
    (COMPLETIONS, {"stop": "x" * 257}, "it must be of 1 to 256 characters"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt is an object; it must be text"),
    (COMPLETIONS, {"prompt": []}, "prompt is an empty list"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt is an empty list"),
    (COMPLETIONS, {"prompt": [263]}, "prompt is 263; it must be text, or tokens from 0 to 262"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt is -1; it must be"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt is 'a'; it must be"),
    (COMPLETIONS, {"prompt": [True]}, "prompt is true; it must be"),
    (COMPLETIONS, b'{"prompt": "a\\ud800"}', "prompt has half a surrogate pair at character 1"),
    (COMPLETIONS, {"prompt": "x" * 512}, "the prompt has 513 tokens and the answer may have 16"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 511}, "together they must not exceed 512"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens is 0; it must be at least 1, or 0 with echo"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens is -1; it must be a whole number from 0"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs is 21; it must be a whole number from 0 to 20"),
    (COMPLETIONS, {"echo": True, "routing": True}, "ask for it without echo"),
    (COMPLETIONS, {"suffix": "x"}, "suffix is 'x', which this server cannot do; leave it out"),
    (COMPLETIONS, {"best_of": 3}, "best_of is 3, which this server cannot do"),
    (COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias is an object, which this server cannot do"),
    (COMPLETIONS, {"temprature": 1}, 'there is no field "temprature"; did you mean "temperature"?'),
    (COMPLETIONS, b'{"\\ud800": 1}', 'there is no field "\\ud800"; see the README'),
    (COMPLETIONS, {"messages": [USER]}, 'there is no field "messages"'),
    (COMPLETIONS, {"model": "gpt"}, "there is no model 'gpt'; this server has 'fake'"),
    (CHAT, {}, "messages is null; it must be a list of at least one message"),
    (CHAT, said(), "messages is a list of 0; it must be a list of at least one message"),
    (CHAT, said(*[USER] * 1001), "messages is a list of 1001; it must be a list of at most 1000"),
    (CHAT, said("hi"), "messages[0] is 'hi'; it must be an object with role and content"),
    (CHAT, said(USER, {"role": "user"}), "messages[1] has no content; it must have one"),
    (CHAT, said({"content": "hi"}), "messages[0] has no role"),
    (CHAT, said({"role": "us<|im_end|>er", "content": "hi"}), 'messages[0] has the role "us<|im_end|>er"; a role'),
    (CHAT, said({"role": "user", "content": 7}), "messages[0].content is 7; it must be text"),
    (CHAT, said(USER | {"name": "bob"}), "name is 'bob', which this server cannot do"),
    (CHAT, said(USER | {"tool_calls": [{}]}), "tool_calls is a list of 1, which this server cannot do"),
    (CHAT, said(USER | {"reasoning_content": "hm"}), "only what the assistant said has a thought"),
    (CHAT, said({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "has a part that is no text"),
    (CHAT, said({"role": "user", "content": "a\ufdd0"}), "has the character U+FDD0"),
    (CHAT, said(USER) | {"tools": [{}]}, "tools is a list of 1, which this server cannot do"),
    (CHAT, said(USER) | {"response_format": {"type": "json_object"}}, "response_format is an object, which"),
    (CHAT, said(USER) | {"top_logprobs": 2}, "top_logprobs goes with logprobs"),
    (CHAT, said(USER) | {"logprobs": 2}, "logprobs is 2; it must be true or false"),
    (CHAT, said(USER) | {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens is 6 and max_tokens 5"),
    (CHAT, said(USER) | {"echo": True}, 'there is no field "echo"'),
    (CHAT, said(USER | {"content": "x" * 600}), "tokens and the answer may have 1; together"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "says"), MISTAKES, ids=[says for _, _, says in MISTAKES])
def test_mistakes(path, body, says):
    answer = ask(path, body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 600
    assert error["type"] == "invalid_request_error"


def test_defaults_of_what_we_have_not_are_no_mistake():
    nothing = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "top_p": 1, "top_k": -1,
        "stop": None, "n": None, "stream": False, "stream_options": None, "seed": -5, "max_tokens": 4,
    }  # fmt: skip
    assert ask(COMPLETIONS, nothing | {"prompt": "a", "suffix": None, "best_of": 1}).status_code == 200
    chat = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True,
        "store": False, "service_tier": "auto", "modalities": ["text"], "metadata": {"a": 1}, "logprobs": False,
        "top_logprobs": 0,
    }  # fmt: skip
    assert ask(CHAT, nothing | said(USER) | chat).status_code == 200


def test_a_run_without_chats_says_so():
    engine = FakeEngine()
    answer = ask(CHAT, said(USER), engine=engine, served=fake_served(engine, chat_format=None))
    assert answer.status_code == 400
    assert "fake has learned texts, not chats" in answer.json()["error"]["message"]


def requests(*calls, **options):
    """Answers to requests of one application."""

    async def run():
        async with serving(**options) as (_, application), client(application) as http:
            return [await http.request(*call[:2], **call[2]) for call in calls]

    return asyncio.run(run())


def test_the_key():
    body = {"json": {"prompt": "a", "max_tokens": 2}}

    def with_key(key):
        return body | {"headers": {"authorization": key}}

    calls = [("POST", COMPLETIONS, with_key(key)) for key in ("", "Bearer", "Bearer wrong", "Basic secret")]
    answers = requests(
        *calls, ("GET", "/v1/models", {}), ("GET", "/metrics", {}), ("GET", "/no", {}), key="secret"
    )
    assert {answer.status_code for answer in answers} == {401}
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert not any("secret" in answer.text for answer in answers)
    calls = [("POST", COMPLETIONS, with_key("Bearer secret")), ("GET", "/health", {}), ("GET", "/", {})]
    assert {answer.status_code for answer in requests(*calls, key="secret")} == {200}


def test_browsers_are_not_used_against_the_server():
    body = json.dumps({"prompt": "a"}).encode()
    plain, rebound, page = requests(
        ("POST", COMPLETIONS, {"content": body, "headers": {"content-type": "text/plain"}}),
        ("POST", COMPLETIONS, {"content": body, "headers": {"host": "evil.example", "content-type": "application/json"}}),
        ("GET", "/", {}),
    )  # fmt: skip
    assert (plain.status_code, rebound.status_code, page.status_code) == (415, 403, 200)
    for answer in (plain, rebound, page):
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers
    for name in ("[::1]:80", "127.0.0.1:8000", "localhost"):
        assert requests(("GET", "/health", {"headers": {"host": name}}))[0].status_code == 200


def test_origins_that_are_allowed():
    asks = {"origin": "http://page.example", "access-control-request-method": "POST"}
    for origin, allowed in (("http://page.example", True), ("http://other.example", False)):
        call = ("OPTIONS", COMPLETIONS, {"headers": asks | {"origin": origin}})
        (answer,) = requests(call, origins=["http://page.example"], key="secret")
        assert ("access-control-allow-origin" in answer.headers) == allowed


def test_paths_and_methods_that_are_not_there():
    answers = requests(
        ("GET", "/v2/\u2028x", {}), ("GET", COMPLETIONS, {}), ("GET", "/../application.py", {})
    )
    assert [answer.status_code for answer in answers] == [404, 405, 404]
    assert "there is nothing at /v2/" in answers[0].json()["error"]["message"]
    assert "/v1/completions does not take GET" in answers[1].json()["error"]["message"]


def test_bodies_that_are_too_long_or_too_slow():
    limits = ServingLimits(body_bytes=1000, body_seconds=0.1)

    async def parts(*, seconds):
        for _ in range(30):
            yield b" " * 100
            await asyncio.sleep(seconds)

    headers = {"content-type": "application/json"}
    answers = requests(
        ("POST", COMPLETIONS, {"content": b" " * 1001, "headers": headers}),
        ("POST", COMPLETIONS, {"content": parts(seconds=0), "headers": headers}),
        ("POST", COMPLETIONS, {"content": parts(seconds=0.05), "headers": headers}),
        ("POST", COMPLETIONS, {"content": b"{}", "headers": headers | {"content-length": "9" * 5000}}),
        limits=limits,
    )
    assert [answer.status_code for answer in answers] == [413, 413, 408, 413]
    assert all(answer.headers["connection"] == "close" for answer in answers)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = (
    "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop",
    "stream", "stream_options", "logprobs", "top_logprobs", "echo", "routing", "model", "suffix", "tools",
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system"]) | VALUES,
            "content": VALUES | st.text(),
        },
    ),
    max_size=3,
)
LIKELY = {"prompt": st.text() | st.lists(st.integers(0, 300)), "messages": MESSAGES, "n": st.integers(0, 3)}
BODIES = st.fixed_dictionaries({}, optional={name: LIKELY.get(name, VALUES) | VALUES for name in FIELDS})


@pytest.mark.parametrize(
    "num_examples", [60, pytest.param(5000, marks=pytest.mark.campaign)], ids=["some", "many"]
)
def test_any_json_is_answered_or_refused(num_examples):
    """Whatever is sent is answered with 200 or one sentence of the client's mistake; a bug would be a 500."""
    counts = collections.Counter()
    headers = {"content-type": "application/json"}

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([COMPLETIONS, CHAT]), BODIES)
    def check(path, body):
        content = json.dumps(body).encode()  # as it stands: NaN, infinities and half surrogate pairs too
        answer = runner.run(http.post(path, content=content, headers=headers))
        counts[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    with asyncio.Runner() as runner:
        context = serving()
        _, application = runner.run(context.__aenter__())
        http = client(application)
        check()
        runner.run(http.aclose())
        runner.run(context.__aexit__(None, None, None))
    assert counts[400]
    assert counts[200]
