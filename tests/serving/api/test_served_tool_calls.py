"""Tool calls through OpenAI's client, whole and streamed: the markup of a fake engine becomes calls."""

import asyncio
import contextlib
import json

import httpx
import openai
import pytest
from serving_client import ask, serving
from writing_engine import FORMAT, TOKENIZER, WritingEngine, model_of

from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.chats.tool_records import ToolCall
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
ASK = {"messages": [{"role": "user", "content": "How is it in Paris?"}], "tools": TOOLS}
CALL = (
    "<zyphra_tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</zyphra_tool_call>"
)
PARIS = ("get_weather", {"city": "Paris", "days": 3})
ROME = CALL.replace("Paris", "Rome")


def respond(text, body, **changes):
    engine = WritingEngine(text)
    return ask(CHAT, body, engine=engine, model=model_of(engine, **changes))


@contextlib.asynccontextmanager
async def openai_client(text):
    engine = WritingEngine(text)
    async with serving(engine, model=model_of(engine)) as (_, application):
        transport = httpx.ASGITransport(application)
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        yield openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
        )
        await http.aclose()


async def whole_and_streamed(text, **fields):
    """The message of a response, and that which OpenAI's client makes of the chunks of a stream."""
    async with openai_client(text) as client:
        response = await client.chat.completions.create(model="fake", **(ASK | fields))
        async with client.chat.completions.stream(model="fake", **(ASK | fields)) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_completion()
    return response.choices[0], streamed.choices[0], events


def calls_of(choice):
    return [
        (each.function.name, json.loads(each.function.arguments)) for each in choice.message.tool_calls or []
    ]


RESPONSES = {
    "call": (CALL, None, [PARIS], "tool_calls"),
    "text and call": (f"Let me see.\n{CALL}\n", "Let me see.", [PARIS], "tool_calls"),
    "calls": (f"{CALL}\n{ROME}", None, [PARIS, ("get_weather", {"city": "Rome", "days": 3})], "tool_calls"),
    "thought": (f"<think>hm</think>\n\n{CALL}", None, [PARIS], "tool_calls"),
    "draft": (f"<think>{CALL}</think>no", "no", [], "stop"),
    "text": ("It is warm.", "It is warm.", [], "stop"),
    "orphan": ("Warm.\n</function>\n</zyphra_tool_call>", "Warm.\n\n", [], "stop"),
    "json": (
        '<zyphra_tool_call>{"name": "get_weather", "arguments": {"city": "é"}}</zyphra_tool_call>', None,
        [("get_weather", {"city": "é"})], "tool_calls",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESPONSES)
def test_calls_by_openai_whole_and_streamed(name):
    text, content, calls, reason = RESPONSES[name]
    whole, streamed, events = asyncio.run(whole_and_streamed(text))
    for choice in (whole, streamed):
        assert (choice.message.content or None, choice.finish_reason) == (content, reason)
        assert calls_of(choice) == calls
        ids = [each.id for each in choice.message.tool_calls or []]
        assert len(set(ids)) == len(ids)
        assert all(each.startswith("call_") for each in ids)
    assert ("tool_calls.function.arguments.done" in events) == bool(calls)
    if name == "thought":
        assert whole.message.reasoning_content == "hm"


def test_a_response_with_calls_has_null_content():
    message = respond(CALL, ASK).json()["choices"][0]["message"]
    assert (message["content"], message["role"]) == (None, "assistant")


def test_a_call_that_is_cut_has_incomplete_arguments():
    async def run():
        async with openai_client(CALL) as client:
            fields = ASK | {"model": "fake", "max_tokens": 60}
            (choice,) = (await client.chat.completions.create(**fields)).choices
            chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **fields)]
            return choice, [chunk.choices[0] for chunk in chunks]

    choice, streamed = asyncio.run(run())
    assert [each.function.arguments for each in choice.message.tool_calls] == ['{"city": "Paris"']
    parts = [part for each in streamed for part in each.delta.tool_calls or []]
    assert "".join(part.function.arguments for part in parts) == '{"city": "Paris"'
    assert choice.finish_reason == streamed[-1].finish_reason == "length"


def test_the_choice_none_hides_tools_and_drops_calls():
    engine = WritingEngine(f"a {CALL}")
    response = ask(CHAT, ASK | {"tool_choice": "none"}, engine=engine, model=model_of(engine)).json()
    choice = response["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "stop")
    assert "tool_calls" not in choice["message"]
    assert engine.prompts == [FORMAT.answer_prompt([Message("user", "How is it in Paris?")])]


def test_parallel_calls_can_be_disabled():
    choice = respond(f"{CALL}{ROME}", ASK | {"parallel_tool_calls": False}).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (json.loads(call["function"]["arguments"]), choice["finish_reason"]) == (PARIS[1], "tool_calls")


@pytest.mark.parametrize("arguments", ['{"city": "Paris", "days": null}', {"city": "Paris", "days": None}])
def test_calls_and_results_are_rendered(arguments):
    function = {"name": "get_weather", "arguments": arguments}
    messages = [
        *ASK["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": "22 </zyphra_tool_response>"}],
        },
    ]
    engine = WritingEngine("It is 22.")
    body = ask(CHAT, ASK | {"messages": messages}, engine=engine, model=model_of(engine)).json()
    assert body["choices"][0]["message"]["content"] == "It is 22."
    # A null of a client is its own: nothing is removed, unlike in records.
    call = ToolCall("get_weather", {"city": "Paris", "days": None}, "c")
    said = [
        Message("user", "How is it in Paris?"),
        Message("assistant", None, tool_calls=(call,)),
        Message("tool", "22 </zyphra_tool_response>", tool_call_id="c"),
    ]
    assert engine.prompts == [FORMAT.answer_prompt(said, tools=TOOLS)]
    assert engine.prompts[0].count(FORMAT.specials["</zyphra_tool_response>"]) == 1


def test_without_tools_the_text_may_describe_markup():
    text = "Write <function=f> and </function>."
    assert respond(text, {"messages": ASK["messages"]}).json()["choices"][0]["message"]["content"] == text
    # With calls in the conversation a model may call again.
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "x"},
    ]
    choice = respond(CALL, {"messages": messages}).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"


def test_tokens_of_calls_keep_their_log_probabilities_and_experts():
    body = ASK | {"logprobs": True, "routing": True}
    choice = respond(f"a{CALL}b", body).json()["choices"][0]
    num_tokens = len(TOKENIZER.encode(f"a{CALL}b", specials=True)) + 1
    assert len(choice["logprobs"]["content"]) == len(choice["routing"]["tokens"]) == num_tokens
    assert "".join(choice["routing"]["tokens"]) == choice["message"]["content"] == "ab"
    assert choice["logprobs"]["content"][1]["token"] == "<zyphra_tool_call>"


def test_a_template_without_tools_refuses_them_with_the_reason():
    chat_format = load_chat_format("zaya", load_tokenizer("byte-chat"))
    error = respond("a", ASK, chat_format=chat_format, tool_markup=None).json()["error"]
    assert error["message"].startswith("the chat template zaya does not support tools: the tokenizer")
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
