"""Builds a corpus of chats: encodes each chat, trims it to the length, and packs it into a window."""

import collections
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Unpack

from zaya_jax.data.chats.example_store import Example
from zaya_jax.data.chats.packed_corpus import (
    TOO_LONG,
    PackedKind,
    PackedReport,
    PackingOptions,
    build_packed_corpus,
    checked,
    encoded_in_batches,
    naming_record,
)
from zaya_jax.data.chats.record_formats import RecordFormat
from zaya_jax.data.chats.records import Chat, read_chats
from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.data.chats.trimming import Trimming, fit
from zaya_jax.data.sources.skipped import Skipped
from zaya_jax.errors import UserError

CHATS = PackedKind("chats", split_by="chats")


@dataclasses.dataclass(frozen=True)
class ChatReport(PackedReport):
    """Statistics of a corpus of chats.

    Attributes:
      trimmed: number of chats by what was trimmed.
    """

    trimmed: Mapping[Trimming, int]


def build_chat_corpus(
    folder: str | os.PathLike[str],
    *,
    record_format: RecordFormat | None = None,
    **options: Unpack[PackingOptions],
) -> ChatReport:
    """Writes the chats of a source as a corpus of packed windows, completely or not at all.

    A hash of the messages determines the split of a chat. Corpora with the same `validation_percent` thus
    hold out the same chats. If at least two chats differ, each split has at least one.

    Args:
      folder: folder of the new corpus.
      record_format: format of the records; None detects it from the first record.
      **options: see `PackingOptions`.

    Raises:
      UserError: naming file and line, if a record is not a chat or nothing in it is learned; if an argument
        is invalid, `folder` is not free, or fewer than two different chats fit a window.
    """
    # Filled while the corpus is built, because `encode` yields lazily.
    counts: collections.Counter[Trimming] = collections.Counter()

    def encode(chat_format: ChatFormat) -> Iterator[Example | Skipped]:
        chats = read_chats(options["source"], record_format=record_format)
        return _encode_all(chats, chat_format, options["sequence_length"], counts)

    report = build_packed_corpus(folder, encode, kind=CHATS, **options)
    trimmed = {each: counts[each] for each in Trimming if counts[each]}
    return ChatReport(**vars(report), trimmed=trimmed)


def _encode_all(
    chats: Iterable[Chat],
    chat_format: ChatFormat,
    length: int,
    counts: collections.Counter[Trimming],
) -> Iterator[Example | Skipped]:
    """Encodes and trims each chat, and counts what was trimmed."""
    for chat, encoded_chats in encoded_in_batches(chats, chat_format, _inputs_of):
        # An error of the template names no record by itself.
        with naming_record(chat.location):
            whole = checked(*encoded_chats)
            fitted = fit(chat.messages, chat_format, max_tokens=length, whole=whole, tools=chat.tools)
            # Dropped and not truncated: see `zaya_jax.data.chats.trimming`.
            if fitted is None:
                yield Skipped(chat.location, TOO_LONG)
                continue
            encoded, trimming = fitted
            # The first token is never a target, so it does not count.
            if not encoded.learned_T[1:].any():
                raise UserError("nothing in it is learned; a message of the assistant is required")
        counts[trimming] += 1
        yield Example(chat.hash, (encoded,))


def _inputs_of(chat: Chat) -> list[ChatInput]:
    return [ChatInput(chat.messages, tools=chat.tools)]
