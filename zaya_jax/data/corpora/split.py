"""Decides which texts are held out, by a hash of their bytes, so that every corpus holds out the same ones.

If the hash leaves a split empty, as it may with one or a few texts, texts are cut in two instead: users often
bring a single file, and a run needs held-out text for its evaluation.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Literal

from zaya_jax.errors import UserError

# The hash of a text modulo 100, and the hash.
_Key = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitRule:
    """The rule that assigns texts to the training or the held-out split.

    Attributes:
      percent: approximate share of held-out text in percent.
      below: texts with a smaller key are held out.
      cut: "line" or "character": texts are cut, and the part after the cut is held out. "line" cuts texts of
        several lines at a line's end and trains on all others; "character" cuts every text. None: whole texts
        are held out.
    """

    percent: int
    below: _Key
    cut: Literal["line", "character"] | None = None

    def split_of(self, raw: bytes) -> str:
        """The split of a whole text."""
        return "validation" if _key(raw) < self.below else "train"

    def divide(self, raw: bytes) -> list[tuple[str, bytes]]:
        """The parts of a text, each with its split."""
        if self.cut is None:
            return [(self.split_of(raw), raw)]
        cut = _line_cut(raw, self.percent) if self.cut == "line" else _character_cut(raw, self.percent)
        if cut is None:
            return [("train", raw)]
        return [("train", raw[:cut]), ("validation", raw[cut:])]

    def describe(self) -> str:
        """What differs from the usual split by hash, for the manifest; "" if nothing does."""
        if self.cut is not None:
            where = "at a line's end" if self.cut == "line" else "within its line"
            return f"each text is cut {where}, and its last {self.percent}% are held out"
        if self.below != (self.percent, 0):
            return "by its hash one text is moved to the other side, which had none"
        return ""


def by_hash(percent: int) -> SplitRule:
    """The usual rule: the hash of a text decides, independent of all other texts."""
    return SplitRule(percent=percent, below=(percent, 0))


def choose_split_rule(texts: Iterable[bytes], percent: int) -> SplitRule:
    """Returns a rule that leaves neither split empty. Stops reading as soon as the rule is known.

    The hash decides if it leaves no split empty. Otherwise texts of several lines are cut. If there are none,
    the text with the smallest key is held out, or the one with the largest key is trained on. A single line
    is cut between two characters.

    Args:
      texts: all texts, non-empty UTF-8.
      percent: share of held-out text in percent, from 1 to 99.

    Raises:
      UserError: if the only text is a single character.
    """
    plain = by_hash(percent)
    held_out: set[bool] = set()
    keys: list[_Key] = []
    has_lines = has_characters = False
    for raw in texts:
        key = _key(raw)
        held_out.add(key < plain.below)
        if len(held_out) == 2:
            return plain
        keys = [min(key, *keys), max(key, *keys)] if keys else [key, key]
        has_lines = has_lines or _line_cut(raw, percent) is not None
        has_characters = has_characters or _character_cut(raw, percent) is not None
    # No text at all: the caller reports it, with the reasons why each file was skipped.
    if not keys:
        return plain
    if has_lines:
        return dataclasses.replace(plain, cut="line")
    lowest, highest = keys
    if lowest != highest:
        # Move the threshold just enough for one text, so that few other corpora would split it otherwise.
        bucket, hashed = lowest
        return dataclasses.replace(plain, below=highest if held_out == {True} else (bucket, hashed + 1))
    if not has_characters:
        raise UserError("the only text is a single character; both splits must have some text")
    return dataclasses.replace(plain, cut="character")


def _key(raw: bytes) -> _Key:
    # Hash the content and not the path: two overlapping sources know the same file under different paths.
    hashed = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest())
    # A larger percentage extends the held-out set and never exchanges its members.
    return hashed % 100, hashed


def _line_cut(raw: bytes, percent: int) -> int | None:
    """The start of the line, after the first, that is closest to the start of the held-out share."""
    target = len(raw) * (100 - percent) // 100
    before = raw.rfind(b"\n", 0, target) + 1
    after = raw.find(b"\n", target) + 1
    cuts = [cut for cut in (before, after) if 0 < cut < len(raw)]
    return min(cuts, key=lambda cut: abs(cut - target), default=None)


def _character_cut(raw: bytes, percent: int) -> int | None:
    """The start of a character, after the first, next to the start of the held-out share."""
    target = max(1, len(raw) * (100 - percent) // 100)
    # A UTF-8 character has at most four bytes; continuation bytes are 0b10xxxxxx.
    cuts = [*range(target, min(target + 4, len(raw))), *range(target - 1, max(0, target - 5), -1)]
    return next((cut for cut in cuts if raw[cut] & 0xC0 != 0x80), None)
