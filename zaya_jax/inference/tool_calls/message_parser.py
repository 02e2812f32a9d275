"""Splits a generated message into reasoning, content and tool calls while it is generated."""

import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence

from zaya_jax.data.chats.templates.template import THINK, THINK_END
from zaya_jax.data.chats.tool_records import Tool
from zaya_jax.inference.engine.text_stream import Piece
from zaya_jax.inference.tool_calls.argument_values import ArgumentTypes
from zaya_jax.inference.tool_calls.call_body import BodyPart, CallBody, body_for
from zaya_jax.inference.tool_calls.markup import Markup, TagScanner


@dataclasses.dataclass(frozen=True)
class MessageText:
    """New characters of the reasoning or the content."""

    text: str
    is_reasoning: bool = False


@dataclasses.dataclass(frozen=True)
class CallPart:
    """A new part of a tool call.

    Attributes:
      index: number of the call in its message.
      id: id of the call, in its first part; None in later ones.
      name: name of the tool, in the first part; None in later ones.
      arguments: next characters of the arguments' JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = MessageText | CallPart


def join_calls(parts: Sequence[CallPart]) -> tuple[CallPart, ...]:
    """Joins successive parts of tool calls, so that each call has one part."""
    joined: dict[int, CallPart] = {}
    for part in parts:
        # The first part of a call in a chunk has its id and name, if any part has.
        before = joined.get(part.index)
        arguments = part.arguments if before is None else before.arguments + part.arguments
        joined[part.index] = dataclasses.replace(before or part, arguments=arguments)
    return tuple(joined.values())


@dataclasses.dataclass(frozen=True)
class ToolParsing:
    """How tool calls in generated text are parsed.

    Attributes:
      markup: markup of the calls.
      tools: tools that the model may call; their schemas determine the types of arguments.
      specials: ids of the tokenizer's special tokens, by name. Tags that are special tokens are recognized by
        their ids only, so that text that spells a tag is no call.
      max_calls: maximum number of calls that are returned; None for all. Others are dropped.
    """

    markup: Markup
    tools: Sequence[Tool]
    specials: Mapping[str, int]
    max_calls: int | None = None

    @property
    def marks(self) -> dict[int, str]:
        """The tags that are special tokens, by id."""
        return self.markup.marks(self.specials)

    @property
    def spelled_tags(self) -> tuple[str, ...]:
        """The tags that are text, because the tokenizer has no special tokens for them."""
        return tuple(tag for tag in self.markup.tags if tag not in self.specials)


class MessageParser:
    """Parses one message.

    - White space around calls is dropped, except between two texts.
    - A tag that closes nothing is dropped. A call whose closing tag is missing ends at any other tag of calls
      and results, at the mark of a thought, or where the message ends.
    - A call within a thought is a draft: it is part of the reasoning. If the message ends and the thought was
      never closed, the model has forgotten that, and the call counts.

    Attributes:
      is_reasoning: whether the message is within a thought.
      num_calls: number of calls so far, dropped ones excluded.
    """

    def __init__(self, parsing: ToolParsing, *, is_reasoning: bool = False):
        """Starts an empty message.

        Args:
          parsing: how calls are parsed.
          is_reasoning: whether the prompt has begun a thought.
        """
        self._parsing, self.is_reasoning = parsing, is_reasoning
        self._types = ArgumentTypes(parsing.tools)
        spelled, markup = parsing.spelled_tags, parsing.markup
        self._in_content = TagScanner(
            spelled, with_inner_tags=markup.has_inner_tags, with_broken_tags=markup.has_inner_tags
        )
        self._in_call = TagScanner(spelled)
        self._in_thought = TagScanner([tag for tag in spelled if tag == markup.call])
        self._text = ""
        self._is_call = False
        self._body: CallBody | None = None
        # The pieces of a thought from the first call in it.
        self._draft: list[Piece] = []
        self._space = ""
        self._follows_call = self._has_content = self._has_tags = False
        self._num_begun = 0

    @property
    def num_calls(self) -> int:
        """Number of calls so far, dropped ones excluded."""
        limit = self._parsing.max_calls
        return self._num_begun if limit is None else min(self._num_begun, limit)

    def add(self, piece: Piece) -> Iterator[Part]:
        """Adds text, or the name of a special token, and yields what it adds to the message."""
        # Whether a draft is a call is known only at the end of its thought.
        if self._draft and not (piece.is_mark and piece.text == THINK_END):
            self._draft.append(piece)
            return
        # Other special tokens have a name only if the client wants to see it.
        if piece.is_mark and piece.text in (THINK, THINK_END, *self._parsing.markup.tags):
            yield from self._end_text(is_end=False)
            yield from self._handle_tag(piece.text)
            return
        self._text += piece.text
        yield from self._read()

    def end(self, *, is_cut: bool) -> Iterator[Part]:
        """Ends the message.

        Args:
          is_cut: whether it ended at its maximum number of tokens.
        """
        yield from self._end_text(is_end=True)
        if self._is_call:
            yield from self._end_call(is_cut=is_cut)
        if self._draft:
            # A thought that was cut may still have been closed.
            yield from self._end_draft() if is_cut else self._read_draft()
        if self._space and not self._has_tags:
            yield MessageText(self._space)

    # Text

    @property
    def _scanner(self) -> TagScanner:
        if self._is_call:
            return self._in_call
        return self._in_thought if self.is_reasoning else self._in_content

    def _read(self) -> Iterator[Part]:
        """Handles all text except what may be the beginning of a tag."""
        while not self._draft:
            # Text can end a call, so that other tags are searched for in the rest.
            match = self._scanner.find(self._text)
            end = match.start() if match else len(self._text) - self._scanner.partial(self._text)
            if end:
                ready, self._text = self._text[:end], self._text[end:]
                if match and not self._is_call:
                    ready = self._scanner.without_partial(ready, is_end=False)
                yield from self._handle_text(ready)
            elif match:
                self._text = self._text[match.end() :]
                yield from self._handle_tag(match[0])
            else:
                return
        if self._text:
            self._draft.append(Piece(self._text))
            self._text = ""

    def _end_text(self, *, is_end: bool) -> Iterator[Part]:
        """Handles text that was held back, where no more text can complete a tag."""
        yield from self._read()
        text, self._text = self._scanner.without_partial(self._text, is_end=is_end), ""
        if text:
            yield from self._handle_text(text)
            yield from self._end_text(is_end=is_end)

    def _handle_text(self, text: str) -> Iterator[Part]:
        if self._is_call:
            yield from self._add_to_call(text)
        elif self.is_reasoning:
            yield MessageText(text, is_reasoning=True)
        else:
            yield from self._add_content(text)

    def _add_content(self, text: str) -> Iterator[Part]:
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
        # White space at the end is held back: it is dropped if only a call follows.
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._has_content = True
            yield MessageText(shown)

    # Tags

    def _handle_tag(self, tag: str) -> Iterator[Part]:
        """Handles a tag, special token or text; those that close nothing are dropped."""
        # Every tag ends a call that is open: nested calls do not exist.
        if self._is_call:
            yield from self._end_call(is_cut=False)
        if tag in (THINK, THINK_END):
            yield from self._end_draft()
            self.is_reasoning = tag == THINK
        elif tag == self._parsing.markup.call and self.is_reasoning:
            self._draft = [Piece(tag, is_mark=True)]
        elif tag == self._parsing.markup.call:
            self._begin_call()

    def _end_draft(self) -> Iterator[Part]:
        """Returns the calls in a thought that is complete as its text."""
        if self._draft:
            text = "".join(piece.text for piece in self._draft if self._is_shown(piece))
            self._draft = []
            yield MessageText(text, is_reasoning=True)

    def _is_shown(self, piece: Piece) -> bool:
        """Whether a piece of a draft is text: special tokens have none."""
        return not piece.is_mark or piece.text in self._parsing.spelled_tags

    def _begin_call(self) -> None:
        if not self._has_content:
            self._space = ""
        # Between two texts, the white space before the call stays, or else that after it.
        self._follows_call = bool(self._space) or not self._has_content
        self._is_call = self._has_tags = True

    # Calls

    def _add_to_call(self, text: str) -> Iterator[Part]:
        if self._body is None:
            self._body = body_for(text, self._types)
            if self._body is None:
                return
        for part in self._body.add(text):
            yield from self._call_part(part)
        if (rest := self._body.rest) is not None:
            self._is_call, self._body = False, None
            # Read again as content, before what follows it.
            self._text = rest.lstrip() + self._text

    def _end_call(self, *, is_cut: bool) -> Iterator[Part]:
        body, self._body, self._is_call = self._body, None, False
        for part in body.end(is_cut=is_cut) if body else ():
            yield from self._call_part(part)

    def _call_part(self, part: BodyPart) -> Iterator[Part]:
        self._num_begun += part.name is not None
        limit = self._parsing.max_calls
        if limit is not None and self._num_begun > limit:
            return
        # As at OpenAI, the first part of a call has its id and name, and later ones have arguments.
        if part.name is not None:
            yield CallPart(self._num_begun - 1, f"call_{secrets.token_hex(12)}", part.name)
        if part.arguments:
            yield CallPart(self._num_begun - 1, arguments=part.arguments)

    def _read_draft(self) -> Iterator[Part]:
        """Handles a call within a thought that was never closed."""
        draft, self._draft = self._draft, []
        # A separate parser, because the text around the calls is reasoning here and content elsewhere.
        inner = MessageParser(self._parsing)
        inner._num_begun = self._num_begun
        for piece in draft:
            for part in inner.add(piece):
                yield _as_reasoning(part)
        for part in inner.end(is_cut=False):
            yield _as_reasoning(part)
        self._num_begun = inner._num_begun


def _as_reasoning(part: Part) -> Part:
    return dataclasses.replace(part, is_reasoning=True) if isinstance(part, MessageText) else part
