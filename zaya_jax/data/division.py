"""Which texts are held out: a rule on what is in them, so that it is the same in every corpus.

Where the rule leaves a side without any, as it does with one text or a few, texts are cut in two: what a user
brings is often a single file, and a run must have something to be judged by.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Literal

_Key = tuple[int, int]
"""A text's hash modulo 100, and the hash."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """The rule that divides texts into training and held-out ones.

    Attributes:
      percent: share that is held out, about.
      below: a text whose key is smaller is held out.
      cut: texts are cut instead, and what is behind the cut is held out: "line" cuts those of several lines
        and trains on the others, "character" all.
    """

    percent: int
    below: _Key
    cut: Literal["line", "character"] | None = None

    def side(self, raw: bytes) -> str:
        """The split of a whole text."""
        return "validation" if _key(raw) < self.below else "train"

    def divide(self, raw: bytes) -> list[tuple[str, bytes]]:
        """The pieces of a text, each with its split."""
        if self.cut is None:
            return [(self.side(raw), raw)]
        place = _line_border(raw, self.percent) if self.cut == "line" else _border(raw, self.percent)
        if place is None:
            return [("train", raw)]
        return [("train", raw[:place]), ("validation", raw[place:])]

    def describe(self) -> str:
        """What is out of the ordinary with it, in a sentence's end; "" otherwise."""
        if self.cut is not None:
            where = "at a line's end" if self.cut == "line" else "within its line"
            return f"each text is cut {where}, and its last {self.percent}% are held out"
        if self.below != (self.percent, 0):
            return "by its hash one text is moved to the other side, which had none"
        return ""


def by_hash(percent: int) -> Division:
    """The rule for many texts: by its hash each is held out or not, whatever lies beside it."""
    return Division(percent=percent, below=(percent, 0))


def choose_division(texts: Iterable[bytes], percent: int) -> Division:
    """The rule by which both splits have text; reads no further than it takes to know.

    By hash, if that leaves no side empty. Else texts of several lines are cut. Without such, the text with
    the smallest key is held out, or with the largest is trained on; one single line is cut within.

    Args:
      texts: all of them, UTF-8 and not empty.
      percent: share that is held out, from 1 to 99.

    Raises:
      ValueError: when all that there is is one character.
    """
    plain = by_hash(percent)
    sides: set[bool] = set()
    keys: list[_Key] = []
    has_lines = has_characters = False
    for raw in texts:
        key = _key(raw)
        sides.add(key < plain.below)
        if len(sides) == 2:
            return plain
        keys = [min(key, *keys), max(key, *keys)] if keys else [key, key]
        has_lines = has_lines or _line_border(raw, percent) is not None
        has_characters = has_characters or _border(raw, percent) is not None
    if not keys:
        return plain
    if has_lines:
        return dataclasses.replace(plain, cut="line")
    lowest, highest = keys
    if lowest != highest:
        bucket, hashed = lowest
        return dataclasses.replace(plain, below=highest if sides == {True} else (bucket, hashed + 1))
    if not has_characters:
        raise ValueError("all the text there is is one character; both splits must have some")
    return dataclasses.replace(plain, cut="character")


def _key(raw: bytes) -> _Key:
    # Not of the path: a file that two overlapping sources share has two of them.
    hashed = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest())
    return hashed % 100, hashed


def _line_border(raw: bytes, percent: int) -> int | None:
    """Where a line begins within a text, nearest to where the held-out share does."""
    wanted = len(raw) * (100 - percent) // 100
    before = raw.rfind(b"\n", 0, wanted) + 1
    behind = raw.find(b"\n", wanted) + 1
    places = [place for place in (before, behind) if 0 < place < len(raw)]
    return min(places, key=lambda place: abs(place - wanted), default=None)


def _border(raw: bytes, percent: int) -> int | None:
    """Where a character begins within a text, by the held-out share."""
    wanted = max(1, len(raw) * (100 - percent) // 100)
    places = [*range(wanted, min(wanted + 4, len(raw))), *range(wanted - 1, max(0, wanted - 5), -1)]
    return next((place for place in places if raw[place] & 0xC0 != 0x80), None)
