"""Reads the tools of a chat request, and whether the model may call them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zaya_jax.data.chats.tool_records import Tool, function_of, parse_tools
from zaya_jax.errors import UserError
from zaya_jax.inference.tool_calls.message_parser import ToolParsing
from zaya_jax.inference.tool_calls.template_markup import require_markup
from zaya_jax.serving.api.request_schema import ChatBody
from zaya_jax.serving.api.validation import invalid_value, one_line, preview
from zaya_jax.serving.http.errors import ApiError
from zaya_jax.serving.loaded_model import LoadedModel

_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'


@dataclasses.dataclass(frozen=True)
class ToolRequest:
    """The tools of a request.

    Attributes:
      prompt_tools: tools that the prompt describes; none if the model must not call them.
      parsing: how the calls of a response are parsed; None for a request without tools and calls, whose
        response may describe the markup of calls.
    """

    prompt_tools: tuple[Tool, ...] = ()
    parsing: ToolParsing | None = None


def read_tools(model: LoadedModel, body: ChatBody) -> ToolRequest:
    """Returns the tools of a validated body.

    Args:
      model: model with a chat format.
      body: the body.

    Raises:
      ApiError: if a tool or the choice is invalid, or not supported by the model.
    """
    try:
        tools = parse_tools(body.tools, "the request", drops_nulls=False)
    except UserError as error:
        raise ApiError(one_line(error), param="tools") from None
    calls_tools = _read_choice(body.tool_choice, tools)
    assert model.chat_format is not None, "the endpoint refuses chats without a format"
    # After calls in the conversation a model may call again, even if the client omits the tools.
    has_calls = any(message.tool_calls for message in body.messages)
    if not tools and not (has_calls and model.tool_markup):
        return ToolRequest()
    try:
        markup = require_markup(model.chat_format, model.tool_markup)
    except UserError as error:
        raise ApiError(one_line(error), param="tools", code="unsupported_parameter") from None
    # A choice of none still parses, so that no markup reaches the content.
    max_calls = (None if body.parallel_tool_calls else 1) if calls_tools else 0
    parsing = ToolParsing(markup, tools, model.chat_format.specials, max_calls)
    # A model that must not call tools does not see them.
    return ToolRequest(tools if calls_tools else (), parsing)


def _read_choice(choice: Any, tools: tuple[Tool, ...]) -> bool:
    """Returns whether the model may call tools."""
    if choice in (None, "none", "auto"):
        return choice != "none"
    if choice == "required":
        _require_tools(choice, tools)
        raise _needs_constraints('"required"')
    if (name := _named(choice)) is None:
        raise invalid_value("tool_choice", choice, _CHOICES)
    _require_tools(choice, tools)
    names = [function_of(tool)["name"] for tool in tools]
    if name not in names:
        raise ApiError(
            f"tool_choice names the tool {preview(name)}, which is not in tools: {', '.join(names[:8])}",
            param="tool_choice",
        )
    raise _needs_constraints("one function")


def _named(choice: Any) -> str | None:
    """The name of the function in a choice; None if it has another form."""
    is_function = isinstance(choice, Mapping) and choice.get("type") == "function"
    function = choice.get("function") if is_function else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _require_tools(choice: Any, tools: tuple[Tool, ...]) -> None:
    if not tools:
        raise ApiError(f"tool_choice is {preview(choice)}, but the request has no tools", param="tool_choice")


def _needs_constraints(choice: str) -> ApiError:
    return ApiError(
        f"tool_choice {choice} needs constrained decoding, which this server does not support; "
        'use "auto" and name the tool in the message',
        param="tool_choice",
        code="unsupported_parameter",
    )
