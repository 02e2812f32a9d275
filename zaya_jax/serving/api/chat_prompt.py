"""Renders the messages of a chat request as prompt tokens."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.data.chats.records import ASSISTANT, Message, parse_message
from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.chats.templates.template import THINK, THINK_END
from zaya_jax.data.chats.tool_records import Tool
from zaya_jax.errors import UserError
from zaya_jax.inference.chat.messages import SYSTEM
from zaya_jax.serving.api.request_schema import ChatBody, ChatMessage
from zaya_jax.serving.api.validation import one_line
from zaya_jax.serving.http.errors import ApiError


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A conversation, and how the template renders it.

    Attributes:
      messages: messages of the conversation, at least one.
      tools: tools that the prompt describes.
      variables: extra variables of the template, by name.
      add_generation_prompt: whether the prompt ends with the start of an assistant's turn.
      continue_final_message: whether the prompt ends within the last message, which the model continues.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool]
    variables: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool

    def encode(self, chat_format: ChatFormat) -> tuple[int, ...]:
        """Returns the tokens of the prompt.

        Raises:
          UserError: if the template refuses the conversation.
        """
        encoded = chat_format.encode(
            self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            variables=self.variables,
        )
        return tuple(encoded.tokens_T.tolist())

    def reasoning_start(self, chat_format: ChatFormat, prompt: tuple[int, ...]) -> str:
        """Returns the beginning of the reasoning that the prompt ends with; "" if there is none."""
        marks = chat_format.specials.get(THINK), chat_format.specials.get(THINK_END)
        # The last mark decides: earlier reasoning in the conversation is complete.
        last = next((token for token in reversed(prompt) if token in marks), None)
        if last is None or last != marks[0]:
            return ""
        # The client already has the text of the message that it wants continued.
        if self.continue_final_message:
            return THINK
        return chat_format.thought_prefix(self.messages, tools=self.tools, variables=self.variables)


def read_chat_prompt(body: ChatBody, tools: Sequence[Tool]) -> ChatPrompt:
    """Returns the conversation of a validated body.

    Args:
      body: the body.
      tools: tools that the prompt describes.

    Raises:
      ApiError: for a message with a wrong role, or options that contradict each other.
    """
    is_continued, adds_prompt = body.continue_final_message, body.add_generation_prompt
    if is_continued and adds_prompt:
        raise ApiError(
            "continue_final_message and add_generation_prompt are both true; the prompt can end with the "
            "last message or with the start of a new one",
            param="add_generation_prompt",
        )
    messages = [_to_message(each, f"messages[{i}]") for i, each in enumerate(body.messages)]
    adds_prompt = not is_continued if adds_prompt is None else adds_prompt
    return ChatPrompt(messages, tools, body.chat_template_kwargs, adds_prompt, is_continued)


def _to_message(message: ChatMessage, path: str) -> Message:
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and message.role != ASSISTANT:
        raise ApiError(
            f"{path} has reasoning_content; only messages of the assistant have reasoning", param=path
        )
    # OpenAI's newer models call the system "developer", a role that templates do not know.
    role = SYSTEM if message.role == "developer" else message.role
    content = f"{THINK}{reasoning}{THINK_END}{message.text or ''}" if reasoning else message.text
    values = {
        "role": role,
        "content": content,
        "name": message.name,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
    }
    try:
        return parse_message(values, path, drops_nulls=False)
    except UserError as error:
        raise ApiError(one_line(error), param=path) from None
