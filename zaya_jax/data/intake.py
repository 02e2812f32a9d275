"""What a source has, sorted into texts for a corpus and what is left out of it."""

import collections
import hashlib
from collections.abc import Iterator
from typing import Literal, get_args

from zaya_jax.data.division import Division
from zaya_jax.data.documents import Broken, Document
from zaya_jax.data.left_out import LeftOut
from zaya_jax.data.sources import TextSource

OnBad = Literal["stop", "skip"]
ON_BAD: tuple[str, ...] = get_args(OnBad)
"""What may be done about a record that is no text."""


class Intake:
    """Reads a source once.

    Attributes:
      left_out: what was no text, as far as it has been read; complete when `texts` is at its end.
      skipped: files and records that are empty or not UTF-8, by the split that they would be in.
    """

    def __init__(self, source: TextSource, division: Division, *, on_bad: OnBad, deduplicate: bool):
        self.left_out: list[LeftOut] = [*source.left_out]
        self.skipped: collections.Counter[str] = collections.Counter()
        self._source, self._division, self._on_bad = source, division, on_bad
        # 16 bytes a text, about 100 with what Python takes for them: all that grows with a source.
        self._seen: set[bytes] | None = set() if deduplicate else None

    def texts(self) -> Iterator[Document]:
        """The documents that are text.

        Raises:
          ValueError: at the first broken record, unless such are skipped.
        """
        for each in self._source:
            if isinstance(each, Broken):
                self._refuse(each)
            elif (reason := self._why_not(each)) is None:
                yield each
            else:
                self._leave_out(each, reason)

    def _why_not(self, document: Document) -> LeftOut | None:
        if (trouble := _trouble_of(document)) is not None:
            return trouble
        if self._seen is not None:
            digest = hashlib.blake2b(document.raw, digest_size=16).digest()
            if digest in self._seen:
                return LeftOut(document.path, "a duplicate", record=document.record)
            self._seen.add(digest)
        return None

    def _leave_out(self, document: Document, reason: LeftOut) -> None:
        if reason.byte is not None and document.record is not None:
            self._refuse(Broken(reason))
        else:
            self.left_out.append(reason)
        if reason.reason != "a duplicate":
            self.skipped[self._division.side(document.raw)] += 1

    def _refuse(self, broken: Broken) -> None:
        if self._on_bad == "stop":
            raise ValueError(f"{self._source.root}: {broken}; --on-bad skip leaves out what is no text")
        self.left_out.append(broken.left_out)


def _trouble_of(document: Document) -> LeftOut | None:
    if not document.raw:
        return LeftOut(document.path, "empty", record=document.record)
    try:
        document.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return LeftOut(document.path, "not UTF-8", byte=error.start, record=document.record)
    return None
