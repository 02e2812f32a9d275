"""Trims chats that are too long by removing thoughts, and never an answer ([ZAYA1-8B]).

A chat that is cut anywhere would lack the end of an answer, and a model that learns it would hallucinate
continuations. A chat is therefore kept if it fits. Otherwise the end of the last think block is cut. If that
is not enough, all earlier think blocks are removed, and the last one is cut if necessary. If that is not
enough either, the chat is dropped. The result depends on the length, so chats are trimmed for each length
separately.
"""

import bisect
import dataclasses
import enum
from collections.abc import Iterator, Sequence

from zaya_jax.data.chats.records import ASSISTANT, Message
from zaya_jax.data.chats.templates.encoding import ChatFormat, EncodedChat
from zaya_jax.data.chats.tool_records import Tool

_BEGIN, _END = "<think>", "</think>"


class Trimming(enum.Enum):
    """What was trimmed from a chat."""

    NOTHING = "not trimmed"
    TAIL = "last think block cut"
    EARLIER = "earlier think blocks dropped"
    EARLIER_AND_TAIL = "earlier think blocks dropped, last one cut"


def fit(
    messages: Sequence[Message],
    chat_format: ChatFormat,
    *,
    max_tokens: int,
    whole: EncodedChat | None = None,
    tools: Sequence[Tool] = (),
) -> tuple[EncodedChat, Trimming] | None:
    """Trims a chat to at most `max_tokens` tokens; returns None if that is impossible with whole answers.

    Args:
      messages: messages of the chat.
      chat_format: template and tokenizer.
      max_tokens: maximum number of tokens.
      whole: the encoded untrimmed chat, if it is known already.
      tools: tools that the assistant may call.

    Raises:
      UserError: as `ChatFormat.encode`.
    """
    # Least loss first: the whole chat, a shorter last thought, then no earlier thoughts.
    shorter = drop_earlier_thoughts(messages)
    for kept, encoded, lost, cut in (
        (messages, whole, Trimming.NOTHING, Trimming.TAIL),
        (shorter, None, Trimming.EARLIER, Trimming.EARLIER_AND_TAIL),
    ):
        encoded = encoded or chat_format.encode(kept, tools=tools)
        if len(encoded) <= max_tokens:
            return encoded, lost
        if (trimmed := _cut_last_thought(kept, chat_format, max_tokens, tools)) is not None:
            return trimmed, cut
    return None


def drop_earlier_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Removes the think blocks of all messages before the last one that has any."""
    last = max(_last_with_thought(messages), 0)
    return [*map(_without_thought, messages[:last]), *messages[last:]]


def _cut_last_thought(
    messages: Sequence[Message], chat_format: ChatFormat, max_tokens: int, tools: Sequence[Tool]
) -> EncodedChat | None:
    last = _last_with_thought(messages)
    if last < 0:
        return None
    content = messages[last].text
    *_, block = _thoughts(content)
    thought = content[block.first : block.last]

    def encode(num_kept: int) -> EncodedChat:
        cut = content[: block.first] + thought[:num_kept] + content[block.last :]
        message = dataclasses.replace(messages[last], content=cut)
        return chat_format.encode([*messages[:last], message, *messages[last + 1 :]], tools=tools)

    # Binary search by encoding, because only the template and the tokenizer know the cost of a character.
    # Token counts are not exactly monotonic in the text, but the result has itself been encoded and fits.
    # At least one character is cut, because the whole chat did not fit.
    choices = range(1, len(thought))
    num_kept = bisect.bisect_right(choices, max_tokens, key=lambda num: len(encode(num)))
    # An empty think block would teach the model not to think.
    return encode(num_kept) if num_kept else None


def _last_with_thought(messages: Sequence[Message]) -> int:
    return max((i for i, message in enumerate(messages) if _thinks(message)), default=-1)


def _thinks(message: Message) -> bool:
    return message.role == ASSISTANT and next(_thoughts(message.text), None) is not None


def _without_thought(message: Message) -> Message:
    if not _thinks(message):
        return message
    kept, end = [], 0
    for block in _thoughts(message.text):
        kept.append(message.text[end : block.begin])
        end = block.end
    return dataclasses.replace(message, content="".join([*kept, message.text[end:]]))


@dataclasses.dataclass(frozen=True)
class _Thought:
    """Character offsets of a think block in a text.

    Attributes:
      begin: start of the block.
      first: start of the thought, after leading white space.
      last: end of the thought (exclusive), before trailing white space.
      end: end of the block (exclusive), including the white space that follows it.
    """

    begin: int
    first: int
    last: int
    end: int


def _thoughts(text: str) -> Iterator[_Thought]:
    """Yields the think blocks of a text in linear time; a regular expression could take quadratic time."""

    position = 0
    while (begin := text.find(_BEGIN, position)) >= 0:
        inner = begin + len(_BEGIN)
        if (close := text.find(_END, inner)) < 0:
            return
        thought = text[inner:close]
        first = inner + len(thought) - len(thought.lstrip())
        position = close + len(_END)
        # The white space after a block only separates it from the answer.
        while position < len(text) and text[position].isspace():
            position += 1
        yield _Thought(begin, first, first + len(thought.strip()), position)
