"""Builds a corpus of labeled answers: each with an answer to another prompt next to it, in the same window.

The second conversation is the prompt with another prompt's answer. It is not learned; its log-probability
estimates the divergence from the reference that [KTO] subtracts.
"""

import functools
import os
from collections.abc import Sequence
from typing import Unpack

from zaya_jax.data.chats.example_store import Example
from zaya_jax.data.chats.labeled_records import LabeledAnswer, read_labeled_answers, with_other_answers
from zaya_jax.data.chats.packed_corpus import (
    PackedKind,
    PackedRecord,
    PackedReport,
    PackingOptions,
    build_packed_corpus,
)
from zaya_jax.data.chats.packed_windows import with_label
from zaya_jax.data.chats.preference_corpus import without_prompt
from zaya_jax.data.chats.templates.encoding import ChatFormat, EncodedChat
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.data.corpora.corpus import VALIDATION_PERCENT
from zaya_jax.errors import UserError

ANSWERS = PackedKind("answers", split_by="prompts", preferences=True, unpaired=True)


def build_labeled_corpus(folder: str | os.PathLike[str], **options: Unpack[PackingOptions]) -> PackedReport:
    """Writes the labeled answers of a source as a corpus of packed windows, completely or not at all.

    Args:
      folder: folder of the new corpus.
      **options: see `PackingOptions`.

    Raises:
      UserError: naming file and line, if a record is invalid or nothing in an answer is learned; if an
        argument is invalid, `folder` is not free, or fewer than two different prompts fit a window.
    """
    answers = read_labeled_answers(options["source"], record_format=options.get("record_format"))
    percent = options.get("validation_percent", VALIDATION_PERCENT)
    records = (
        PackedRecord(own.location, _chats_of(own, other), functools.partial(_encode, own))
        for own, other in with_other_answers(answers, validation_percent=percent)
    )
    return build_packed_corpus(folder, records, kind=ANSWERS, **options)


def _chats_of(own: LabeledAnswer, other: LabeledAnswer) -> Sequence[ChatInput]:
    chats = (own.prompt + own.answer, own.prompt + other.answer, own.prompt)
    return [ChatInput(each, tools=own.tools) for each in chats]


def _encode(answer: LabeledAnswer, chats: Sequence[EncodedChat], _: ChatFormat) -> Example | str:
    own, other = without_prompt(chats)
    # A completion of another role would have no log-probability to compare.
    for side in (own, other):
        if not side.learned_T[1:].any():
            raise UserError("nothing in the completion is learned; an answer of the assistant is required")
    return Example(answer.hash, (with_label(own, answer.is_desirable), with_label(other, False)))
