"""Builds a corpus of labeled answers: each with an answer to another prompt next to it, in the same window.

The second conversation is the prompt with another prompt's answer. It is not learned; its log-probability
estimates the divergence from the reference that [KTO] subtracts.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Unpack

from zaya_jax.data.chats.example_store import Example
from zaya_jax.data.chats.labeled_records import LabeledAnswer, read_labeled_answers, with_other_answers
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
from zaya_jax.data.chats.packed_windows import with_label
from zaya_jax.data.chats.preference_corpus import num_common, without_loss
from zaya_jax.data.chats.record_formats import RecordFormat
from zaya_jax.data.chats.templates.encoding import ChatFormat, EncodedChat
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.data.corpora.corpus import VALIDATION_PERCENT
from zaya_jax.data.sources.skipped import Skipped
from zaya_jax.errors import UserError

ANSWERS = PackedKind("answers", split_by="prompts", preferences=True, unpaired=True)
_Pair = tuple[LabeledAnswer, LabeledAnswer]


def build_labeled_corpus(
    folder: str | os.PathLike[str],
    *,
    record_format: RecordFormat | None = None,
    **options: Unpack[PackingOptions],
) -> PackedReport:
    """Writes the labeled answers of a source as a corpus of packed windows, completely or not at all.

    Args:
      folder: folder of the new corpus.
      record_format: format of pairs in the source; None detects it from the first record.
      **options: see `PackingOptions`.

    Raises:
      UserError: naming file and line, if a record is invalid or nothing in an answer is learned; if an
        argument is invalid, `folder` is not free, or fewer than two different prompts fit a window.
    """
    percent = options.get("validation_percent", VALIDATION_PERCENT)

    def encode(chat_format: ChatFormat) -> Iterator[Example | Skipped]:
        answers = read_labeled_answers(options["source"], record_format=record_format)
        pairs = with_other_answers(answers, validation_percent=percent)
        for pair, chats in encoded_in_batches(pairs, chat_format, _chats_of):
            with naming_record(pair[0].location):
                yield _encode(pair[0], [checked(each) for each in chats], options["sequence_length"])

    return build_packed_corpus(folder, encode, kind=ANSWERS, **options)


def _chats_of(pair: _Pair) -> Sequence[ChatInput]:
    own, other = pair
    chats = (own.prompt + own.answer, own.prompt + other.answer, own.prompt)
    return [ChatInput(each, tools=own.tools) for each in chats]


def _encode(answer: LabeledAnswer, chats: Sequence[EncodedChat], length: int) -> Example | Skipped:
    # The prompt is encoded on its own to find where the answers start.
    *sides, prompt = chats
    common = num_common(prompt, *sides)
    own, other = (without_loss(side, common) for side in sides)
    # A completion of another role would have no log-probability to compare.
    for side in (own, other):
        if not side.learned_T[1:].any():
            raise UserError("nothing in the completion is learned; an answer of the assistant is required")
    example = Example(answer.hash, (with_label(own, answer.is_desirable), with_label(other, False)))
    return example if len(example) <= length else Skipped(answer.location, TOO_LONG)
