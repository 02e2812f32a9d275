"""Builds a corpus of chats: encodes each chat, trims it to the length, and packs it into a window."""

import collections
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Unpack

from zaya_jax.data.chats.example_store import Example
from zaya_jax.data.chats.packed_corpus import (
    TOO_LONG,
    PackedKind,
    PackedRecord,
    PackedReport,
    PackingOptions,
    build_packed_corpus,
)
from zaya_jax.data.chats.records import Chat, read_chats
from zaya_jax.data.chats.templates.encoding import ChatFormat, EncodedChat
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.data.chats.trimming import Trimming, fit
from zaya_jax.errors import UserError

CHATS = PackedKind("chats", split_by="chats")


@dataclasses.dataclass(frozen=True)
class ChatReport(PackedReport):
    """Statistics of a corpus of chats.

    Attributes:
      trimmed: number of chats by what was trimmed.
    """

    trimmed: Mapping[Trimming, int]


def build_chat_corpus(folder: str | os.PathLike[str], **options: Unpack[PackingOptions]) -> ChatReport:
    """Writes the chats of a source as a corpus of packed windows, completely or not at all.

    A hash of the messages determines the split of a chat. Corpora with the same `validation_percent` thus
    hold out the same chats. If at least two chats differ, each split has at least one.

    Args:
      folder: folder of the new corpus.
      **options: see `PackingOptions`.

    Raises:
      UserError: naming file and line, if a record is not a chat or nothing in it is learned; if an argument
        is invalid, `folder` is not free, or fewer than two different chats fit a window.
    """
    # Filled while the corpus is built, because records are read lazily.
    counts: collections.Counter[Trimming] = collections.Counter()
    encode = functools.partial(_encode, options["sequence_length"], counts)
    records = (
        PackedRecord(
            chat.location, [ChatInput(chat.messages, tools=chat.tools)], functools.partial(encode, chat)
        )
        for chat in read_chats(options["source"], record_format=options.get("record_format"))
    )
    report = build_packed_corpus(folder, records, kind=CHATS, **options)
    trimmed = {each: counts[each] for each in Trimming if counts[each]}
    return ChatReport(**vars(report), trimmed=trimmed)


def _encode(
    length: int,
    counts: collections.Counter[Trimming],
    chat: Chat,
    encoded: Sequence[EncodedChat],
    chat_format: ChatFormat,
) -> Example | str:
    """Trims a chat, and counts what was trimmed."""
    fitted = fit(chat.messages, chat_format, max_tokens=length, whole=encoded[0], tools=chat.tools)
    # Dropped and not truncated: see `zaya_jax.data.chats.trimming`.
    if fitted is None:
        return TOO_LONG
    trimmed, trimming = fitted
    # The first token is never a target, so it does not count.
    if not trimmed.learned_T[1:].any():
        raise UserError("nothing in it is learned; a message of the assistant is required")
    counts[trimming] += 1
    return Example(chat.hash, (trimmed,))
