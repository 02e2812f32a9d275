"""Converts a rendered chat to tokens: special tokens only where the template wrote them, else plain text."""

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zaya_jax.data.chats.templates.jinja_environment import RenderedChat
from zaya_jax.data.chats.templates.traced_text import TEMPLATE, USER
from zaya_jax.data.tokenizers.tokenizer import Tokenizer

# Number of template texts whose special tokens are cached; many chats have the same turns.
_REMEMBERED = 4096
# Placeholder for text that a user wrote.
_HARMLESS = "a"


class PlacedToken(NamedTuple):
    """A token and the characters that it represents.

    Attributes:
      token: token id.
      first: first character.
      last: character after the last.
    """

    token: int
    first: int
    last: int


class ChatEncoder:
    """Encodes rendered chats.

    Attributes:
      tokenizer: tokenizer of the chats.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Creates an encoder for a tokenizer."""
        self.tokenizer = tokenizer
        self._specials_in = functools.lru_cache(_REMEMBERED)(self._find_specials)

    def encode(self, rendered: RenderedChat) -> list[tuple[int, int, int]]:
        """Returns (id, first character, character after the last) for each token of a chat.

        The special tokens of a chat are those that remain if all user text is replaced by harmless words.
        Usually the tokenizer finds exactly these in the whole text, and its tokens are used. Otherwise a user
        has written the name of a special token, or characters that hide one. The text is then cut at the
        special tokens, and the parts between them are encoded like documents.
        """
        text = rendered.text
        written = list(self._written_by_template(rendered))
        # The fast path: one call of the tokenizer for the whole chat.
        whole = self.tokenizer.encode_with_places(text)
        in_text = self.specials_among(whole, text)
        origins = b"".join(bytes((origin,)) * size for size, origin in rendered.runs)
        if {_core(each, text) for each in written} <= {_core(each, text) for each in in_text} and all(
            _is_template(origins, _core(each, text)) for each in in_text
        ):
            return whole
        return list(self._cut(rendered, written))

    def _written_by_template(self, rendered: RenderedChat) -> Iterator[PlacedToken]:
        """Yields the special tokens that a chat has independent of user text, at their positions in it."""
        pieces: list[str] = []
        origins: list[bytes] = []
        # Start of each piece: in the template's text with placeholders, and in the chat.
        starts: list[int] = []
        chat_starts: list[int] = []
        position = start = 0
        # Consecutive runs of one author form a piece.
        for is_user, group in itertools.groupby(rendered.runs, key=lambda run: run[1] == USER):
            runs = list(group)
            size = sum(length for length, _ in runs)
            piece = _HARMLESS if is_user else rendered.text[position : position + size]
            pieces.append(piece)
            origins += [bytes((USER,)) * len(piece)] if is_user else [bytes((o,)) * n for n, o in runs]
            starts.append(start)
            chat_starts.append(position)
            position, start = position + size, start + len(piece)
        known = b"".join(origins)
        # Cached by the template's text, which is the same for chats with the same roles.
        for special in self._specials_in("".join(pieces)):
            if _is_template(known, special):
                number = bisect.bisect_right(starts, special[1]) - 1
                offset = chat_starts[number] - starts[number]
                yield PlacedToken(special[0], special[1] + offset, special[2] + offset)

    def specials_among(self, tokens: Iterable[tuple[int, int, int]], text: str) -> list[PlacedToken]:
        """Returns those tokens of a text that are special tokens.

        Args:
          tokens: (id, first character, character after the last) of each token.
          text: the text.
        """
        tokenizer = self.tokenizer
        specials = (PlacedToken(*each) for each in tokens if each[0] in tokenizer.special_names)
        # The unknown token represents words that the tokenizer lacks, unless the text spells its name.
        return [
            each
            for each in specials
            if each.token != tokenizer.unknown_id
            or text[each.first : each.last].strip() in tokenizer.special_ids
        ]

    def _find_specials(self, text: str) -> tuple[tuple[int, int, int], ...]:
        return tuple(self.specials_among(self.tokenizer.encode_with_places(text), text))

    def _cut(self, rendered: RenderedChat, specials: Sequence[PlacedToken]) -> Iterator[PlacedToken]:
        # Also cut where a generation block starts or ends, so that no token is only partly learned.
        delimiters = sorted({place for span in rendered.generated for place in span})
        position = 0
        for special in (*specials, None):
            last = len(rendered.text) if special is None else special.first
            cuts = [position, *(each for each in delimiters if position < each < last), last]
            for begin, end in itertools.pairwise(cuts):
                for token in self._encode_text(rendered.text[begin:end], is_first=begin == 0):
                    yield PlacedToken(token, begin, end)
            if special is not None:
                yield special
                position = special.last

    def _encode_text(self, text: str, *, is_first: bool) -> list[int]:
        """Encodes text between special tokens, without the space that some tokenizers put before a text."""
        if is_first or self._later("a") == self.tokenizer.encode("a"):
            return self.tokenizer.encode(text)
        return self._later(text)

    def _later(self, text: str) -> list[int]:
        """Encodes a text that is not the first of its chat."""
        # After a newline, a tokenizer adds no space. The tokens of the newline are then removed again.
        newline, both = self.tokenizer.encode("\n"), self.tokenizer.encode("\n" + text)
        return both[len(newline) :] if both[: len(newline)] == newline else self.tokenizer.encode(text)


def _core(token: PlacedToken, text: str) -> tuple[int, int, int]:
    """A token and its position without spaces, because some special tokens include those around them."""
    name = text[token.first : token.last]
    first = token.first + len(name) - len(name.lstrip())
    return token.token, first, first + len(name.strip())


def _is_template(origins: bytes, token: tuple[int, int, int]) -> bool:
    """Whether the template wrote a token's name. A number that it computes is not a name by itself."""
    # At least one character must be the template's literal, the rest may be numbers.
    name = origins[token[1] : token[2]]
    return USER not in name and TEMPLATE in name
