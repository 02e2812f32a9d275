"""Reads tools and tool calls from records and requests, in OpenAI's form.

A tool is `{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`. A
call is `{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}`, where the arguments
are an object, or JSON text of one. The bare function, without the object around it, is supported for both.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.files.json_files import parse_value

Tool = Mapping[str, Any]
"""A tool as JSON, which templates read as transformers passes it."""
# The markup of a call has the name in a tag, so that it must not contain spaces, quotes or angle brackets.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CALL_FIELDS = {"id", "type", "function", "index"}


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
      name: name of the tool.
      arguments: arguments by name, as JSON values.
      id: id that the message with the result refers to; None if there is none.
    """

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the call as templates read it: the arguments are an object."""
        head = {} if self.id is None else {"id": self.id}
        return head | {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def parse_tools(value: Any, location: str, *, drops_nulls: bool = True) -> tuple[Tool, ...]:
    """Parses the tools of a record or a request.

    Args:
      value: value of the field `tools`: a list, JSON text of one, or None.
      location: location of the record, for error messages.
      drops_nulls: whether fields that are null are removed. `datasets` adds all fields of any tool to every
        tool. JSON text is not changed by it.

    Raises:
      UserError: if the value is not a list of tools.
    """
    # TRL stores tools as text too, because `datasets` merges the fields of all tools.
    if isinstance(value, str):
        value, drops_nulls = parse_value(value.encode("utf-8", "surrogatepass"), f"{location} tools"), False
    # A record without tools, or one of another data set's fields.
    if value is None:
        return ()
    if not isinstance(value, list):
        raise UserError(f"{location} has a {type(value).__name__} as tools; it must be a list of tools")
    tools = _without_nulls(value) if drops_nulls else value
    for number, tool in enumerate(tools, 1):
        _check_tool(tool, f"{location} tool {number}")
    return tuple(tools)


def function_of(tool: Tool) -> Mapping[str, Any]:
    """The function of a tool: its name, and usually a description and parameters."""
    return tool.get("function", tool)


def parse_tool_calls(value: Any, location: str, *, drops_nulls: bool = True) -> tuple[ToolCall, ...]:
    """Parses the tool calls of a message.

    Args:
      value: value of the field `tool_calls`: a list of calls.
      location: location of the message, for error messages.
      drops_nulls: whether arguments that are null are removed, unless they are JSON text; see `parse_tools`.

    Raises:
      UserError: if the value is not a list of calls.
    """
    if not isinstance(value, list):
        raise UserError(f"{location} has a {type(value).__name__} as tool_calls; it must be a list of calls")
    return tuple(
        _parse_call(each, f"{location} tool call {number}", drops_nulls=drops_nulls)
        for number, each in enumerate(value, 1)
    )


def _parse_call(value: Any, location: str, *, drops_nulls: bool) -> ToolCall:
    present = value.items() if isinstance(value, dict) else ()
    call = {name: each for name, each in present if each is not None}
    # A bare function has its name next to the id.
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    unknown = call.keys() - (_CALL_FIELDS if "function" in call else {*_CALL_FIELDS, "name", "arguments"})
    if not isinstance(name, str) or unknown or call.get("type", "function") != "function":
        raise UserError(
            f"{location} is {json.dumps(value)[:80]}; it must be "
            '{"type": "function", "function": {"name": "...", "arguments": {...}}}'
        )
    # Names come before arguments in error messages, because they identify the call.
    _check_name(name, location)
    identifier = call.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise UserError(f"{location} has an id that is a {type(identifier).__name__}; it must be text")
    arguments = _parse_arguments(function.get("arguments"), location, drops_nulls=drops_nulls)
    check_encodable([identifier, arguments], location)
    return ToolCall(name, arguments, identifier)


def _parse_arguments(value: Any, location: str, *, drops_nulls: bool) -> Mapping[str, Any]:
    if isinstance(value, str):
        # OpenAI's models write "" for a call without arguments.
        raw = value.strip().encode("utf-8", "surrogatepass")
        value, drops_nulls = parse_value(raw, f"{location}, arguments,") if raw else {}, False
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(
            f"{location} has arguments that are a {type(value).__name__}; they must be an object, or JSON "
            "text of one"
        )
    return _without_nulls(value) if drops_nulls else value


def _check_tool(tool: Any, location: str) -> None:
    function = function_of(tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or tool.get("type", "function") != "function":
        raise UserError(
            f"{location} is {json.dumps(tool)[:80]}; it must be "
            '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
        )
    _check_name(name, location)
    assert isinstance(function, dict), "it has a name"
    # Parsers and templates read properties of it.
    if not isinstance(function.get("parameters") or {}, dict):
        raise UserError(f"{location}, {name}, has parameters that are no object; they must be a JSON schema")
    check_encodable(tool, location)


def _check_name(name: str, location: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{location} has the name {name!r:.80}; a name has 1 to 128 letters, digits or any of _ . : / -"
        )


def check_encodable(value: Any, location: str) -> None:
    """Checks that all text in a JSON value has an encoding in UTF-8.

    Raises:
      UserError: if it contains half a surrogate pair, which JSON can spell.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{location} has half a surrogate pair; it must be text") from error


def _without_nulls(value: Any) -> Any:
    """Removes fields that are null, at any depth; null in a list stays, such as in an enum."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value
