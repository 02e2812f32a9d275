"""Values of arguments: the schema of a tool determines whether text is a number, a word or an object."""

import pytest

from zaya_jax.inference.tool_calls.argument_values import ArgumentTypes

PROPERTIES = {
    "text": {"type": "string"},
    "int": {"type": "integer"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "object": {"type": "object"},
    "maybe": {"type": ["integer", "null"]},
    "maybe_text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "color": {"enum": ["red", "1"]},
    "level": {"enum": [1, 2]},
    "reference": {"$ref": "#/$defs/Color"},
    "endless": {"$ref": "#/$defs/Endless"},
    "any": {},
    "invalid": {"type": 3, "anyOf": 4, "enum": {}, "$ref": "#/x/0"},
    "constant": {"const": 7},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"Color": {"type": "string"}, "Endless": {"allOf": [{"$ref": "#/$defs/Endless"}] * 9}},
}
TYPES = ArgumentTypes([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])
VALUES = [
    ("text", "3", "3"), ("text", " a\n", " a\n"), ("text", "true", "true"), ("text", '"a"', '"a"'),
    ("int", "3", 3), ("int", " 3\n", 3), ("int", "three", "three"), ("int", "3.5", "3.5"),
    ("number", "3", 3), ("number", "1e3", 1000.0), ("number", "NaN", "NaN"), ("number", "1e999", "1e999"),
    ("flag", "true", True), ("flag", "False", False), ("flag", "yes", "yes"), ("flag", "1", "1"),
    ("list", "[1, null]", [1, None]), ("list", "['a', True]", ["a", True]), ("list", "[1", "[1"),
    ("object", '{"a": [1]}', {"a": [1]}), ("object", "{'a': None}", {"a": None}),
    ("object", "{1, 2}", "{1, 2}"),
    ("maybe", "null", None), ("maybe", "None", None), ("maybe", "7", 7),
    ("maybe_text", "null", None), ("maybe_text", "7", "7"),
    ("color", "1", "1"), ("level", "1", 1), ("reference", "7", "7"), ("endless", "7", 7),
    ("invalid", "7", 7), ("constant", "7", 7),
    ("any", "7", 7), ("any", "word", "word"), ("any", '"word"', '"word"'), ("unknown", "[1]", [1]),
    ("any", "[" * 100_000, "[" * 100_000),
]  # fmt: skip


@pytest.mark.parametrize(("parameter", "text", "value"), VALUES, ids=[f"{a} {b[:9]!r}" for a, b, _ in VALUES])
def test_values(parameter, text, value):
    found = TYPES.value("f", parameter, text)
    assert (found, type(found)) == (value, type(value))


def test_an_unknown_tool_has_no_types():
    assert TYPES.value("g", "text", "3") == 3
    assert ArgumentTypes([{"name": "g"}]).value("g", "a", "3") == 3
