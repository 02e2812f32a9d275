"""Builds a corpus of preferences: both answers of a pair are whole and in the same window, the chosen one
first.

What the two conversations have in common does not say which is better. Tokens of the common messages
therefore have no loss, even if the assistant wrote them.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Unpack

import numpy as np

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
from zaya_jax.data.chats.preference_records import SIDES, Preference, read_preferences
from zaya_jax.data.chats.record_formats import RecordFormat
from zaya_jax.data.chats.templates.encoding import ChatFormat, EncodedChat
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.data.sources.skipped import Skipped
from zaya_jax.errors import UserError

ALIKE = "both sides the same"
PAIRS = PackedKind("pairs", split_by="prompts", preferences=True)


def build_preference_corpus(
    folder: str | os.PathLike[str],
    *,
    record_format: RecordFormat | None = None,
    **options: Unpack[PackingOptions],
) -> PackedReport:
    """Writes the pairs of a source as a corpus of packed windows, completely or not at all.

    A hash of the prompt determines the split of a pair, so that no prompt is in both splits, and corpora with
    the same `validation_percent` hold out the same prompts. Pairs that are longer than a window, and pairs
    whose answers have the same tokens, are skipped and listed.

    Args:
      folder: folder of the new corpus.
      record_format: format of the records; None detects it from the first record.
      **options: see `PackingOptions`.

    Raises:
      UserError: naming file and line, if a record is not a pair or nothing in an answer is learned; if an
        argument is invalid, `folder` is not free, or fewer than two different prompts fit a window.
    """

    def encode(chat_format: ChatFormat) -> Iterator[Example | Skipped]:
        pairs = read_preferences(options["source"], record_format=record_format)
        for pair, chats in encoded_in_batches(pairs, chat_format, _chats_of):
            with naming_record(pair.location):
                yield _encode(pair, [checked(each) for each in chats], options["sequence_length"])

    return build_packed_corpus(folder, encode, kind=PAIRS, **options)


def _chats_of(pair: Preference) -> Sequence[ChatInput]:
    return [ChatInput(each, tools=pair.tools) for each in (pair.chosen, pair.rejected, pair.prompt)]


def _encode(pair: Preference, chats: Sequence[EncodedChat], length: int) -> Example | Skipped:
    # The prompt is encoded on its own to find where the answers start.
    *sides, prompt = chats
    if np.array_equal(sides[0].tokens_T, sides[1].tokens_T):
        return Skipped(pair.location, ALIKE)
    common = num_common(prompt, *sides)
    example = Example(pair.hash, tuple(without_loss(side, common) for side in sides))
    for name, side in zip(SIDES, example.chats, strict=True):
        # The first token is never a target, so it does not count.
        if not side.learned_T[1:].any():
            raise UserError(f"nothing in {name} is learned; an answer of the assistant is required")
    # Checked last, so that an invalid record is an error at every sequence length.
    return example if len(example) <= length else Skipped(pair.location, TOO_LONG)


def num_common(*chats: EncodedChat) -> int:
    """Number of leading tokens that all chats share.

    It may be smaller than the prompt, because a template may render a prompt differently before an answer.
    """
    shortest = min(map(len, chats))
    same_T = np.all([chat.tokens_T[:shortest] == chats[0].tokens_T[:shortest] for chat in chats], axis=0)
    return shortest if same_T.all() else int(same_T.argmin())


def without_loss(chat: EncodedChat, num_tokens: int) -> EncodedChat:
    """The chat without a loss on its first tokens."""
    return dataclasses.replace(chat, learned_T=chat.learned_T & (np.arange(len(chat)) >= num_tokens))
