"""One generated text: what each token adds to it, and whether that is reasoning, content or a tool call."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from zaya_jax.data.chats.templates.template import THINK
from zaya_jax.inference.engine.sequence import NewToken
from zaya_jax.inference.engine.text_stream import FinishReason, Piece, TextWriter
from zaya_jax.inference.tool_calls.message_parser import (
    CallPart,
    MessageParser,
    MessageText,
    Part,
    join_calls,
)
from zaya_jax.serving.api.request import CompletionRequest
from zaya_jax.serving.loaded_model import LoadedModel

ResponseFinishReason = FinishReason | Literal["tool_calls"]
"""Why a text ended: also with tool calls, after which the model waits for their results."""


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token of a text.

    Attributes:
      new: token with its log-probabilities and experts, from the engine.
      text: text that became known with this token. It is empty for a token that is part of a character or may
        begin a stop string, and for one of a tool call. The texts of all tokens together are the whole text.
      offset: number of characters that precede it in the text.
      is_reasoning: whether it is part of the reasoning, mark included.
    """

    new: NewToken
    text: str
    offset: int
    is_reasoning: bool = False


@dataclasses.dataclass(frozen=True)
class Delta:
    """A new part of a text.

    Attributes:
      index: number of the text in its request.
      content: new characters of the content.
      reasoning: new characters of the reasoning.
      tokens: new tokens.
      calls: new parts of tool calls.
      finish_reason: why the text ended; None while it continues.
      stop_string: the string of `stop` that ended the text; None if none did.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tokens: tuple[AddedToken, ...] = ()
    calls: tuple[CallPart, ...] = ()
    finish_reason: ResponseFinishReason | None = None
    stop_string: str | None = None


def join(deltas: Sequence[Delta]) -> Delta:
    """Joins successive parts of one text."""
    return Delta(
        deltas[0].index,
        "".join(each.content for each in deltas),
        "".join(each.reasoning for each in deltas),
        tuple(token for each in deltas for token in each.tokens),
        join_calls([part for each in deltas for part in each.calls]),
        deltas[-1].finish_reason,
        deltas[-1].stop_string,
    )


def split_calls(delta: Delta) -> list[Delta]:
    """Splits a part of a text for a stream: each call and the finish reason have a chunk, as at OpenAI.

    Clients read only the first call of a chunk, or miss the end of a call that comes with the finish reason.
    """
    if not delta.calls:
        return [delta]
    first = dataclasses.replace(delta, calls=delta.calls[:1], finish_reason=None)
    others = [Delta(delta.index, calls=(call,)) for call in delta.calls[1:]]
    last = [Delta(delta.index, finish_reason=delta.finish_reason)] if delta.finish_reason else []
    return [first, *others, *last]


class ChoiceText:
    """A text while it is generated.

    Attributes:
      index: number of the text in its request.
      num_tokens: number of tokens so far.
      finish_reason: why the text ended; None while it continues.
    """

    def __init__(self, model: LoadedModel, request: CompletionRequest, index: int):
        """Starts an empty text.

        Args:
          model: model with the tokenizer.
          request: the request.
          index: number of the text in the request.
        """
        # Only chats have reasoning. In a completion, its marks are special tokens like any other.
        chat_format = model.chat_format if request.is_chat else None
        self._think_marks = chat_format.think_marks if chat_format else {}
        special_names = {} if request.skips_specials else model.tokenizer.special_names
        parsing = request.tool_parsing
        self._writer = TextWriter(
            model.tokenizer,
            limit=request.max_new_tokens[index // request.num_choices],
            eos_id=request.end_ids,
            stop=request.stop,
            marks={**special_names, **self._think_marks, **(parsing.marks if parsing else {})},
        )
        self.index = index
        self._is_reasoning = bool(request.reasoning_start)
        # Without tools no text is searched for calls: it may describe their markup.
        self._parser = MessageParser(parsing, is_reasoning=self._is_reasoning) if parsing else None
        # The mark itself is not part of the reasoning that a client sees.
        self._reasoning_start = request.reasoning_start.removeprefix(THINK)
        self._num_characters = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, including the one that ended the text."""
        return self._writer.num_tokens

    @property
    def finish_reason(self) -> ResponseFinishReason | None:
        """Why the text ended; None while it continues."""
        reason = self._writer.finish_reason
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if reason == "stop" and has_calls else reason

    def begin(self) -> Delta:
        """Returns the beginning of the reasoning that the prompt ends with; the model did not generate it."""
        return Delta(self.index, reasoning=self._reasoning_start)

    def add(self, new: NewToken) -> Delta:
        """Adds a token, and returns what it adds to the text."""
        pieces = self._writer.add(new.token)
        parts = list(self._parts(pieces) if self._parser is None else self._parse(self._parser, pieces))
        texts = [part for part in parts if isinstance(part, MessageText)]
        content, reasoning = (
            "".join(part.text for part in texts if part.is_reasoning == is_reasoning)
            for is_reasoning in (False, True)
        )
        is_reasoning = self._parser.is_reasoning if self._parser is not None else self._is_reasoning
        token = AddedToken(new, reasoning + content, self._num_characters, is_reasoning)
        self._num_characters += len(token.text)
        calls = join_calls([part for part in parts if isinstance(part, CallPart)])
        ending = self.finish_reason, self._writer.stop_string
        return Delta(self.index, content, reasoning, (token,), calls, *ending)

    def _parts(self, pieces: Sequence[Piece]) -> Iterator[Part]:
        """Splits a text without tool calls into reasoning and content."""
        for piece in pieces:
            # The marks switch between reasoning and content, and are part of neither.
            if piece.is_mark and piece.text in self._think_marks.values():
                self._is_reasoning = piece.text == THINK
            else:
                yield MessageText(piece.text, self._is_reasoning)

    def _parse(self, parser: MessageParser, pieces: Sequence[Piece]) -> Iterator[Part]:
        for piece in pieces:
            yield from parser.add(piece)
        # What was held back becomes text or a call only now.
        if (reason := self._writer.finish_reason) is not None:
            yield from parser.end(is_cut=reason == "length")
