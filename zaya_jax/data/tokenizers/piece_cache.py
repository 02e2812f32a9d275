"""Fast tokenization of many texts: texts are cut into pieces, and the tokens of each piece are cached.

A tokenizer.json splits a text into words and tokenizes each, although most words occurred just before. At
some places between words, which the neighboring characters identify, any text can be cut so that the tokens
of the pieces are exactly the tokens of the text. `find_cuts` knows such places for a few common ways of
splitting. For all others nothing is assumed, and whole texts are tokenized.
"""

import array
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Approximate number of characters that are cut into pieces at once; bounds the memory for a long text.
SLAB_CHARACTERS = 2**20
# Approximate memory for cached pieces in bytes, and Python's overhead per piece.
MAX_CACHE_BYTES, _PIECE_BYTES = 2**26, 200

_NO_WORD = r"[\x00-/:-@\[-`{-\x7f]"  # ASCII except letters and digits
_AFTER_WORDS = rf"(?<=[A-Za-z0-9])(?={_NO_WORD})"
_AT_LAST_SPACES = r"(?= \S)"  # the last of several spaces belongs to the following word
_AT_SPACES_OF_WORDS = r"(?<=\S)(?= )|(?= [A-Za-z0-9])"  # but not before an added token
_AT_FIRST_SPACES = r"(?<=[^ \u2581])(?= )"


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Places where texts may be cut.

    Attributes:
      piece: matches a piece, from one cut to the next or to a later one; the matches cover a text.
      place: matches a cut, with zero width.
    """

    piece: re.Pattern[str]
    place: re.Pattern[str]


def _cuts(place: str, *usual: str) -> Cuts:
    """Cuts at places, with fast patterns for the usual pieces between two of them."""
    return Cuts(re.compile("|".join((*usual, rf"[\s\S]+?(?:{place}|\Z)"))), re.compile(place))


# Possessive and bounded repetitions: a megabyte without a space must not be scanned again from each letter.
WORDS = _cuts(
    f"{_AFTER_WORDS}|{_AT_LAST_SPACES}",
    rf" ?[!-/:-@\[-`{{-~]*+[A-Za-z0-9]++(?={_NO_WORD})",
    rf" ?\S{{1,32}}+{_AT_LAST_SPACES}",
)
SPACED_WORDS = _cuts(_AT_SPACES_OF_WORDS, r" ?\S{1,32}+(?= )")
MARKED_WORDS = _cuts(_AT_FIRST_SPACES, rf" *+[^ ]{{1,32}}+{_AT_FIRST_SPACES}")

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The splitting patterns of Qwen 2 and Llama 3.
_KNOWN_SPLITS = frozenset({_CL100K % "", _CL100K % "{1,3}"})
_SPACE_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


def find_cuts(fields: Mapping[str, Any]) -> Cuts | None:
    """Finds the places where any text may be cut without changing its tokens; None if they are unknown.

    GPT-2, Llama 3 and Qwen 2 end a word after its letters or digits, and start one with the last space before
    it, whatever surrounds it. Gemma does not split, but writes spaces as U+2581; if no token contains that
    after another character, no merge crosses it.

    Args:
      fields: content of a tokenizer.json, whose special tokens are treated as text.
    """
    if fields.get("truncation") or fields.get("padding") or fields["model"].get("dropout"):
        return None
    if not _splits_into_words(fields):
        return MARKED_WORDS if _merges_between_marks(fields) and _added_stay_whole(fields) else None
    if all(added["special"] for added in fields["added_tokens"]):
        return WORDS
    return SPACED_WORDS if _added_stay_whole(fields) else None


def _splits_into_words(fields: Mapping[str, Any]) -> bool:
    """Whether it splits as GPT-2, Llama 3 or Qwen 2 do, into words that the model tokenizes one by one."""
    # NFC never combines an ASCII space, letter or digit with the character before it.
    if (fields["normalizer"] or {"type": "NFC"}) != {"type": "NFC"}:
        return False
    match fields["pre_tokenizer"]:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return regex in _KNOWN_SPLITS
        case _:
            return False


def _merges_between_marks(fields: Mapping[str, Any]) -> bool:
    """Whether it is a BPE over whole texts in which no token contains a space after another character."""
    model = fields["model"]
    # Gemma's file has a Split at spaces, which matches nothing: spaces are already replaced by marks.
    splits_nothing = fields["pre_tokenizer"] is None or (
        fields["pre_tokenizer"]["type"] == "Split" and fields["pre_tokenizer"]["pattern"] == {"String": " "}
    )
    if model["type"] != "BPE" or not splits_nothing or fields["normalizer"] != _SPACE_TO_MARK:
        return False
    # With ignore_merges, a piece may be a token, although merging the whole text would not produce it.
    if model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    across = re.compile("[^\u2581]\u2581")
    return "\u2581" in model["vocab"] and not any(map(across.search, model["vocab"]))


def _added_stay_whole(fields: Mapping[str, Any]) -> bool:
    """Whether no added token crosses a cut at a space, consumes the space, or depends on its neighbors."""
    return not any(
        " " in added["content"]
        or re.match("[A-Za-z0-9]", added["content"])
        or added["lstrip"]
        or added["rstrip"]
        or added["single_word"]
        for added in fields["added_tokens"]
    )


class PieceCache:
    """Tokenizes texts by their pieces, and caches the tokens of each piece.

    Args:
      cuts: cuts of the tokenizer.
      tokenize: returns the token ids of each of several pieces.
    """

    def __init__(self, cuts: Cuts, tokenize: Callable[[Sequence[str]], Sequence[Sequence[int]]]):
        self._cuts, self._tokenize = cuts, tokenize
        self._known: dict[str, bytes] = {}
        self._bytes = 0

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, uint32."""
        return np.frombuffer(b"".join(map(self._encode_slab, self._slabs(text))), np.uint32)

    def _slabs(self, text: str) -> Iterator[str]:
        begin = 0
        while len(text) - begin > SLAB_CHARACTERS and (
            cut := self._cuts.place.search(text, begin + SLAB_CHARACTERS)
        ):
            yield text[begin : cut.start()]
            begin = cut.start()
        yield text[begin:]

    def _encode_slab(self, text: str) -> bytes:
        pieces = self._cuts.piece.findall(text)
        # Clear before adding pieces and not after, so that all pieces of this text stay in the cache.
        if self._bytes > MAX_CACHE_BYTES:
            self._known.clear()
            self._bytes = 0
        if unknown := list(set(pieces).difference(self._known)):
            self._add(unknown)
        return b"".join([self._known[piece] for piece in pieces])

    def _add(self, pieces: Sequence[str]) -> None:
        for piece, ids in zip(pieces, self._tokenize(pieces), strict=True):
            self._known[piece] = array.array("I", ids).tobytes()
            self._bytes += _PIECE_BYTES + len(piece)
