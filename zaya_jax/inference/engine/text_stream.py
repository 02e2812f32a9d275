"""Incremental detokenization: the text of tokens as they arrive, cut before a stop string."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.inference.engine.sampling_params import EndTokens, as_token_ids

FinishReason = Literal["stop", "length"]
"""Why a text ended: at an end token or a stop string, or at its maximum number of tokens."""
UNKNOWN = "\ufffd"
"""Replacement character, which a tokenizer writes for bytes that are not, or not yet, a character."""
_MAX_CHARACTER_BYTES = 4
"""Maximum length of a UTF-8 character. A token has at least one byte: no character spans more tokens."""


class Piece(NamedTuple):
    """Characters of a text that later tokens cannot change."""

    text: str
    is_mark: bool = False
    """Whether this is the name of a special token, rather than text."""


class Detokenizer:
    """Returns the characters of tokens as soon as they are complete; together they are `tokenizer.decode`'s.

    It decodes a window of the newest tokens rather than all of them, which would take n^2 time for n tokens.
    The window begins with tokens whose text is known, because a tokenizer may decode a token differently at
    the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_known, self._known = 0, ""

    def add(self, token: int) -> str:
        """Returns the characters that a token completes, which may be none."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if len(text) <= len(self._known):
            return ""
        # A replacement character at the end may be the first bytes of a character: wait for the next token.
        if not text.endswith(UNKNOWN):
            return self._advance(text, len(self._window))
        # An untrained model may generate endless bytes that are not text: return those that no character can
        # need.
        if len(self._window) - self._num_known > 2 * _MAX_CHARACTER_BYTES:
            for cut in range(
                len(self._window) - _MAX_CHARACTER_BYTES, len(self._window) - 2 * _MAX_CHARACTER_BYTES, -1
            ):
                before = self._tokenizer.decode(self._window[:cut])
                if before + self._tokenizer.decode(self._window[cut:]) == text:  # no character spans the cut
                    return self._advance(before, cut)
        return ""

    def _advance(self, text: str, num_tokens: int) -> str:
        """Marks the first tokens of the window as known; returns the new part of their text."""
        new = text[len(self._known) :]
        # What was known so far leaves the window. The tokens whose text is returned now become its known
        # beginning.
        self._window = self._window[self._num_known :]
        self._num_known = num_tokens - self._num_known
        self._known = self._tokenizer.decode(self._window[: self._num_known])
        return new

    def flush(self) -> str:
        """Returns the rest at the end of a text: bytes that did not become a character."""
        text = self._tokenizer.decode(self._window)
        rest = text[len(self._known) :]
        self._num_known, self._known = len(self._window), text
        return rest


class StopFilter:
    """Cuts a text before a stop string, and holds back text that may be the beginning of one.

    Of several stop strings the one that is complete first ends the text.

    Attributes:
      found: the stop string that ended the text; None until one is found.
    """

    def __init__(self, stop: Sequence[str] = ()):
        """Starts an empty text. No stop string may be empty."""
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def add(self, text: str) -> str:
        """Returns the text up to a stop string, or up to what may become one."""
        text = self._held + text
        # Sort by the end of the match: the stop string that is complete first wins, not the one that begins
        # first.
        spans = [(first + len(stop), first, stop) for stop in self._stop if (first := text.find(stop)) >= 0]
        if spans:
            _, first, self.found = min(spans)
            self._held = ""
            return text[:first]
        end = len(text) - max((_partial_match(text, stop) for stop in self._stop), default=0)
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _partial_match(text: str, stop: str) -> int:
    """Returns the length of the longest end of a text that a stop string begins with."""
    # Not the whole stop string, which the search before this has not found.
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class TextWriter:
    """The text of one sequence of tokens, up to its end.

    Attributes:
      num_tokens: number of tokens so far, the end token included.
      finish_reason: why the text ended; None while it continues.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        limit: int,
        eos_id: EndTokens,
        stop: Sequence[str] = (),
        marks: Mapping[int, str] | None = None,
    ):
        """Starts an empty text.

        Args:
          tokenizer: tokenizer of the text.
          limit: maximum number of tokens.
          eos_id: token that ends the text, several of them, or None.
          stop: strings before which the text ends. A stop string does not span a mark.
          marks: names of special tokens that are returned, by token id; all others have no text.
        """
        self._detokenizer, self._filter = Detokenizer(tokenizer), StopFilter(stop)
        self._limit, self._ends, self._marks = limit, as_token_ids(eos_id), marks or {}
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._filter.found

    def add(self, token: int) -> list[Piece]:
        """Adds a token; returns the text that can be shown now."""
        assert self.finish_reason is None, "the text has ended"
        self.num_tokens += 1
        # Special tokens have no text, except for marks. A mark ends a possible stop string before it.
        is_end = token in self._ends
        if is_end:
            pieces = [self._flush()]
        elif token in self._marks:
            pieces = [self._flush(), Piece(self._marks[token], is_mark=True)]
        else:
            pieces = [Piece(self._filter.add(self._detokenizer.add(token)))]
        if self._filter.is_stopped or is_end:
            self.finish_reason = "stop"
        elif self.num_tokens == self._limit:
            # No token follows that could complete a stop string or a character.
            pieces.append(self._flush())
            self.finish_reason = "stop" if self._filter.is_stopped else "length"
        return [piece for piece in pieces if piece.text]

    def _flush(self) -> Piece:
        text = self._filter.add(self._detokenizer.flush())
        return Piece(text if self._filter.is_stopped else text + self._filter.flush())
