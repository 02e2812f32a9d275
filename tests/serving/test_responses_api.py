"""OpenAI's Responses API through OpenAI's client: chats of a fake engine, whole and streamed."""

import asyncio
import contextlib
import json

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseErrorEvent
from serving_client import ask, serving
from writing_engine import FORMAT, TOKENIZER, WritingEngine, model_of

from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.tool_records import ToolCall

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "name": "get_weather", "description": "Weather.", "parameters": SCHEMA}]
ASK = {"model": "fake", "input": "How is it in Paris?"}
CALL = (
    "<zyphra_tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</zyphra_tool_call>"
)
PARIS = ("function_call", "get_weather", {"city": "Paris", "days": 3})
ROME = ("function_call", "get_weather", {"city": "Rome", "days": 3})
RESPONSES = {
    "text": ("It is warm.", {}, [("message", "It is warm.")], 0),
    "thought": ("<think>hm</think>Yes.", {}, [("reasoning", "hm"), ("message", "Yes.")], 3),
    "cut": ("One, two, three", {"max_output_tokens": 4}, [("message", "One,")], 0),
    "call": (f"Let me see.\n{CALL}", {"tools": TOOLS}, [("message", "Let me see."), PARIS], 0),
    "calls": (
        f"<think>hm</think>{CALL}\n{CALL.replace('Paris', 'Rome')}", {"tools": TOOLS},
        [("reasoning", "hm"), PARIS, ROME], 3,
    ),
    "nothing": ("", {}, [], 0),
}  # fmt: skip
"""Text, request, items of the output, and number of tokens of reasoning: the mark and two letters."""


@contextlib.asynccontextmanager
async def openai_client(engine):
    async with (
        serving(engine, model=model_of(engine)) as (_, application),
        httpx.AsyncClient(transport=httpx.ASGITransport(application)) as http,
    ):
        yield openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
        )


async def whole_and_streamed(text, **fields):
    async with openai_client(WritingEngine(text)) as client:
        whole = await client.responses.create(**(ASK | fields))
        events = [event async for event in await client.responses.create(**(ASK | fields), stream=True)]
    return whole, events


def items_of(response):
    items = []
    for item in response.output:
        if item.type == "function_call":
            assert item.call_id.startswith("call_")
            items.append((item.type, item.name, json.loads(item.arguments)))
        else:
            (part,) = item.content
            assert part.type == {"message": "output_text", "reasoning": "reasoning_text"}[item.type]
            items.append((item.type, part.text))
    return items


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_whole_and_streamed(name):
    text, fields, items, num_reasoning = RESPONSES[name]
    whole, events = asyncio.run(whole_and_streamed(text, **fields))
    status = "incomplete" if name == "cut" else "completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{status}"
    for response in (whole, events[-1].response):
        # The client builds its objects without validation.
        Response.model_validate(response.model_dump(warnings=False))
        assert (items_of(response), response.status) == (items, status)
        assert (response.incomplete_details is not None) == (name == "cut")
        num_tokens = min(len(TOKENIZER.encode(text, specials=True)) + 1, fields.get("max_output_tokens", 999))
        usage = response.usage
        assert (usage.output_tokens, usage.total_tokens - usage.input_tokens) == (num_tokens, num_tokens)
        assert usage.output_tokens_details.reasoning_tokens == num_reasoning
        assert usage.input_tokens_details.cached_tokens == 2
        assert response.output_text == "".join(each[1] for each in items if each[0] == "message")
    # Each item of the stream ends as it is in the final response, and its parts add up to it.
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [each.model_dump() for each in events[-1].response.output]
    deltas = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
    texts = [item.arguments if item.type == "function_call" else item.content[0].text for item in done]
    assert [deltas[index] for index in range(len(done))] == texts


def test_the_state_of_openais_client_follows_the_stream():
    async def run():
        async with (
            openai_client(WritingEngine(f"<think>hm</think>See.{CALL}")) as client,
            client.responses.stream(**ASK, tools=TOOLS) as stream,
        ):
            kinds = {event.type async for event in stream}
            return kinds, await stream.get_final_response()

    kinds, response = asyncio.run(run())
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds
    assert items_of(response) == [("reasoning", "hm"), ("message", "See."), PARIS]


def test_a_conversation_goes_on_with_the_items_of_a_response():
    engine = WritingEngine("Warm.")

    async def run():
        async with openai_client(engine) as client:
            engine.text = f"<think>hm</think>Let me see.{CALL}"
            first = await client.responses.create(**ASK, tools=TOOLS, instructions="Be brief.")
            call = first.output[-1]
            items = [
                {"role": "user", "content": [{"type": "input_text", "text": "How is it in Paris?"}]},
                *(item.model_dump() for item in first.output),
                {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"},
                {"role": "developer", "content": "In French."},
            ]
            await client.responses.create(
                model="fake", input=items, tools=TOOLS, instructions="Be brief.", store=False
            )
            return call.call_id

    call_id = asyncio.run(run())
    call = ToolCall("get_weather", {"city": "Paris", "days": 3}, call_id)
    turns = [
        Message("system", "Be brief."),
        Message("user", "How is it in Paris?"),
        Message("assistant", "<think>hm</think>Let me see.", tool_calls=(call,)),
        Message("tool", "20 degrees", tool_call_id=call_id),
        Message("system", "In French."),
    ]
    function = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
    expected = FORMAT.encode(
        turns, tools=[{"type": "function", "function": function}], add_generation_prompt=True
    )
    assert engine.prompts[1] == expected.tokens_T.tolist()


@pytest.mark.parametrize(
    ("fields", "is_constrained"),
    [
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True),
        ({"tool_choice": {"type": "function", "name": "get_weather"}}, True),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}}, True),
        ({"text": {"format": {"type": "json_object"}}}, True),
        ({"text": {"format": {"type": "text"}}}, False),
    ],
)
def test_choices_and_formats_constrain_an_answer(fields, is_constrained):
    engine, requests = WritingEngine(CALL), []
    submit = engine.submit
    engine.submit = lambda request, on_event: requests.append(request) or submit(request, on_event)
    answer = ask(PATH, ASK | {"tools": TOOLS} | fields, engine=engine, model=model_of(engine))
    assert answer.status_code == 200, answer.text
    assert (requests[0].params.constraint is not None) == is_constrained
    repeated = answer.json()
    assert repeated["tool_choice"] == fields.get("tool_choice", "auto")
    assert repeated["text"] == fields.get("text", {"format": {"type": "text"}})
    assert repeated["tools"] == [TOOLS[0] | {"strict": None}]


@pytest.mark.parametrize(
    ("changes", "param", "sentence"),
    [
        ({"input": []}, "input", "input is a list of 0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "type",
            "type is 'input_image'",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "x"}]},
            "input",
            "of type function_call has no name",
        ),
        ({"model": "gpt"}, "model", "model is 'gpt', which does not exist"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported by this server"),
        ({"store": True}, "store", "store is true, which is not supported"),
        ({"tools": [{"type": "web_search"}]}, "type", "tools[0].type is 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "json_schema"),
        ({"max_output_tokens": 100_000}, None, "together they must not exceed 4096"),
    ],
)
def test_errors_are_those_of_openai(changes, param, sentence):
    engine = WritingEngine("x")
    answer = ask(PATH, ASK | changes, engine=engine, model=model_of(engine))
    error = answer.json()["error"]
    assert answer.status_code == (404 if "model" in changes else 400)
    assert sentence in error["message"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}


def test_a_stream_that_fails_ends_with_an_error_event():
    async def run():
        engine = WritingEngine("a long text")
        engine.fails_after = 3
        async with openai_client(engine) as client:
            return [event async for event in await client.responses.create(**ASK, stream=True)]

    events = asyncio.run(run())
    error = ResponseErrorEvent.model_validate(events[-1].model_dump())
    assert "generation failed" in error.message
    assert error.sequence_number == len(events) - 1
