"""Tool calls at the terminal: a readable line for each, and the calls of an answer for the conversation."""

import json
from collections.abc import Iterable, Iterator

from zaya_jax.data.chats.templates.template import THINK, THINK_END
from zaya_jax.data.chats.tool_records import ToolCall
from zaya_jax.inference.engine.text_stream import Piece
from zaya_jax.inference.tool_calls.message_parser import (
    CallPart,
    MessageParser,
    Part,
    ToolParsing,
    join_calls,
)


class CallNote(Piece):
    """A line that describes a call, which is shown but not part of the answer's text."""


def describe_call(call: ToolCall) -> str:
    """Describes a call as code: `get_weather(city="Paris", days=3)`."""
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def message_pieces(
    pieces: Iterable[Piece], parsing: ToolParsing, calls: list[ToolCall], *, is_reasoning: bool
) -> Iterator[Piece]:
    """Yields the pieces of an answer with a line for each call instead of its markup.

    Args:
      pieces: pieces as the model generates them, with the marks of thoughts and calls.
      parsing: how calls are parsed.
      calls: list that receives the calls.
      is_reasoning: whether the prompt has begun a thought.
    """
    parser = MessageParser(parsing, is_reasoning=is_reasoning)
    call_parts: list[CallPart] = []
    is_thought, is_line_begun = is_reasoning, is_reasoning

    def show(parts: Iterable[Part]) -> Iterator[Piece]:
        nonlocal is_thought, is_line_begun
        for part in parts:
            if isinstance(part, CallPart):
                call_parts.append(part)
                continue
            # A mark separates a thought from what follows, as in the answer of a model without tools.
            if part.is_reasoning != is_thought:
                is_thought = part.is_reasoning
                yield Piece(THINK if is_thought else THINK_END, is_mark=True)
            yield Piece(part.text)
            is_line_begun = not part.text.endswith("\n")

    for piece in pieces:
        yield from show(parser.add(piece))
    yield from show(parser.end(is_cut=False))
    # The model has not closed its thought; the line of a call is no part of it.
    if is_thought and call_parts:
        yield Piece(THINK_END, is_mark=True)
    for part in join_calls(call_parts):
        assert part.name is not None, "the first part of a call has its name"
        calls.append(ToolCall(part.name, json.loads(part.arguments), part.id))
        yield CallNote("\n" * is_line_begun + f"call: {describe_call(calls[-1])}")
        is_line_begun = True
