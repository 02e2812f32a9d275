"""Grammars of tool calls, in the markup of ZAYA1 and in JSON between tags."""

import json

import numpy as np
import pytest

from zaya_jax.errors import UserError
from zaya_jax.inference.structured import grammar_process
from zaya_jax.inference.structured.call_grammar import CallForm, tool_call_grammar
from zaya_jax.inference.structured.constraint import Constraint, all_tokens, fill_masks

OPEN, CLOSE = 260, 261
TAGS = CallForm("<call>", "</call>", True, {"<call>": OPEN, "</call>": CLOSE})
TEXT_TAGS = CallForm("<call>", "</call>", True, {})
JSON_IN_TAGS = CallForm("<call>", "</call>", False, {"<call>": OPEN, "</call>": CLOSE})
PLACE = {
    "type": "object",
    "properties": {"lat": {"type": "number"}},
    "required": ["lat"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
        "place": {"$ref": "#/$defs/Place"},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Place": PLACE},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
TOKENS = [*(bytes([byte]) for byte in range(256)), *[b""] * 7]
VOCABULARY = grammar_process.load_vocabulary(grammar_process.Vocabulary(TOKENS, len(TOKENS) - 1))


def accepts(grammar, *parts):
    """Whether a grammar accepts a whole text of strings and token ids."""
    matcher = grammar_process.compile_grammar(VOCABULARY, grammar.source)
    assert matcher.get_error() == ""
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def function(name, **parameters):
    written = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"\n<function={name}>\n{''.join(written)}</function>\n"


ACCEPTED = [
    function("weather", city="New\nYork <b> </para", days=3, unit="c", place='{"lat": 1.5}', note="x"),
    function("weather", city="", days=9),
    function("now"),
]
REFUSED = [
    function("weather", days=3),
    function("weather", city="a", days=10),
    function("weather", city="a", days='"3"'),
    function("weather", city="a", days=3, unit="k"),
    function("weather", city="a", days=3, place='{"lat": "x"}'),
    function("weather", city="a", days=3, note="longer"),
    function("weather", city="a <parameter=days>", days=3),
    function("weather", city="a</parameter> b", days=3),
    function("weather", city="a </function>", days=3),
    function("sun"),
    "\nI will call it.\n",
]


@pytest.mark.parametrize("form", [TAGS, TEXT_TAGS], ids=["tokens", "text"])
def test_calls_of_tags(form):
    grammar = tool_call_grammar(TOOLS, form)
    begin, end = (OPEN, CLOSE) if form is TAGS else ("<call>", "</call>")
    for text in ACCEPTED:
        assert accepts(grammar, begin, text, end), text
        assert not accepts(grammar, begin, text), "a call without its end"
        assert not accepts(grammar, begin, text, end, "\n", begin, text, end), "one call only"
    for text in REFUSED:
        assert not accepts(grammar, begin, text, end), text


def test_only_the_token_of_a_tag_is_allowed():
    matcher = grammar_process.compile_grammar(VOCABULARY, tool_call_grammar(TOOLS, TAGS).source)
    constraint = Constraint(matcher, len(TOKENS), len(TOKENS) - 1)
    mask_BW = all_tokens(1, len(TOKENS))
    assert fill_masks({0: constraint.start((), (262,))}, mask_BW) == {}
    bits = np.unpackbits(mask_BW.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [OPEN]


def test_several_calls_and_one_function():
    parallel = tool_call_grammar(TOOLS, TAGS, parallel=True)
    assert accepts(parallel, OPEN, ACCEPTED[1], CLOSE, "\n", OPEN, ACCEPTED[2], CLOSE)
    named = tool_call_grammar(TOOLS, TAGS, name="now")
    assert accepts(named, OPEN, function("now"), CLOSE)
    assert not accepts(named, OPEN, ACCEPTED[1], CLOSE)


def test_calls_of_json():
    grammar = tool_call_grammar(TOOLS, JSON_IN_TAGS)
    good = {"city": "a", "days": 3, "place": {"lat": 1}, "note": None}
    for arguments, is_good in ((good, True), (good | {"days": 0}, False), (good | {"x": 1}, False)):
        call = json.dumps({"name": "weather", "arguments": arguments})
        assert accepts(grammar, OPEN, f"\n{call}\n", CLOSE) == is_good
    assert accepts(grammar, OPEN, '\n{"name": "now", "arguments": {}}\n', CLOSE)


def tool(**schema):
    properties = {"x": schema}
    return [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]


@pytest.mark.parametrize(
    ("tools", "form", "options", "says"),
    [
        (TOOLS, TAGS, {"name": "moon"}, 'no tool has the name "moon"'),
        ([], TAGS, {}, "there is no tool"),
        (tool(type="string", pattern="a+"), TAGS, {}, 'has "pattern", which cannot be enforced'),
        (tool(**{"$ref": "https://a.b/c"}), JSON_IN_TAGS, {}, "which is not part of it"),
        (tool(**{"$ref": "#/properties/y"}), TAGS, {}, 'must refer to "#/\\$defs/NAME"'),
    ],
)
def test_tools_that_are_refused(tools, form, options, says):
    with pytest.raises(UserError, match=says):
        tool_call_grammar(tools, form, **options)
