"""Builds a corpus of preferences: both answers of a pair are whole and in the same window, the chosen one
first.

What the two conversations have in common does not say which is better. Tokens of the common messages
therefore have no loss, even if the assistant wrote them.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Unpack

import numpy as np

from zaya_jax.data.chats.example_store import Example
from zaya_jax.data.chats.packed_corpus import (
    PackedKind,
    PackedRecord,
    PackedReport,
    PackingOptions,
    build_packed_corpus,
)
from zaya_jax.data.chats.preference_records import SIDES, Preference, read_preferences
from zaya_jax.data.chats.templates.encoding import ChatFormat, EncodedChat
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.errors import UserError

ALIKE = "both sides the same"
PAIRS = PackedKind("pairs", split_by="prompts", preferences=True)


def build_preference_corpus(
    folder: str | os.PathLike[str], **options: Unpack[PackingOptions]
) -> PackedReport:
    """Writes the pairs of a source as a corpus of packed windows, completely or not at all.

    A hash of the prompt determines the split of a pair, so that no prompt is in both splits, and corpora with
    the same `validation_percent` hold out the same prompts. Pairs that are longer than a window, and pairs
    whose answers have the same tokens, are skipped and listed.

    Args:
      folder: folder of the new corpus.
      **options: see `PackingOptions`.

    Raises:
      UserError: naming file and line, if a record is not a pair or nothing in an answer is learned; if an
        argument is invalid, `folder` is not free, or fewer than two different prompts fit a window.
    """
    records = (
        PackedRecord(pair.location, _chats_of(pair), functools.partial(_encode, pair))
        for pair in read_preferences(options["source"], record_format=options.get("record_format"))
    )
    return build_packed_corpus(folder, records, kind=PAIRS, **options)


def _chats_of(pair: Preference) -> Sequence[ChatInput]:
    return [ChatInput(each, tools=pair.tools) for each in (pair.chosen, pair.rejected, pair.prompt)]


def _encode(pair: Preference, chats: Sequence[EncodedChat], _: ChatFormat) -> Example | str:
    chosen, rejected = without_prompt(chats)
    if np.array_equal(chosen.tokens_T, rejected.tokens_T):
        return ALIKE
    for name, side in zip(SIDES, (chosen, rejected), strict=True):
        # The first token is never a target, so it does not count.
        if not side.learned_T[1:].any():
            raise UserError(f"nothing in {name} is learned; an answer of the assistant is required")
    return Example(pair.hash, (chosen, rejected))


def without_prompt(chats: Sequence[EncodedChat]) -> list[EncodedChat]:
    """Returns conversations without a loss on the tokens that they share.

    Args:
      chats: the conversations, and their prompt as the last. The tokens that all share may be fewer than the
        prompt's, because a template may render a prompt differently before an answer.
    """
    shortest = min(map(len, chats))
    same_T = np.all([chat.tokens_T[:shortest] == chats[0].tokens_T[:shortest] for chat in chats], axis=0)
    num_shared = shortest if same_T.all() else int(same_T.argmin())
    return [
        dataclasses.replace(chat, learned_T=chat.learned_T & (np.arange(len(chat)) >= num_shared))
        for chat in chats[:-1]
    ]
