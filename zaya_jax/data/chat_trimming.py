"""Trimming that keeps answers: a chat that is too long loses thoughts, or is left out ([ZAYA1-8B]).

What is cut at any place ends without an answer, and a model that learns it makes up how things go on. So a
chat is kept if it fits; else the last think block loses its tail, and keeps its beginning; else all earlier
think blocks go, and the same is tried again; else the chat goes. What is enough depends on the length: this
is done anew for each.
"""

import bisect
import dataclasses
import enum
import re
from collections.abc import Sequence

from zaya_jax.data.chat_format import ChatFormat, EncodedChat
from zaya_jax.data.chat_records import ASSISTANT, Message

_THOUGHT = re.compile(r"(<think>\s*)(.*?)(\s*</think>\s*)", re.DOTALL)


class Trimming(enum.Enum):
    """What a chat lost to fit."""

    NOTHING = "whole"
    TAIL = "last think block cut"
    EARLIER = "earlier think blocks dropped"
    EARLIER_AND_TAIL = "earlier think blocks dropped, last one cut"


def fit(
    messages: Sequence[Message], chat_format: ChatFormat, *, most_tokens: int
) -> tuple[EncodedChat, Trimming] | None:
    """A chat in at most so many tokens, with whole answers; None where that cannot be.

    Raises:
      ValueError: as `ChatFormat.encode`.
    """
    shorter = drop_earlier_thoughts(messages)
    for kept, whole, cut in (
        (messages, Trimming.NOTHING, Trimming.TAIL),
        (shorter, Trimming.EARLIER, Trimming.EARLIER_AND_TAIL),
    ):
        encoded = chat_format.encode(kept)
        if len(encoded) <= most_tokens:
            return encoded, whole
        if (found := _cut_last_thought(kept, chat_format, most_tokens)) is not None:
            return found, cut
    return None


def drop_earlier_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Without the think blocks of all messages before the last one that has any."""
    last = max(_last_with_thought(messages), 0)
    return [*map(_without_thought, messages[:last]), *messages[last:]]


def _cut_last_thought(
    messages: Sequence[Message], chat_format: ChatFormat, most_tokens: int
) -> EncodedChat | None:
    last = _last_with_thought(messages)
    if last < 0:
        return None
    content = messages[last].content
    *_, block = _THOUGHT.finditer(content)
    thought = block[2]

    def encode(num_kept: int) -> EncodedChat:
        cut = content[: block.start(2)] + thought[:num_kept] + content[block.start(3) :]
        message = dataclasses.replace(messages[last], content=cut)
        return chat_format.encode([*messages[:last], message, *messages[last + 1 :]])

    # By trial, for only the template and the tokenizer know what a character costs. The number that is found
    # has been tried, so that it fits even where a longer text has fewer tokens.
    choices = range(1, len(thought))
    num_kept = bisect.bisect_right(choices, most_tokens, key=lambda num: len(encode(num)))
    return encode(num_kept) if num_kept else None


def _last_with_thought(messages: Sequence[Message]) -> int:
    return max((i for i, message in enumerate(messages) if _thinks(message)), default=-1)


def _thinks(message: Message) -> bool:
    return message.role == ASSISTANT and _THOUGHT.search(message.content) is not None


def _without_thought(message: Message) -> Message:
    content = _THOUGHT.sub("", message.content) if _thinks(message) else message.content
    return dataclasses.replace(message, content=content)
