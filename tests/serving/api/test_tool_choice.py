"""Tools and choices of requests: what is invalid or not supported is refused with a sentence."""

import numpy as np
import pytest
from serving_client import ask
from test_served_tool_calls import ASK, CALL, CHAT, FORMAT, TOKENIZER, TOOLS, WritingEngine, model_of, respond

from zaya_jax.inference.structured.constraint import WORD_BITS, all_tokens, fill_masks

UNBOUND = {"name": "get_weather", "parameters": {"properties": {"city": {"$ref": "other.json"}}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
MISTAKES = [
    ({"tools": {}}, "tools is an object; it must be a list"),
    ({"tools": [{}]}, "the request tool 1 is {}; it must be"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "has the name 'a b'"),
    ({"tools": TOOLS * 513}, "tools is a list of 513; it must be a list of at most 512"),
    ({"tool_choice": "maybe"}, 'tool_choice is \'maybe\'; it must be "none", "auto"'),
    ({"tool_choice": {"type": "function"}}, "tool_choice is an object; it must be"),
    ({"tool_choice": "required", "tools": None}, "tool_choice is 'required', but the request has no tools"),
    ({"tool_choice": NAMED, "tools": None}, "tool_choice is an object, but the request has no tools"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice names the tool 'g', which is not in tools: get_weather",
    ),
    (
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format and a tool_choice that requires a call exclude each other",
    ),
    (
        {"tool_choice": NAMED, "tools": [{"type": "function", "function": UNBOUND}]},
        'refers to "other.json", which is not part of it',
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls is 1; it must be true or false"),
    ({"functions": [{}]}, "functions is a list of 1, which is not supported by this server"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0] tool call 1 is {}; it must be"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        "messages[0] tool call 1, arguments, is not JSON",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content is missing"),
    (
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "c"}]},
        "only messages of the tool have it",
    ),
]


@pytest.mark.parametrize(("fields", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_mistakes(fields, says):
    response = respond("a", ASK | fields)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_model_may_call_tools(choice):
    message = respond(CALL, ASK | {"tool_choice": choice}).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


class RecordingEngine(WritingEngine):
    """Keeps its requests."""

    def submit(self, request, on_event):
        self.request = request
        return super().submit(request, on_event)


def allows(request, text):
    """Whether the masks of a request allow a text and its end."""
    state = request.params.constraint.start(request.prompt, request.params.stop_token_ids)
    for token in [*TOKENIZER.encode(text, specials=True), FORMAT.end_id]:
        mask_BW = all_tokens(1, TOKENIZER.vocab_size)
        assert fill_masks({0: state}, mask_BW) == {}
        if not mask_BW[0, token // WORD_BITS] & np.uint32(1 << token % WORD_BITS):
            return False
        state.advance(token)
    return True


OTHER = {"type": "function", "function": {"name": "now"}}
NOW = "<zyphra_tool_call>\n<function=now>\n</function>\n</zyphra_tool_call>"


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"tool_choice": "required"}, [CALL, NOW, f"{NOW}\n{CALL}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL, NOW]),
        ({"tool_choice": NAMED, "parallel_tool_calls": False}, [CALL]),
    ],
    ids=["any", "one", "named"],
)
def test_a_required_call_is_all_that_the_model_can_write(fields, allowed):
    engine = RecordingEngine(CALL)
    response = ask(CHAT, ASK | {"tools": [*TOOLS, OTHER]} | fields, engine=engine, model=model_of(engine))
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    texts = [CALL, NOW, f"{NOW}\n{CALL}", "", "Sunny.", f"{CALL} Sunny.", CALL.replace("get_weather", "rain")]
    assert [text for text in texts if allows(engine.request, text)] == allowed
