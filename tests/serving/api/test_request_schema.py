# ruff: noqa: E501 (the table of mistakes has a line each)
"""Invalid request bodies: one clear message in OpenAI's form, and never an internal error."""

import asyncio
import collections
import json

import pytest
from fake_engine import THINK, THINK_END, FakeEngine, fake_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_client import ask, client, serving

from zaya_jax.inference.structured import compiler

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def chat_of(*messages):
    return {"messages": list(messages)}


def format_of(kind, **json_schema):
    """A chat with a response format; further fields are those of its JSON schema."""
    value = {"type": kind} | ({"json_schema": {"name": "answer"} | json_schema} if json_schema else {})
    return chat_of(USER) | {"response_format": value}


MISTAKES = [
    (COMPLETIONS, b"", "the body is not JSON"),
    (COMPLETIONS, b"\xff\xfe{}", "the body is not JSON"),
    (COMPLETIONS, b"[1]", "the body holds a list; it must be a JSON object"),
    (COMPLETIONS, b'{"n": 1, "n": 2}', 'the body has "n" twice'),
    (COMPLETIONS, b"[" * 200_000, "nested too deeply"),
    (COMPLETIONS, b'{"prompt": ' + b'{"a":' * 100_000, "nested too deeply"),
    (COMPLETIONS, b'{"n": ' + b"9" * 5000 + b"}", "the body is not JSON"),
    (COMPLETIONS, b'{"temperature": NaN}', "temperature is not finite; it must be a finite number"),
    (COMPLETIONS, b'{"temperature": 1e999}', "temperature is not finite"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    (COMPLETIONS, {"temperature": 10**400}, "temperature is 1000000000"),
    (COMPLETIONS, {"temperature": True}, "temperature is true"),
    (COMPLETIONS, {"top_p": 0}, "top_p is 0; it must be greater than 0"),
    (COMPLETIONS, {"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
    (COMPLETIONS, {"seed": 2**65}, "seed is 36893488147419103232; it must be less than or equal to 18446744073709551615"),
    (COMPLETIONS, {"n": 0}, "n is 0; it must be greater than or equal to 1"),
    (COMPLETIONS, {"n": 129}, "n is 129; it must be less than or equal to 128"),
    (COMPLETIONS, {"n": "2"}, "n is '2'; it must be a whole number"),
    (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "65 prompts with n 2 are 130 texts; the maximum is 128"),
    (COMPLETIONS, {"prompt": ["a"] * 105}, "this request is for 105 texts, and the server can queue 104; split it"),
    (COMPLETIONS, {"stream": "yes"}, "stream is 'yes'; it must be true or false"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options requires stream to be true"),
    (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, 'unknown field "x" in stream_options; supported are include_usage'),
    (COMPLETIONS, {"stop": ["a"] * 17}, "stop is a list of 17; it must be a list of at most 16"),
    (COMPLETIONS, {"stop": ""}, "stop[0] is ''; it must be at least 1 characters long"),
    (COMPLETIONS, {"stop": [7]}, "stop[0] is 7; it must be text"),
    (COMPLETIONS, {"stop": "x" * 257}, "it must be at most 256 characters long"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt is an object; it must be text"),
    (COMPLETIONS, {"prompt": []}, "prompt is an empty list"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt is an empty list"),
    (COMPLETIONS, {"prompt": [263]}, "prompt[0] is 263; it must be text, or tokens from 0 to 262"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt[0] is -1; it must be"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1] is 'a'; it must be"),
    (COMPLETIONS, {"prompt": [True]}, "prompt[0] is true; it must be"),
    (COMPLETIONS, {"prompt": [1.0, 2.0]}, "prompt[0] is 1.0, and a token is a whole number; a prompt must be text"),
    (COMPLETIONS, {"prompt": [1, 2.5]}, "prompt[1] is 2.5, and a token is a whole number; a prompt must be text"),
    (COMPLETIONS, {"prompt": [[1, 2.0]]}, "prompt[1] is 2.0, and a token is a whole number"),
    (COMPLETIONS, {"prompt": [1e300]}, "prompt[0] is 1e+300, and a token is a whole number"),
    (COMPLETIONS, {"prompt": [None]}, "prompt[0] is null; it must be text, or tokens from 0 to 262"),
    (COMPLETIONS, {"prompt": [{}]}, "prompt[0] is an object; it must be text, or tokens from 0 to 262"),
    (COMPLETIONS, {"prompt": ["a", 1.0]}, "prompt is 1.0; it must be text"),
    (COMPLETIONS, {"skip_special_tokens": 1}, "skip_special_tokens is 1; it must be true or false"),
    (CHAT, chat_of(USER) | {"add_generation_prompt": "yes"}, "add_generation_prompt is 'yes'; it must be true or false"),
    (
        CHAT,
        chat_of(USER) | {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message and add_generation_prompt are both true",
    ),
    (CHAT, chat_of(USER) | {"chat_template_kwargs": [1]}, "chat_template_kwargs is a list of 1; it must be an object"),
    (
        CHAT,
        chat_of(USER) | {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs cannot set messages; use the field messages",
    ),
    (
        CHAT,
        chat_of(USER) | {"chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs cannot set chat_template; remove it",
    ),
    (CHAT, chat_of(USER) | {"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs cannot set eos_token"),
    (COMPLETIONS, b'{"prompt": "a\\ud800"}', "prompt has half a surrogate pair at character 1"),
    (COMPLETIONS, {"prompt": "x" * 512}, "the prompt has 513 tokens and the response may have 16"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 511}, "together they must not exceed 512"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens is 0; it must be at least 1, or 0 with echo"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens is -1; it must be greater than or equal to 0"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs is 21; it must be less than or equal to 20"),
    (COMPLETIONS, {"echo": True, "routing": True}, "routing is only available for generated tokens; omit echo"),
    (COMPLETIONS, {"suffix": "x"}, "suffix is 'x', which is not supported by this server; omit it"),
    (COMPLETIONS, {"best_of": 3}, "best_of is 3, which is not supported by this server"),
    (COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias is an object, which is not supported by this server"),
    (COMPLETIONS, {"temprature": 1}, 'unknown field "temprature"; did you mean "temperature"? supported are echo, logprobs, max_tokens, '),
    (COMPLETIONS, b'{"\\ud800": 1}', 'unknown field "\\ud800"; supported are '),
    (COMPLETIONS, {"messages": [USER]}, 'unknown field "messages"; supported are '),
    (COMPLETIONS, {"model": "gpt"}, "model is 'gpt', which does not exist; this server has 'fake'"),
    (CHAT, {}, "messages is missing"),
    (CHAT, chat_of(), "messages is a list of 0; it must be a list of at least 1"),
    (CHAT, chat_of(*[USER] * 1001), "messages is a list of 1001; it must be a list of at most 1000"),
    (CHAT, chat_of("hi"), "messages[0] is 'hi'; it must be an object"),
    (CHAT, chat_of(USER, {"role": "user"}), "messages[1].content is missing"),
    (CHAT, chat_of({"content": "hi"}), "messages[0].role is missing"),
    (CHAT, chat_of({"role": "us<|im_end|>er", "content": "hi"}), 'messages[0] has the role "us<|im_end|>er"; a role'),
    (CHAT, chat_of({"role": "user", "content": 7}), "messages[0].content is 7; it must be text"),
    (CHAT, chat_of(USER | {"name": 5}), "messages[0].name is 5; it must be text"),
    (CHAT, chat_of(USER | {"nmae": "bob"}), 'unknown field "nmae" in messages[0]; did you mean "name"? supported are content, name'),
    (CHAT, chat_of(USER | {"tool_calls": [{}]}), "messages[0] is from the user and has tool_calls; only messages of the assistant"),
    (CHAT, chat_of(USER | {"reasoning_content": "hm"}), "only messages of the assistant have reasoning"),
    (CHAT, chat_of({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "messages[0].content[0].type is 'image_url'; it must be 'text'"),
    (CHAT, chat_of(USER) | {"tools": [{}]}, "the request tool 1 is {}; it must be"),
    (CHAT, chat_of(USER) | {"response_format": 1}, "response_format is 1; it must be an object"),
    (CHAT, format_of("xml"), "response_format.type is 'xml'; it must be 'text', 'json_object' or 'json_schema'"),
    (CHAT, format_of("json_schema"), "response_format.json_schema is missing"),
    (CHAT, format_of("text", schema={}), 'response_format.json_schema requires the type "json_schema"'),
    (CHAT, format_of("json_schema", strict=True), "response_format.json_schema.schema is missing"),
    (CHAT, format_of("json_schema", schema=[]), "response_format.json_schema.schema is a list of 0; it must be an object"),
    (CHAT, format_of("json_schema", schema={}, stric=1), 'unknown field "stric" in response_format.json_schema; did you mean "strict"?'),
    (CHAT, format_of("json_schema", schema={"$ref": "https://a.b/c"}), 'response_format.json_schema.schema refers to "https://a.b/c"'),
    (CHAT, format_of("json_schema", schema={"not": {}}), 'response_format.json_schema.schema has "not", which is not supported; remove it'),
    (CHAT, format_of("json_schema", schema={"type": "strin"}), "cannot be enforced: Invalid type: strin"),
    (CHAT, format_of("json_object") | {"continue_final_message": True}, "response_format needs a new message"),
    (CHAT, chat_of(USER) | {"top_logprobs": 2}, "top_logprobs requires logprobs to be true"),
    (CHAT, chat_of(USER) | {"logprobs": 2}, "logprobs is 2; it must be true or false"),
    (CHAT, chat_of(USER) | {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens is 6 and max_tokens is 5; use only one of them"),
    (CHAT, chat_of(USER) | {"echo": True}, 'unknown field "echo"; supported are add_generation_prompt, chat_template_kwargs, '),
    (CHAT, chat_of(USER | {"content": "x" * 600}), "tokens and the response may have 1; together"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "says"), MISTAKES, ids=[says for _, _, says in MISTAKES])
def test_invalid_bodies(path, body, says):
    answer = ask(path, body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 600
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (COMPLETIONS, {"n": 0}, "n", None),
        (CHAT, format_of("xml"), "response_format", None),
        (CHAT, format_of("json_schema", schema={"type": "strin"}), "response_format", None),
        (CHAT, format_of("json_schema", schema={}, x=1), "response_format", "unknown_parameter"),
        (COMPLETIONS, {"stop": [7]}, "stop", None),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", None),
        (COMPLETIONS, {"model": "gpt"}, "model", "model_not_found"),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "unsupported_parameter"),
        (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, "x", "unknown_parameter"),
        (COMPLETIONS, {"n": None, "temprature": None}, "temprature", "unknown_parameter"),
        (COMPLETIONS, {"prompt": "x" * 512}, None, "context_length_exceeded"),
        (CHAT, {}, "messages", None),
        (CHAT, chat_of(USER, "hi"), "messages[1]", None),
        (CHAT, chat_of({"role": "user"}), "messages[0]", None),
        (CHAT, chat_of(USER | {"name": 5}), "name", None),
        (
            CHAT,
            chat_of({"role": "user", "content": [{"type": "text", "text": 7}]}),
            "messages[0].content",
            None,
        ),
    ],
)
def test_param_and_code_of_errors(path, body, param, code):
    error = ask(path, body).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_only_the_first_of_many_unknown_fields_is_reported():
    body = {f"field{number}": 1 for number in range(50_000)}
    error = ask(COMPLETIONS, json.dumps(body).encode()).json()["error"]
    assert error["param"] == "field0"


def test_defaults_of_unsupported_fields_are_accepted():
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
    assert ask(CHAT, nothing | chat_of(USER) | chat).status_code == 200


def test_a_chat_with_a_model_without_a_template():
    engine = FakeEngine()
    answer = ask(CHAT, chat_of(USER), engine=engine, model=fake_model(engine, chat_format=None))
    assert answer.status_code == 400
    assert "fake has no chat template" in answer.json()["error"]["message"]


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
def test_random_bodies(num_examples):
    """Any body gets a response, or an error 400 or 404 in OpenAI's form; a bug would be a 500."""
    counts = collections.Counter()
    headers = {"content-type": "application/json"}

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([COMPLETIONS, CHAT]), BODIES)
    def check(path, body):
        content = json.dumps(body).encode()  # includes NaN, infinities and half surrogate pairs
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


def test_a_response_format_without_the_package(monkeypatch):
    monkeypatch.setattr(compiler, "is_available", lambda: False)
    assert ask(CHAT, format_of("text")).status_code == 200
    error = ask(CHAT, format_of("json_object")).json()["error"]
    assert error["param"] == "response_format"
    assert "needs llguidance, which is not installed: " in error["message"]
    assert " install " in error["message"]


def test_a_response_format_reaches_the_engine():
    engine, requests = FakeEngine(), []
    submit = engine.submit

    def record(request, on_event):
        requests.append(request)
        return submit(request, on_event)

    engine.submit = record
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = format_of("json_schema", schema=schema, strict=True, description="d") | {"n": 2}
    assert ask(CHAT, body, engine=engine).status_code == 200
    assert ask(COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_object"}}).status_code == 200
    first, second = (request.params.constraint for request in requests)
    assert first is second is not None
    assert first.think_ids == (THINK, THINK_END)
