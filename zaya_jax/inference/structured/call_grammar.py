"""The grammar of tool calls in the markup of a chat template, for `tool_choice` "required" or one function.

Between the tags of a call is either JSON, `{"name": ..., "arguments": {...}}`, or tags of a function and its
parameters, where text is written without quotes and other values as JSON.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.data.chats.tool_records import function_of
from zaya_jax.errors import UserError
from zaya_jax.inference.structured.grammar import Grammar, checked_schema, grammar_of

_ANY = r"(?s:.*)"
_END = r"\n<\/parameter>"
_INNER_TAGS = r"(<parameter=|<\/function>|[^\n]<\/parameter>)"
"""What would end the text of a parameter too early for a parser."""
_MAX_DEPTH = 32
_LENGTHS = ("minLength", "maxLength")
_NOT_ENFORCED = ("pattern", "format")
"""Keywords of strings that rules of bare text cannot enforce."""


@dataclasses.dataclass(frozen=True)
class CallForm:
    """How a chat template writes a call.

    Attributes:
      call: tag that opens a call.
      call_end: tag that closes a call.
      has_inner_tags: whether the call consists of tags of a function and its parameters, rather than JSON.
      specials: ids of the tags that are single special tokens; all others are text.
    """

    call: str
    call_end: str
    has_inner_tags: bool
    specials: Mapping[str, int]

    def tag(self, tag: str) -> str:
        """Returns a tag as a part of a rule."""
        return f"<[{self.specials[tag]}]>" if tag in self.specials else json.dumps(tag)


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]], form: CallForm, *, name: str | None = None, parallel: bool = False
) -> Grammar:
    """Returns the grammar of an answer that calls a tool.

    Args:
      tools: tools in OpenAI's form, `{"type": "function", "function": {"name": ..., "parameters": ...}}`.
      form: how the chat template writes calls.
      name: name of the function to call; None for any.
      parallel: whether several calls may follow one another.

    Raises:
      UserError: if there is no such tool, or its parameters cannot be enforced.
    """
    functions = [each for each in map(function_of, tools) if name in (None, each["name"])]
    if not functions:
        raise UserError(f'no tool has the name "{name}"' if name else "there is no tool that could be called")
    # The names of rules are numbers, because the name of a function may have any characters.
    writer = _RuleWriter(form)
    names = [writer.add(function) for function in functions]
    call = f'{form.tag(form.call)} "\\n" ({" | ".join(names)}) "\\n" {form.tag(form.call_end)}'
    start = 'start: call ("\\n" call)*' if parallel else "start: call"
    return grammar_of("\n".join([start, f"call: {call}", *writer.rules]), writer.schemas)


class _RuleWriter:
    """Writes the rules of functions.

    Attributes:
      rules: rules so far.
      schemas: schemas of JSON that the rules name.
    """

    def __init__(self, form: CallForm):
        self._form = form
        self.rules: list[str] = []
        self.schemas: dict[str, Any] = {}

    def add(self, function: Mapping[str, Any]) -> str:
        """Adds the rules of a function; returns the name of its rule."""
        rule, name = f"function_{len(self.rules)}", function["name"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        place = f'the parameters of the tool "{name}"'
        if self._form.has_inner_tags:
            body = self._tags(name, checked_schema(parameters, place), place)
        else:
            # Arguments are an object, also where the schema does not say so.
            schema = checked_schema({"type": "object", **parameters}, place)
            begin = f'{{"name": {json.dumps(name)}, "arguments": '
            body = f'{json.dumps(begin)} {self._json(schema)} "}}"'
        self.rules.append(f"{rule}: {body}")
        return rule

    def _json(self, schema: Mapping[str, Any]) -> str:
        name = f"json_{len(self.schemas)}"
        self.schemas[name] = schema
        return f"@{name}"

    def _tags(self, name: str, root: Mapping[str, Any], place: str) -> str:
        required = root.get("required", ())
        parts = [json.dumps(f"<function={name}>\n")]
        # Parameters are written in the order of the schema, as the template does.
        for key, schema in root.get("properties", {}).items():
            parameter = f"parameter_{len(self.rules)}"
            value = self._value(schema, root, f'the parameter "{key}" in {place}')
            self.rules.append(f'{parameter}: {json.dumps(f"<parameter={key}>" + chr(10))} {value} "\\n"')
            parts.append(parameter if key in required else f"{parameter}?")
        return " ".join([*parts, '"</function>"'])

    def _value(self, schema: Any, root: Mapping[str, Any], place: str) -> str:
        """Returns the rule of a value and of the tag that ends it."""
        end = json.dumps("\n</parameter>")
        schema = {} if schema is True else schema
        parts = list(_alternatives(schema, root, place))
        # Text of an enumeration is written as it is, without quotes.
        values = [value for part in parts for value in _constants(part)]
        if values and all(isinstance(value, str) for value in values):
            return f"({' | '.join(map(json.dumps, values))}) {end}"
        # If text is one of several types, all are written as text: a parser decides by the schema what it is.
        texts = [part for part in parts if "string" in _types(part)]
        if not texts:
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            return f"{self._json(checked_schema({**schema, **shared}, place))} {end}"
        return self._text(texts, place)

    def _text(self, parts: Sequence[Mapping[str, Any]], place: str) -> str:
        if wrong := [key for part in parts for key in _NOT_ENFORCED if key in part]:
            raise UserError(
                f'{place} has "{wrong[0]}", which cannot be enforced where text is written without quotes; '
                "remove it"
            )
        # The widest bounds of the alternatives.
        low = min(part.get("minLength", 0) for part in parts)
        high = max(part.get("maxLength", -1) for part in parts)
        is_bounded = all("maxLength" in part for part in parts)
        text = f"(?s:.{{{low},{high if is_bounded else ''}}})"
        number = len(self.rules)
        self.rules.append(f"TEXT_{number}: /{text}{_END}/ & ~/{_ANY}{_INNER_TAGS}{_ANY}/")
        # Lazy: the text ends with its first closing tag. Only rules, and no terminals, can be.
        self.rules.append(f"text_{number}[lazy]: TEXT_{number}")
        return f"text_{number}"


def _alternatives(
    schema: Any, root: Mapping[str, Any], place: str, depth: int = 0
) -> Iterator[Mapping[str, Any]]:
    """Yields the schemas that a value may match, with references resolved."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        raise UserError(f"{place} has no schema that can be enforced")
    if isinstance(reference := schema.get("$ref"), str):
        yield from _alternatives(_resolve(reference, root, place), root, place, depth + 1)
        return
    # Keywords next to the alternatives of text are not enforced; values that are not text keep them.
    choices = schema.get("anyOf") or schema.get("oneOf") or ()
    for choice in choices:
        yield from _alternatives(choice, root, place, depth + 1)
    if not choices:
        yield schema


def _resolve(reference: str, root: Mapping[str, Any], place: str) -> Any:
    part: Any = root
    for name in reference.removeprefix("#/").split("/"):
        part = part.get(name) if isinstance(part, dict) else None
    # A value is checked without the rest of its schema, where other references would lead elsewhere.
    if part is None or not reference.startswith(("#/$defs/", "#/definitions/")):
        raise UserError(f'{place} refers to "{reference:.80}"; it must refer to "#/$defs/NAME"')
    return part


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Returns the types that a schema without references names; "string" too if it allows any type."""
    declared = schema.get("type", "string" if not _constants(schema) else [])
    return {declared} if isinstance(declared, str) else set(declared)


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    return schema.get("enum") or ([schema["const"]] if "const" in schema else [])
