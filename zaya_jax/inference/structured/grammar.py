"""Grammars of answers: JSON of a schema, or any JSON object.

A grammar is text in the format of llguidance: a list of JSON schemas and of rules in Lark's notation that may
refer to them. Nothing here needs the library, so that a wrong schema is refused without it.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from zaya_jax.errors import UserError

MAX_SCHEMA_BYTES = 1 << 17
"""Maximum size of a schema as JSON. Schemas of real interfaces have a few KiB."""
WHITESPACE = r"( |\n {0,64})?"
"""Whitespace between two tokens of JSON: none, a space, or a line break with indentation. Without a bound a
model may write spaces until its limit."""
_OPTIONS = {
    "whitespace_pattern": WHITESPACE,
    # Refuse a keyword that is not implemented: an answer must never violate the schema in silence.
    "lenient": False,
    "coerce_one_of": False,
}
"""llguidance's options of a schema. They replace the field `x-guidance` of a client's schema."""
_DATA_KEYWORDS = ("const", "default", "enum", "example", "examples")
"""Keywords whose values are data and not schemas."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A grammar that answers must match.

    Attributes:
      source: grammar in llguidance's JSON format.
    """

    source: str


def json_object_grammar() -> Grammar:
    """Returns the grammar of any JSON object."""
    return json_schema_grammar({"type": "object"})


def json_schema_grammar(schema: Any, name: str = "the schema") -> Grammar:
    """Returns the grammar of the JSON texts that a schema accepts.

    Args:
      schema: JSON schema, an object.
      name: how error messages call the schema.

    Raises:
      UserError: if the schema is not an object, is too large, or refers to another document.
    """
    return grammar_of("start: @answer", {"answer": checked_schema(schema, name)})


def grammar_of(rules: str, schemas: Mapping[str, Any]) -> Grammar:
    """Returns a grammar of rules and schemas.

    Args:
      rules: rules in llguidance's form of Lark, which begin with `start:`. "@NAME" is the JSON of a schema.
      schemas: schemas by name, as `checked_schema` returns them.
    """
    # With forcing, a text that must follow could only be written with the tokens that the tokenizer chooses
    # for it. The mask would then exclude tokens that the grammar accepts, such as the quotation mark alone.
    rules = '%llguidance {"no_forcing": true}\n' + rules
    parts = [{"name": name, "json_schema": schema} for name, schema in schemas.items()]
    return Grammar(json.dumps({"grammars": [{"lark_grammar": rules}, *parts]}))


def checked_schema(schema: Any, name: str) -> dict[str, Any]:
    """Checks a schema, and returns it with the options of the grammar.

    Args:
      schema: JSON schema.
      name: how error messages call the schema.

    Raises:
      UserError: as `json_schema_grammar`.
    """
    if not isinstance(schema, dict):
        raise UserError(f"{name} is {schema!r:.40}; it must be a JSON schema, an object")
    # The size bounds everything that follows, compiling included.
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except RecursionError:
        raise UserError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{name} is not JSON: {error}") from None
    if size > MAX_SCHEMA_BYTES:
        raise UserError(f"{name} has {size:,} bytes; the maximum is {MAX_SCHEMA_BYTES:,}")
    # A reference must not make the server read a file or a URL; llguidance would refuse it less clearly.
    ids = {part["$id"] for part in _objects(schema) if isinstance(part.get("$id"), str)}
    for part in _objects(schema):
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#") and reference not in ids:
            raise UserError(
                f'{name} refers to "{reference:.80}", which is not part of it; copy that schema into "$defs" '
                'and refer to "#/$defs/NAME"'
            )
    return {**schema, "x-guidance": _OPTIONS}


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields all objects of a schema that may be schemas themselves."""
    # A list rather than recursion, because a client chooses the depth.
    unread = [schema]
    while unread:
        part = unread.pop()
        if isinstance(part, dict):
            yield part
            unread += [value for key, value in part.items() if key not in _DATA_KEYWORDS]
        elif isinstance(part, list):
            unread += part
