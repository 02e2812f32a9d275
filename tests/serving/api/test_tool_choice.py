"""Tools and choices of requests: what is invalid or not supported is refused with a sentence."""

import pytest
from test_served_tool_calls import ASK, CALL, TOOLS, respond

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
    ({"tool_choice": "required"}, 'tool_choice "required" needs constrained decoding'),
    ({"tool_choice": NAMED}, "tool_choice one function needs constrained decoding"),
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
