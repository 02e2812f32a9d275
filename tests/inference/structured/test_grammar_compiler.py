"""Grammars that llguidance refuses or cannot bound, and what clients read about them."""

import functools
import time

import pytest

from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.errors import UserError
from zaya_jax.inference.structured import compiler as compiler_module
from zaya_jax.inference.structured.compiler import GrammarCompiler
from zaya_jax.inference.structured.grammar import json_schema_grammar


@functools.cache
def compiler():
    return GrammarCompiler(load_tokenizer("byte-chat"), 272)


def compile_schema(schema):
    return compiler().compile(json_schema_grammar(schema))


REFUSED = [
    ({"type": "strin"}, "cannot be enforced: Invalid type: strin"),
    ({"type": "object", "required": "a"}, "Expected array for 'required'"),
    ({"not": {"type": "string"}}, 'has "not", which is not supported; remove it'),
    ({"type": "array", "uniqueItems": True}, 'has "uniqueItems", which is not supported'),
    ({"$ref": "#/$defs/x"}, "Pointer '/\\$defs/x' does not exist"),
    ({"type": "string", "pattern": "("}, "regex parse error: .*unclosed group"),
    ({"type": "string", "pattern": "^(?=a)b"}, "look-ahead"),
    ({"type": "string", "format": "shoe-size"}, "Unknown format: shoe-size"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum \\(5\\) is greater than maximum \\(3\\)"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 'use "anyOf"'),
    ({"type": "integer", "minimum": 10**400}, "number out of range"),
]
EXPLODING = {
    "$defs": {"d0": {"type": "string"}}
    | {
        f"d{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}, {"const": i}]}] * 3}
        for i in range(1, 20)
    },
    "$ref": "#/$defs/d19",
}
TOO_COMPLEX = [
    (EXPLODING, "schema too large"),
    ({"properties": {f"p{i}": {} for i in range(3000)}, "type": "object"}, "cannot be enforced: "),
]


@pytest.mark.parametrize(("schema", "says"), [*REFUSED, *TOO_COMPLEX], ids=lambda each: str(each)[:40])
def test_refusals(schema, says, monkeypatch):
    # In this process: the limits of the other one have a test.
    monkeypatch.setattr(compiler_module, "check_in_process", lambda *_: None)
    with pytest.raises(UserError, match=says) as caught:
        compile_schema(schema)
    assert str(caught.value).startswith("the schema ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


ENDED = r"too complex: compiling it takes over 3 seconds; simplify it|could not be compiled in 60 seconds"
"""The second message is that of a machine that is very busy."""


def test_a_schema_that_takes_too_long_is_ended():
    # All multiples of a large prime number: minutes, in a call that no thread could interrupt.
    started = time.process_time()
    with pytest.raises(UserError, match=ENDED):
        compile_schema({"type": "integer", "multipleOf": 49_999_991})
    assert time.process_time() - started < 2, "this process did not do the work"


def test_recursive_schemas_and_their_cache(monkeypatch):
    schema = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    first = compile_schema(schema)
    # A grammar that was compiled once needs no process.
    monkeypatch.setattr(compiler_module, "check_in_process", None)
    assert compile_schema(schema) is not first
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 0)
    compiler()._keep("another", object())
    with pytest.raises(TypeError):
        compile_schema(schema)


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(compiler_module, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"needs llguidance, which is not installed: .*pip.* install"):
        GrammarCompiler(load_tokenizer("byte"), 259).compile(json_schema_grammar({}))
