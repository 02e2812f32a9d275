"""Selects the markup in which a chat template writes tool calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.data.chats.records import ASSISTANT, Message
from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.data.chats.tool_records import Tool, ToolCall
from zaya_jax.errors import UserError
from zaya_jax.inference.engine.text_stream import Piece
from zaya_jax.inference.tool_calls.markup import FUNCTION, MARKUPS, Markup
from zaya_jax.inference.tool_calls.message_parser import CallPart, MessageParser, ToolParsing

_SCHEMA = {
    "type": "object",
    "properties": {"zayatext": {"type": "string"}, "zayanumber": {"type": "integer"}},
}
_TOOL: Tool = {
    "type": "function",
    "function": {"name": "zayatool", "description": "zayapurpose", "parameters": _SCHEMA},
}
_ARGUMENTS = ({"zayatext": "zayaone", "zayanumber": 7}, {"zayatext": "zayatwo"})
_ASKED = Message("user", "zayauser")


def find_markup(chat_format: ChatFormat) -> Markup | None:
    """Finds the markup that a template writes: the one whose parser returns the calls of a rendered chat.

    Args:
      chat_format: chat format with the template.

    Returns:
      The markup; None if the template does not support tool calls, or writes them in an unknown form.
    """
    # Several calls, or one where a template supports only one.
    for num_calls in (2, 1):
        arguments = _ARGUMENTS[:num_calls]
        if (text := _rendered_calls(chat_format, arguments)) is None:
            continue
        expected = [("zayatool", each) for each in arguments]
        fitting = [markup for markup in MARKUPS.values() if _parse(text, markup) == expected]
        # Markups with the same tags read each other's calls, but not what is left over from incomplete ones.
        if fitting:
            return min(fitting, key=lambda markup: markup.has_inner_tags != (FUNCTION in text))
    return None


def select_markup(chat_format: ChatFormat, name: str | None) -> Markup | None:
    """Returns the markup with a name, or else the one that the template writes.

    Args:
      chat_format: chat format of the model.
      name: name of a parser; None to select it by the template.

    Raises:
      UserError: if the name is unknown.
    """
    # The template decides, unless the user knows better.
    if name is None:
        return find_markup(chat_format)
    if name not in MARKUPS:
        raise UserError(f'unknown tool call parser "{name}"; it must be one of {", ".join(MARKUPS)}')
    return MARKUPS[name]


def require_markup(chat_format: ChatFormat, markup: Markup | None) -> Markup:
    """Returns the markup, or raises the reason why tools cannot be used.

    Args:
      chat_format: chat format of the model.
      markup: markup that `select_markup` returned.

    Raises:
      UserError: if it is None.
    """
    if markup is not None:
        return markup
    chat = ChatInput([_ASKED], tools=[_TOOL])
    if (error := chat_format.tool_support.refusal(chat, chat_format.template.name)) is not None:
        raise error
    raise UserError(
        f"the chat template {chat_format.template.name} does not support tool calls, or writes them in a "
        f"form that no parser reads; choose a template or one of the parsers {', '.join(MARKUPS)} "
        "(--tool-call-parser)"
    )


def _rendered_calls(chat_format: ChatFormat, arguments: Sequence[Mapping[str, Any]]) -> str | None:
    """The text of an assistant's message with calls; None if the template does not support them."""
    calls = tuple(ToolCall("zayatool", each, f"zayacall{i}") for i, each in enumerate(arguments))
    answer = Message(ASSISTANT, None, tool_calls=calls)
    try:
        # Everything after the prompt is what a model writes.
        prompt = chat_format.render(ChatInput([_ASKED], add_generation_prompt=True, tools=[_TOOL])).text
        whole = chat_format.render(ChatInput([_ASKED, answer], tools=[_TOOL])).text
    except UserError:
        return None
    # The end of the prompt may differ, such as by the start of a thought.
    common = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    return whole[common:]


def _parse(text: str, markup: Markup) -> list[tuple[str, Any]]:
    """The calls in a text, in which tags are text too."""
    # Without special tokens, because a rendered text spells their names.
    parser = MessageParser(ToolParsing(markup, [_TOOL], {}))
    parts = [*parser.add(Piece(text)), *parser.end(is_cut=False)]
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    for part in parts:
        if isinstance(part, CallPart):
            names.setdefault(part.index, part.name or "")
            texts[part.index] = texts.get(part.index, "") + part.arguments
    return [(names[index], json.loads(texts[index])) for index in names]
