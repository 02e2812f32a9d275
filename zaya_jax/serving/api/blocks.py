"""Splits a generated text into blocks: reasoning, content and tool calls, in the order of their beginnings.

Responses of Anthropic's Messages and OpenAI's Responses are lists of such blocks, and their streams report
how each one begins, grows and ends.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from zaya_jax.inference.tool_calls.message_parser import CallPart
from zaya_jax.serving.api.choice_text import Delta

BlockKind = Literal["reasoning", "text", "call"]


@dataclasses.dataclass
class ResponseBlock:
    """A part of a response.

    Attributes:
      index: number of the block in its response.
      kind: what it is.
      call: first part of a tool call, with its id and name; None for other kinds.
      text: characters so far; of a call, the JSON of its arguments.
    """

    index: int
    kind: BlockKind
    call: CallPart | None = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class BlockChange:
    """What happened to a block.

    Attributes:
      block: the block, after the change.
      kind: whether it was opened, has grown, or is complete.
      text: new characters of a block that has grown.
    """

    block: ResponseBlock
    kind: Literal["open", "append", "close"]
    text: str = ""


class ResponseBlocks:
    """The blocks of one text.

    Attributes:
      blocks: all blocks so far.
    """

    def __init__(self):
        self.blocks: list[ResponseBlock] = []
        self._is_open = False

    def add(self, delta: Delta) -> Iterator[BlockChange]:
        """Adds a part of the text, and yields the changes that it makes."""
        # A call that an earlier part has begun is the open block, so its rest precedes anything new.
        for part in delta.calls:
            if part.name is None:
                yield self._append(part.arguments)
        if delta.reasoning:
            yield from self._write("reasoning", delta.reasoning)
        if delta.content:
            yield from self._write("text", delta.content)
        for part in delta.calls:
            if part.name is not None:
                yield from self._open("call", part)
                yield self._append(part.arguments)
        if delta.finish_reason is not None:
            yield from self._close()

    def _write(self, kind: BlockKind, text: str) -> Iterator[BlockChange]:
        # Text after a call is a new block: a closed one never grows.
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._open(kind)
        yield self._append(text)

    def _open(self, kind: BlockKind, call: CallPart | None = None) -> Iterator[BlockChange]:
        # Blocks follow one another, so that the one before is complete.
        yield from self._close()
        self.blocks.append(ResponseBlock(len(self.blocks), kind, call))
        self._is_open = True
        yield BlockChange(self.blocks[-1], "open")

    def _append(self, text: str) -> BlockChange:
        assert self._is_open, "a rest of a call follows its beginning"
        self.blocks[-1].text += text
        return BlockChange(self.blocks[-1], "append", text)

    def _close(self) -> Iterator[BlockChange]:
        if self._is_open:
            self._is_open = False
            yield BlockChange(self.blocks[-1], "close")
