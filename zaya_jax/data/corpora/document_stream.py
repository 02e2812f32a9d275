"""Reads a source once, and separates its documents from files and records that are skipped."""

import collections
import hashlib
from collections.abc import Iterator
from typing import Literal, get_args

from zaya_jax.data.corpora.split import SplitRule
from zaya_jax.data.sources.documents import BrokenRecord, Document
from zaya_jax.data.sources.skipped import Skipped
from zaya_jax.data.sources.text_sources import TextSource
from zaya_jax.errors import UserError

OnBad = Literal["stop", "skip"]
ON_BAD: tuple[str, ...] = get_args(OnBad)
"""What to do with a record that is not valid text."""
_DUPLICATE = "a duplicate"


class DocumentStream:
    """The valid documents of a source.

    Attributes:
      skipped: files and records that are not valid text, as far as the source has been read.
      num_skipped: number of empty and non-UTF-8 documents by the split that their bytes would be in.
    """

    def __init__(self, source: TextSource, split_rule: SplitRule, *, on_bad: OnBad, deduplicate: bool):
        self.skipped: list[Skipped] = [*source.skipped]
        self.num_skipped: collections.Counter[str] = collections.Counter()
        self._source, self._split_rule, self._on_bad = source, split_rule, on_bad
        # A 16-byte digest per text, about 100 bytes in Python: the only memory that grows with a source.
        self._digests: set[bytes] | None = set() if deduplicate else None

    def documents(self) -> Iterator[Document]:
        """Yields the documents that are valid text.

        Raises:
          UserError: at the first broken record, if `on_bad` is "stop".
        """
        # Every document is checked here, in one process, so that all workers receive valid UTF-8.
        for each in self._source:
            if isinstance(each, BrokenRecord):
                self._handle_broken(each)
            elif (reason := self._reason_to_skip(each)) is None:
                yield each
            else:
                self._skip(each, reason)

    def _reason_to_skip(self, document: Document) -> Skipped | None:
        if (invalid := _check_text(document)) is not None:
            return invalid
        if self._digests is not None:
            digest = hashlib.blake2b(document.raw, digest_size=16).digest()
            if digest in self._digests:
                return Skipped(document.path, _DUPLICATE, record=document.record)
            # The first copy stays, at its place in the source.
            self._digests.add(digest)
        return None

    def _skip(self, document: Document, skipped: Skipped) -> None:
        # Invalid UTF-8 in a record is an error of the record file. A whole file of another encoding is not:
        # folders of text often contain a few binary files.
        if skipped.byte is not None and document.record is not None:
            self._handle_broken(BrokenRecord(skipped))
        else:
            self.skipped.append(skipped)
        if skipped.reason != _DUPLICATE:
            self.num_skipped[self._split_rule.split_of(document.raw)] += 1

    def _handle_broken(self, broken: BrokenRecord) -> None:
        if self._on_bad == "stop":
            raise UserError(f"{self._source.root}: {broken}; --on-bad skip skips records that are not text")
        self.skipped.append(broken.skipped)


def _check_text(document: Document) -> Skipped | None:
    if not document.raw:
        return Skipped(document.path, "empty", record=document.record)
    try:
        document.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Skipped(document.path, "not UTF-8", byte=error.start, record=document.record)
    return None
