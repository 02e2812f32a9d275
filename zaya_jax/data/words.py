"""Many texts to tokens: cut where no token goes across, and each piece that was seen before is looked up.

A tokenizer.json splits a text into words and tokenises each, most of them words that it had a moment ago. A
place between two words at which any text can be cut is told by the characters beside it, so that the tokens
of the pieces are those of the text, one for one. That holds for the few ways to split that `find_cuts` knows;
of others nothing is assumed, and they are called with whole texts.
"""

import array
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_SLAB = 2**20
"""Characters of a text, about, that are cut at once: a book is not in memory as pieces."""
_MOST_BYTES, _PIECE_BYTES = 2**26, 200
"""Of memory for pieces, about, and what Python takes for each beside its characters."""

_NO_WORD = r"[\x00-/:-@\[-`{-\x7f]"  # ASCII but for letters and digits
_BEHIND_WORDS = rf"(?<=[A-Za-z0-9])(?={_NO_WORD})"
_AT_LAST_SPACES = r"(?= \S)"  # of several spaces the last one goes with the word behind it
_AT_SPACES_OF_WORDS = r"(?<=\S)(?= )|(?= [A-Za-z0-9])"  # but not with an added token behind it
_AT_FIRST_SPACES = r"(?<=[^ \u2581])(?= )"


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Where texts may be cut.

    Attributes:
      piece: what there is from one cut to the next, or to a later one; its matches are all of a text.
      place: a cut.
    """

    piece: re.Pattern[str]
    place: re.Pattern[str]


def _cuts(place: str, *usual: str) -> Cuts:
    """Cuts at places, given quick ways to match what is usually between two."""
    return Cuts(re.compile("|".join((*usual, rf"[\s\S]+?(?:{place}|\Z)"))), re.compile(place))


# Without backtracking, and bounded: a megabyte without a space must not be looked through at each letter.
_WORDS = _cuts(
    f"{_BEHIND_WORDS}|{_AT_LAST_SPACES}",
    rf" ?[!-/:-@\[-`{{-~]*+[A-Za-z0-9]++(?={_NO_WORD})",
    rf" ?\S{{1,32}}+{_AT_LAST_SPACES}",
)
_SPACED_WORDS = _cuts(_AT_SPACES_OF_WORDS, r" ?\S{1,32}+(?= )")
_MARKED_WORDS = _cuts(_AT_FIRST_SPACES, rf" *+[^ ]{{1,32}}+{_AT_FIRST_SPACES}")

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_SPLITS = frozenset({_CL100K % "", _CL100K % "{1,3}"})
"""Qwen 2's and Llama 3's."""
_SPACE_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


def find_cuts(fields: Mapping[str, Any]) -> Cuts | None:
    """Where any text may be cut so that its tokens stay what they are; None where that is not known.

    GPT-2, Llama 3 and Qwen 2 end a word behind its letters or digits, and begin one with the last space
    before it, whatever else stands around. Gemma splits nothing, and writes spaces as U+2581: where no token
    has that behind another letter, no merge goes across.

    Args:
      fields: of a tokenizer.json, whose special tokens are taken for text.
    """
    if fields.get("truncation") or fields.get("padding") or fields["model"].get("dropout"):
        return None
    if not _splits_into_words(fields):
        return _MARKED_WORDS if _merges_between_marks(fields) and _added_stay_whole(fields) else None
    if all(added["special"] for added in fields["added_tokens"]):
        return _WORDS
    return _SPACED_WORDS if _added_stay_whole(fields) else None


def _splits_into_words(fields: Mapping[str, Any]) -> bool:
    """Whether it splits as GPT-2, Llama 3 or Qwen 2 do, into words that its model has one by one."""
    # NFC puts no space, letter or digit of ASCII together with what is before it.
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
    """Whether it is a BPE over whole texts, of whose tokens none has a space behind a letter."""
    model = fields["model"]
    # A Split at spaces, as Gemma's file has one, finds none: they are marks by then.
    splits_nothing = fields["pre_tokenizer"] is None or (
        fields["pre_tokenizer"]["type"] == "Split" and fields["pre_tokenizer"]["pattern"] == {"String": " "}
    )
    if model["type"] != "BPE" or not splits_nothing or fields["normalizer"] != _SPACE_TO_MARK:
        return False
    # With ignore_merges a piece may be a token that the whole text, which is none, is not merged to.
    if model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    across = re.compile("[^\u2581]\u2581")
    return "\u2581" in model["vocab"] and not any(map(across.search, model["vocab"]))


def _added_stay_whole(fields: Mapping[str, Any]) -> bool:
    """Whether no added token goes across a cut at a space, takes the space, or looks at what is beside it."""
    return not any(
        " " in added["content"]
        or re.match("[A-Za-z0-9]", added["content"])
        or added["lstrip"]
        or added["rstrip"]
        or added["single_word"]
        for added in fields["added_tokens"]
    )


class WordMemory:
    """Tokens of the pieces of texts, each made once.

    Args:
      cuts: of the tokenizer.
      learn: gives the ids of each of several pieces.
    """

    def __init__(self, cuts: Cuts, learn: Callable[[Sequence[str]], Sequence[Sequence[int]]]):
        self._cuts, self._learn = cuts, learn
        self._known: dict[str, bytes] = {}
        self._bytes = 0

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, uint32."""
        return np.frombuffer(b"".join(map(self._encode_slab, self._slabs(text))), np.uint32)

    def _slabs(self, text: str) -> Iterator[str]:
        begin = 0
        while len(text) - begin > _SLAB and (cut := self._cuts.place.search(text, begin + _SLAB)):
            yield text[begin : cut.start()]
            begin = cut.start()
        yield text[begin:]

    def _encode_slab(self, text: str) -> bytes:
        pieces = self._cuts.piece.findall(text)
        # Before, and not behind: what this text has is there until it is looked up.
        if self._bytes > _MOST_BYTES:
            self._known.clear()
            self._bytes = 0
        if unknown := list(set(pieces).difference(self._known)):
            self._remember(unknown)
        return b"".join([self._known[piece] for piece in pieces])

    def _remember(self, pieces: Sequence[str]) -> None:
        for piece, ids in zip(pieces, self._learn(pieces), strict=True):
            self._known[piece] = array.array("I", ids).tobytes()
            self._bytes += _PIECE_BYTES + len(piece)
