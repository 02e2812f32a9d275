"""Reads the tools of a chat request, and whether the model may call them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zaya_jax.data.chats.tool_records import Tool, function_of, parse_tools
from zaya_jax.errors import UserError
from zaya_jax.inference.structured.call_grammar import CallForm, tool_call_grammar
from zaya_jax.inference.structured.compiler import require_package
from zaya_jax.inference.tool_calls.message_parser import ToolParsing
from zaya_jax.inference.tool_calls.template_markup import require_markup
from zaya_jax.serving.api.answer_grammar import AnswerGrammar
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
      grammar: grammar of a response that must be a call; None if it may be text.
    """

    prompt_tools: tuple[Tool, ...] = ()
    parsing: ToolParsing | None = None
    grammar: AnswerGrammar | None = None


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Whether the model may call tools, whether it must, and which one; None for any."""

    may_call: bool = True
    must_call: bool = False
    name: str | None = None


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
    choice = _read_choice(body.tool_choice, tools)
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
    max_calls = (None if body.parallel_tool_calls else 1) if choice.may_call else 0
    parsing = ToolParsing(markup, tools, model.chat_format.specials, max_calls)
    # A model that must not call tools does not see them.
    prompt_tools = tools if choice.may_call else ()
    return ToolRequest(prompt_tools, parsing, _read_grammar(parsing, choice, body))


def _read_grammar(parsing: ToolParsing, choice: _Choice, body: ChatBody) -> AnswerGrammar | None:
    """Returns the grammar of the calls that a choice requires."""
    if not choice.must_call:
        return None
    markup = parsing.markup
    # Parser and grammar describe one markup: what the grammar allows, the parser reads as calls.
    form = CallForm(markup.call, markup.call_end, markup.has_inner_tags, parsing.specials)
    try:
        require_package("a tool_choice that requires a call")
        grammar = tool_call_grammar(parsing.tools, form, name=choice.name, parallel=body.parallel_tool_calls)
    except UserError as error:
        raise ApiError(one_line(error), param="tool_choice") from None
    return AnswerGrammar(grammar, "tool_choice", "the parameters of the tools")


def _read_choice(choice: Any, tools: tuple[Tool, ...]) -> _Choice:
    if choice in (None, "none", "auto"):
        return _Choice(may_call=choice != "none")
    name = _named(choice)
    if choice != "required" and name is None:
        raise invalid_value("tool_choice", choice, _CHOICES)
    if not tools:
        raise ApiError(f"tool_choice is {preview(choice)}, but the request has no tools", param="tool_choice")
    # A choice without such a tool would leave the model nothing that it could write.
    names = [function_of(tool)["name"] for tool in tools]
    if name is not None and name not in names:
        raise ApiError(
            f"tool_choice names the tool {preview(name)}, which is not in tools: {', '.join(names[:8])}",
            param="tool_choice",
        )
    return _Choice(must_call=True, name=name)


def _named(choice: Any) -> str | None:
    """The name of the function in a choice; None if it has another form."""
    is_function = isinstance(choice, Mapping) and choice.get("type") == "function"
    function = choice.get("function") if is_function else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
