"""Schemas that are refused before anything compiles them, each with one sentence."""

import json

import pytest

from zaya_jax.errors import UserError
from zaya_jax.inference.structured.grammar import (
    MAX_SCHEMA_BYTES,
    json_object_grammar,
    json_schema_grammar,
)


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ([1], r"the schema is \[1\]; it must be a JSON schema, an object"),
        (True, "the schema is True; it must be"),
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, "the maximum is 131,072"),
        ({"minimum": float("inf")}, "is not JSON"),
        (nested(20_000), "nested too deeply|the maximum is"),
        ({"$ref": "https://example.com/a.json"}, 'refers to "https://example.com/a.json", which is not part'),
        (
            {"properties": {"a": {"anyOf": [{"$ref": "file:///etc/passwd"}]}}},
            'refers to "file:///etc/passwd"',
        ),
        ({"items": {"$ref": "other.json#/a"}}, 'refers to "other.json#/a"'),
    ],
)
def test_refusals(schema, says):
    with pytest.raises(UserError, match=says) as caught:
        json_schema_grammar(schema)
    assert "\n" not in str(caught.value)


def test_references_within_the_schema_and_in_data_are_accepted():
    schema = {
        "$defs": {"a": {"$id": "urn:a", "type": "integer"}},
        "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "urn:a"}, "$ref": {"type": "string"}},
        "const": {"$ref": "https://example.com"},
    }
    assert json_schema_grammar(schema).source


def test_a_client_cannot_change_how_the_schema_is_read():
    lenient = {"not": {}, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    (_, part) = json.loads(json_schema_grammar(lenient).source)["grammars"]
    assert part["json_schema"]["x-guidance"]["lenient"] is False
    assert json_object_grammar() == json_schema_grammar({"type": "object"})
