"""Finds out by rendering small chats whether a template writes tools, their calls and their results.

Many templates ignore what they do not know. A model would then learn answers to results that it never saw,
so chats with tools are refused if their template does not write them.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from zaya_jax.data.chats.records import ASSISTANT, TOOL, Message
from zaya_jax.data.chats.templates.template import ChatInput, ChatTemplate
from zaya_jax.data.chats.tool_records import ToolCall
from zaya_jax.errors import UserError

# Plain lowercase letters, which templates write unchanged, except that some change the case of messages.
_NAME, _PARAMETER, _ARGUMENT, _RESULT = "zayatool", "zayaparameter", "zayaargument", "zayaresult"
# Nine letters and digits, which templates of Mistral require.
_ID = "zayacall0"
_PROPERTY = {"type": "string", "description": "zayameaning"}
_SCHEMA = {"type": "object", "properties": {_PARAMETER: _PROPERTY}, "required": [_PARAMETER]}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "zayapurpose", "parameters": _SCHEMA},
}


@dataclasses.dataclass(frozen=True)
class ToolSupport:
    """What a template does with tools.

    Attributes:
      problems: why the template does not support "tools", "calls" or "results"; missing if it does.
      needs_content: whether it supports calls only in messages whose content is text, which may be empty, and
        not null.
    """

    problems: Mapping[str, str]
    needs_content: bool = False

    def refusal(self, chat: ChatInput, name: str) -> UserError | None:
        """Returns the error of a chat that needs what the template does not support; None for others.

        Args:
          chat: the chat.
          name: name of the template.
        """
        # Only what the chat has: a template may support tools without results.
        for part in _parts_of(chat):
            if part in self.problems:
                return UserError(
                    f"the chat template {name} does not support {_PARTS[part]}: {self.problems[part]}; "
                    "choose a template that does (--template), or remove them"
                )
        return None

    def prepare(self, chat: ChatInput) -> ChatInput:
        """Returns the chat with empty content instead of null, if the template needs it."""
        if not self.needs_content:
            return chat
        messages = [dataclasses.replace(each, content=each.text) for each in chat.messages]
        return dataclasses.replace(chat, messages=messages)


_PARTS = {"tools": "tools", "calls": "tool calls", "results": "results of tools"}


def _parts_of(chat: ChatInput) -> list[str]:
    """What a chat has of tools. A tool's message without tools or calls is a role like any other."""
    has_calls = any(message.tool_calls for message in chat.messages)
    has_results = any(message.role == TOOL for message in chat.messages)
    has = {
        "tools": bool(chat.tools),
        "calls": has_calls,
        "results": has_results and (has_calls or bool(chat.tools)),
    }
    return [part for part, is_present in has.items() if is_present]


def uses_tools(chat: ChatInput) -> bool:
    """Whether a chat has tools, or calls of them."""
    return bool(_parts_of(chat))


def find_tool_support(template: ChatTemplate, trusted: Mapping[str, str]) -> ToolSupport:
    """Renders small chats with tools, calls and results, and searches for what the template wrote of them.

    Args:
      template: chat template.
      trusted: variables of the template that contain names of special tokens.
    """
    # OpenAI's client sends null for the content of calls; some templates concatenate it with text.
    with_null, with_empty = (_render(template, trusted, _called(content)) for content in (None, ""))
    needs_content = _is_null_written(with_null, with_empty)
    # All further chats have the content that the template accepts.
    called = _called("" if needs_content else None)
    result = Message(TOOL, _RESULT, name=_NAME, tool_call_id=_ID)
    answered = _render(template, trusted, [*called, result, Message(ASSISTANT, "zayaanswer")])
    problems = {
        "tools": _problem(_render(template, trusted, called[:1]), (_NAME, _PARAMETER)),
        "calls": _problem(with_empty if needs_content else with_null, (_ARGUMENT,)),
        "results": _problem(answered, (_RESULT,)),
    }
    return ToolSupport({part: why for part, why in problems.items() if why}, needs_content)


def _called(content: str | None) -> list[Message]:
    """A question and a call that answers it."""
    call = ToolCall(_NAME, {_PARAMETER: _ARGUMENT}, _ID)
    return [Message("user", "zayauser"), Message(ASSISTANT, content, tool_calls=(call,))]


def _is_null_written(with_null: str | UserError, with_empty: str | UserError) -> bool:
    """Whether a template fails for null, or prints it as Python does."""
    # Empty content does not help either: the problem is another one.
    if isinstance(with_empty, UserError):
        return False
    return isinstance(with_null, UserError) or with_null.count("none") > with_empty.count("none")


def _render(
    template: ChatTemplate, trusted: Mapping[str, str], messages: Sequence[Message]
) -> str | UserError:
    """The text of a chat with a tool in lower case, or the error if the template cannot render it."""
    # Some templates require a system message.
    choices = [messages, (Message("system", "zayasystem"), *messages)]
    chats = [ChatInput(each, tools=(_TOOL,)) for each in choices]
    try:
        _, rendered = template.render_first(chats, trusted=trusted)
    except UserError as error:
        return error
    return rendered.text.lower()


def _problem(text: str | UserError, words: Sequence[str]) -> str | None:
    """Why a text does not have some words; None if it has them."""
    if isinstance(text, UserError):
        return str(text)
    return None if all(word in text for word in words) else "it does not write them"
