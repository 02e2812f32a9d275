"""Anthropic's Messages API through Anthropic's client: chats of a fake engine, whole and streamed."""

import asyncio
import contextlib
import json

import anthropic
import httpx2
import pytest
from fake_engine import FakeEngine, fake_model
from serving_client import ask, serving
from writing_engine import FORMAT, TOKENIZER, WritingEngine, model_of

from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.tool_records import ToolCall

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}]
ASK = {"model": "fake", "max_tokens": 900, "messages": [{"role": "user", "content": "How is it in Paris?"}]}
CALL = (
    "<zyphra_tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</zyphra_tool_call>"
)
PARIS = ("tool_use", "get_weather", {"city": "Paris", "days": 3})
ROME = ("tool_use", "get_weather", {"city": "Rome", "days": 3})
RESPONSES = {
    "text": ("It is warm.", {}, [("text", "It is warm.")], "end_turn"),
    "thought": ("<think>hm</think>Yes.", {}, [("thinking", "hm"), ("text", "Yes.")], "end_turn"),
    "hidden": ("<think>hm</think>Yes.", {"thinking": {"type": "disabled"}}, [("text", "Yes.")], "end_turn"),
    "stop": ("One, two, three", {"stop_sequences": [" three"]}, [("text", "One, two,")], "stop_sequence"),
    "cut": ("One, two, three", {"max_tokens": 4}, [("text", "One,")], "max_tokens"),
    "call": (f"Let me see.\n{CALL}", {"tools": TOOLS}, [("text", "Let me see."), PARIS], "tool_use"),
    "calls": (
        f"<think>hm</think>{CALL}\n{CALL.replace('Paris', 'Rome')}", {"tools": TOOLS},
        [("thinking", "hm"), PARIS, ROME], "tool_use",
    ),
    "nothing": ("", {}, [], "end_turn"),
}  # fmt: skip


@contextlib.asynccontextmanager
async def claude(engine, key=None, sent_key="none", **changes):
    async with serving(engine, key=key, model=model_of(engine, **changes)) as (_, application):
        transport = httpx2.ASGITransport(application)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield anthropic.AsyncAnthropic(
                base_url="http://localhost", api_key=sent_key, http_client=http, max_retries=0
            )


async def whole_and_streamed(text, **fields):
    async with claude(WritingEngine(text)) as client:
        whole = await client.messages.create(**(ASK | fields))
        async with client.messages.stream(**(ASK | fields)) as stream:
            events = [event.type async for event in stream]
            return whole, await stream.get_final_message(), events


def blocks_of(message):
    fields = {"text": ["text"], "thinking": ["thinking"], "tool_use": ["name", "input"]}
    return [(each.type, *(getattr(each, name) for name in fields[each.type])) for each in message.content]


@pytest.mark.parametrize("name", RESPONSES)
def test_messages_whole_and_streamed(name):
    text, fields, blocks, reason = RESPONSES[name]
    whole, streamed, events = asyncio.run(whole_and_streamed(text, **fields))
    prompt = FORMAT.answer_prompt([Message("user", ASK["messages"][0]["content"])])
    num_tokens = min(len(TOKENIZER.encode(text, specials=True)) + 1, fields.get("max_tokens", 900))
    for message in (whole, streamed):
        assert (blocks_of(message), message.stop_reason) == (blocks, reason)
        assert message.stop_sequence == (" three" if name == "stop" else None)
        assert (message.role, message.model, message.type) == ("assistant", "fake", "message")
        calls = [each.id for each in message.content if each.type == "tool_use"]
        assert len(set(calls)) == len(calls)
        # A stop string ends a text before its last tokens.
        assert message.usage.output_tokens == (num_tokens - 1 if name == "stop" else num_tokens)
        assert message.usage.cache_read_input_tokens == 2
        if not fields.get("tools"):
            assert message.usage.input_tokens == len(prompt) - 2
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert events.count("content_block_stop") == len(blocks)


def test_a_conversation_with_tools_is_that_of_a_chat():
    engine = WritingEngine("Warm.")
    messages = [
        {"role": "user", "content": [
            {"type": "text", "text": "How is it "}, {"type": "text", "text": "there?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}},
            {"type": "tool_use", "id": "call_2", "name": "get_weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "20 degrees"},
            {"type": "tool_result", "tool_use_id": "call_2", "is_error": True, "content": [
                {"type": "text", "text": "timeout"}]},
            {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    body = ASK | {"messages": messages, "system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}
    answer = ask(PATH, body, engine=engine, model=model_of(engine))
    assert answer.status_code == 200, answer.text
    calls = [
        ToolCall("get_weather", {"city": city}, f"call_{n}") for n, city in enumerate(("Paris", "Rome"), 1)
    ]
    turns = [
        Message("system", "Be brief."),
        Message("user", "How is it there?"),
        Message("assistant", "<think>hm</think>Let me see.", tool_calls=tuple(calls)),
        Message("tool", "20 degrees", tool_call_id="call_1"),
        Message("tool", "Error: timeout", tool_call_id="call_2"),
        Message("user", "So?"),
    ]
    function = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
    expected = FORMAT.encode(
        turns, tools=[{"type": "function", "function": function}], add_generation_prompt=True
    )
    assert engine.prompts == [expected.tokens_T.tolist()]


def test_an_answer_that_the_client_has_begun_is_continued():
    engine = WritingEngine("is warm.")
    messages = [*ASK["messages"], {"role": "assistant", "content": "It "}]
    answer = ask(PATH, ASK | {"messages": messages}, engine=engine, model=model_of(engine)).json()
    assert answer["content"] == [{"type": "text", "text": "is warm."}]
    prompt = FORMAT.answer_prompt([Message("user", "How is it in Paris?")])
    assert engine.prompts == [[*prompt, *TOKENIZER.encode("It ")]]


@pytest.mark.parametrize(
    ("choice", "is_shown", "is_constrained"),
    [
        ({"type": "auto"}, True, False),
        ({"type": "none"}, False, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "get_weather"}, True, True),
    ],
)
def test_tool_choice(choice, is_shown, is_constrained):
    engine, requests = WritingEngine(CALL), []
    submit = engine.submit
    engine.submit = lambda request, on_event: requests.append(request) or submit(request, on_event)
    body = ASK | {"tools": TOOLS, "tool_choice": choice}
    answer = ask(PATH, body, engine=engine, model=model_of(engine))
    assert answer.status_code == 200, answer.text
    (request,) = requests
    assert ("get_weather" in TOKENIZER.decode(request.prompt)) == is_shown
    assert (request.params.constraint is not None) == is_constrained


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"model": "claude"}, "model is 'claude', which does not exist"),
        ({"temperature": 2}, "temperature is 2"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking is an object, which is not"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].type is 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "of type tool_use has no id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0] of the user has a block of type thinking",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].input_schema is missing"),
        ({"tool_choice": {"type": "any"}}, "the request has no tools"),
        ({"max_token": 3}, 'unknown field "max_token"; did you mean'),
    ],
)  # fmt: skip
def test_errors_are_those_of_anthropic(changes, sentence):
    engine = WritingEngine("x")
    answer = ask(PATH, ASK | changes, engine=engine, model=model_of(engine))
    content = answer.json()
    status, kind = (404, "not_found_error") if "model" in changes else (400, "invalid_request_error")
    assert (answer.status_code, content["type"], content["error"]["type"]) == (status, "error", kind)
    assert sentence in content["error"]["message"]
    assert set(content["error"]) == {"type", "message"}


def test_the_key_is_that_of_anthropics_header():
    async def run():
        async with claude(WritingEngine("Yes."), key="secret", sent_key="secret") as client:
            assert (await client.messages.create(**ASK)).content[0].text == "Yes."
        async with claude(WritingEngine("Yes."), key="secret", sent_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**ASK)
            assert caught.value.body["error"]["type"] == "authentication_error"

    asyncio.run(run())


def test_a_stream_that_fails_ends_with_an_error():
    async def run():
        engine = WritingEngine("a long text")
        engine.fails_after = 3
        async with claude(engine) as client:
            with pytest.raises(anthropic.APIStatusError, match="generation failed"):
                async for _ in await client.messages.create(**ASK, stream=True):
                    pass

    asyncio.run(run())


def test_a_model_without_a_template_is_refused():
    engine = FakeEngine()
    answer = ask(PATH, ASK, engine=engine, model=fake_model(engine, chat_format=None))
    assert "has no chat template" in json.loads(answer.content)["error"]["message"]
