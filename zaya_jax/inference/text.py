"""Text of tokens that come one by one: characters when they are whole, and an end before a stop string."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from zaya_jax.data.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]
"""What ended a text: its end token or a stop string, or that it may have no more tokens."""
UNKNOWN = "\ufffd"
"""What a tokenizer writes for bytes that are no character, or not yet."""
_MOST_BYTES = 4
"""Of a character in UTF-8; a token has one at least, so that no character spans more tokens."""


class Piece(NamedTuple):
    """Some characters of a text that are known not to change."""

    text: str
    is_mark: bool = False
    """Whether it is a special token's name, and not what the text says."""


class Detokenizer:
    """Gives the characters of tokens as soon as they are whole; together they are `tokenizer.decode`'s.

    Decodes a window of the newest tokens and not all of them, or a text of n tokens would take n^2. It
    begins with tokens whose text is known: a tokenizer may write a token otherwise at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_known, self._known = 0, ""

    def add(self, token: int) -> str:
        """The characters that a token makes whole, which may be none."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if len(text) <= len(self._known):
            return ""
        if not text.endswith(UNKNOWN):
            return self._give(text, len(self._window))
        # Bytes without end that are no text, as an untrained network writes them: they need not all wait.
        if len(self._window) - self._num_known > 2 * _MOST_BYTES:
            for cut in range(len(self._window) - _MOST_BYTES, len(self._window) - 2 * _MOST_BYTES, -1):
                before = self._tokenizer.decode(self._window[:cut])
                if before + self._tokenizer.decode(self._window[cut:]) == text:  # no character lies across
                    return self._give(before, cut)
        return ""

    def _give(self, text: str, num_tokens: int) -> str:
        """What is new in the text of so many tokens of the window, which are known from now on."""
        new = text[len(self._known) :]
        self._window = self._window[self._num_known :]
        self._num_known = num_tokens - self._num_known
        self._known = self._tokenizer.decode(self._window[: self._num_known])
        return new

    def flush(self) -> str:
        """What is left at the end of a text: bytes that became no character."""
        text = self._tokenizer.decode(self._window)
        left = text[len(self._known) :]
        self._num_known, self._known = len(self._window), text
        return left


class StopFilter:
    """Holds back what may be the beginning of a stop string; of several, that which is whole first ends.

    Attributes:
      found: whether a stop string came.
    """

    def __init__(self, stop: Sequence[str] = ()):
        """Checks the stop strings.

        Raises:
          ValueError: for one without a character.
        """
        if "" in stop:
            raise ValueError('a stop string is ""; it must have at least one character')
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What can be given of the text so far: up to a stop string, or to what may become one."""
        text = self._held + text
        spans = [(first + len(stop), first) for stop in self._stop if (first := text.find(stop)) >= 0]
        if spans:
            self.found, self._held = True, ""
            return text[: min(spans)[1]]
        given = len(text) - max((_num_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[given:]
        return text[:given]

    def flush(self) -> str:
        """What was held back: no text follows that could make a stop string of it."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the first ones of a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Writer:
    """One text as its tokens come, up to its end.

    Attributes:
      num_tokens: that came, with that which ended it.
      finish_reason: None while it goes on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        limit: int,
        eos_id: int | None,
        stop: Sequence[str] = (),
        marks: Mapping[int, str] | None = None,
    ):
        """Begins a text.

        Args:
          tokenizer: of its tokens.
          limit: tokens that it may have.
          eos_id: the token that ends it; None for none.
          stop: strings before which it ends. None spans a mark.
          marks: special tokens whose names are given; all others have no text.

        Raises:
          ValueError: for a stop string without a character.
        """
        self._detokenizer, self._filter = Detokenizer(tokenizer), StopFilter(stop)
        self._limit, self._eos_id, self._marks = limit, eos_id, marks or {}
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def add(self, token: int) -> list[Piece]:
        """What can be shown once this token is known."""
        assert self.finish_reason is None, "the text has ended"
        self.num_tokens += 1
        is_end = token == self._eos_id
        if is_end:
            pieces = [self._flush()]
        elif token in self._marks:
            pieces = [self._flush(), Piece(self._marks[token], is_mark=True)]
        else:
            pieces = [Piece(self._filter.add(self._detokenizer.add(token)))]
        if self._filter.found or is_end:
            self.finish_reason = "stop"
        elif self.num_tokens == self._limit:
            pieces.append(self._flush())
            self.finish_reason = "stop" if self._filter.found else "length"
        return [piece for piece in pieces if piece.text]

    def _flush(self) -> Piece:
        text = self._filter.add(self._detokenizer.flush())
        return Piece(text if self._filter.found else text + self._filter.flush())
