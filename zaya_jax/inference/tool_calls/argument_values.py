"""Converts the text of an argument to a JSON value, by the JSON schema of its tool.

A markup that writes `<parameter=count>3</parameter>` does not distinguish the number 3 from the text "3"; the
schema does.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.data.chats.tool_records import Tool, function_of

Schema = Mapping[str, Any]
# Templates that print values by Python's rules write these words.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


class ArgumentTypes:
    """The types of the arguments of some tools."""

    def __init__(self, tools: Sequence[Tool]):
        """Creates the types.

        Args:
          tools: tools that the assistant may call.
        """
        functions = map(function_of, tools)
        self._schemas = {each["name"]: each.get("parameters") or {} for each in functions}

    def value(self, function: str, parameter: str, text: str) -> Any:
        """Converts the text of an argument.

        Text that does not have the type of its parameter is returned unchanged: the caller of the model
        validates arguments, and can report the error to it.

        Args:
          function: name of the tool.
          parameter: name of the parameter.
          text: text of the argument.
        """
        root = self._schemas.get(function, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        types = set(_types(schema, root, set())) if isinstance(schema, Mapping) else set()
        # Exactly as written: text may look like a number, and spaces at its ends may matter.
        if types == {"string"}:
            return text
        try:
            value = _parse(text.strip())
        except ValueError:
            return text
        # Without a type, a value that is not text is what it looks like.
        has_type = not types or bool(types & _types_of(value))
        return value if has_type and not isinstance(value, str) else text


def _types(schema: Schema, root: Schema, followed: set[str]) -> Iterator[str]:
    """Yields the types that a schema allows; nothing if it allows all.

    Args:
      schema: the schema.
      root: the schema that references refer to.
      followed: references that were followed already: a schema may refer to itself.
    """
    declared = _list_at(schema, "type")
    yield from (each for each in declared if isinstance(each, str))
    for value in [] if declared else [*_list_at(schema, "enum"), *_list_at(schema, "const")]:
        yield from _types_of(value)
    for each in (each for name in ("anyOf", "oneOf", "allOf") for each in _list_at(schema, name)):
        if isinstance(each, Mapping):
            yield from _types(each, root, followed)
    reference = schema.get("$ref")
    if not isinstance(reference, str) or reference in followed:
        return
    followed.add(reference)
    if isinstance(target := _resolve(reference, root), Mapping):
        yield from _types(target, root, followed)


def _list_at(schema: Schema, name: str) -> list[Any]:
    """The values of a field. Clients may send any JSON as a schema."""
    if name not in schema:
        return []
    return schema[name] if isinstance(schema[name], list) else [schema[name]]


def _resolve(reference: str, root: Schema) -> Any:
    """The part of a schema that a reference such as "#/$defs/Color" names."""
    if not reference.startswith("#/"):
        return None
    part: Any = root
    for name in reference[2:].split("/"):
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def _types_of(value: Any) -> set[str]:
    """The types of JSON schemas that a value has."""
    # bool is a subclass of int in Python, but no number in JSON.
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if value is None:
        return {"null"}
    return {"array" if isinstance(value, list) else "object" if isinstance(value, dict) else "string"}


def parse_json(text: str) -> Any:
    """Parses a JSON value that can be written as JSON again.

    Raises:
      ValueError: if the text is not JSON, or has a number that JSON cannot write, such as 1e999.
    """
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _parse(text: str) -> Any:
    """Parses JSON, or a list or object that Python printed.

    Raises:
      ValueError: if the text is neither.
    """
    # Before JSON, which spells them differently.
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return parse_json(text)
    except ValueError:
        if not text.startswith(("[", "{")):
            raise
    try:
        value = ast.literal_eval(text)
        # JSON has no sets, bytes and complex numbers, and only text as names.
        return parse_json(json.dumps(value, allow_nan=False))
    # The errors of `ast.literal_eval` for text that is no literal.
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("not a literal") from error
