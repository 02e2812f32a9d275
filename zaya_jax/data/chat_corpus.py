"""A corpus of chats: each encoded by a template, trimmed to the length, and packed whole into windows."""

import collections
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

from zaya_jax.data.chat_format import ChatFormat
from zaya_jax.data.chat_records import read_chats
from zaya_jax.data.chat_trimming import Trimming, fit
from zaya_jax.data.left_out import LeftOut
from zaya_jax.data.packed_command import packing_parser, print_left_out, print_report
from zaya_jax.data.packed_corpus import (
    TOO_LONG,
    Example,
    PackedKind,
    PackedReport,
    build_packed_corpus,
    naming,
)
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer

CHATS = PackedKind("chats", told_apart_by="chats")


@dataclasses.dataclass(frozen=True)
class ChatReport(PackedReport):
    """How chats went into a corpus.

    Attributes:
      trimmed: chats by what they lost.
    """

    trimmed: Mapping[Trimming, int]


def build_chat_corpus(
    folder: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str],
    tokenizer: Tokenizer,
    template: str | None = None,
    sequence_length: int,
    validation_percent: int = 5,
    shard_tokens: int = 2**26,
    overwrite: bool = False,
) -> ChatReport:
    """Writes the chats of JSON lines as a corpus of packed windows, all of it or nothing.

    A hash of what is said decides a chat's split, so that the same chat is on the same side in every corpus
    with this `validation_percent`; of two chats or more that differ, each split has at least one.

    Args:
      folder: the corpus to be.
      source: a file of JSON lines, or a folder of *.jsonl.
      tokenizer: makes the tokens.
      template: "zaya", a Jinja file, or None for the tokenizer's own, if it has one, else "zaya".
      sequence_length: T, tokens of a window; a run must read the corpus at this one.
      validation_percent: share of the chats that is held out, about.
      shard_tokens: tokens a shard file, about.
      overwrite: replaces a corpus that is there.

    Raises:
      ValueError: for a line that is no chat or in which nothing is learned, by file and line; when an
        argument cannot be, `folder` is taken, or there are no two chats that differ and fit.
    """
    counts: collections.Counter[Trimming] = collections.Counter()

    def read(chat_format: ChatFormat) -> Iterator[Example | LeftOut]:
        return _encode_all(source, chat_format, sequence_length, counts)

    report = build_packed_corpus(
        folder,
        read,
        kind=CHATS,
        source=source,
        tokenizer=tokenizer,
        template=template,
        sequence_length=sequence_length,
        validation_percent=validation_percent,
        shard_tokens=shard_tokens,
        overwrite=overwrite,
    )
    trimmed = {each: counts[each] for each in Trimming if counts[each]}
    return ChatReport(**vars(report), trimmed=trimmed)


def _encode_all(
    source: str | os.PathLike[str],
    chat_format: ChatFormat,
    length: int,
    counts: collections.Counter[Trimming],
) -> Iterator[Example | LeftOut]:
    """Encodes and trims each chat once, and counts what they lose."""
    for chat in read_chats(source):
        with naming(chat.place):
            fitted = fit(chat.messages, chat_format, most_tokens=length)
            if fitted is None:
                yield LeftOut(chat.place, TOO_LONG)
                continue
            encoded, trimming = fitted
            # The first token is nobody's target.
            if not encoded.learned_T[1:].any():
                raise ValueError("nothing in it is learned; there must be a message of the assistant")
        counts[trimming] += 1
        yield Example(chat.hash, (encoded,))


# zaya data chats

_EXAMPLES = (
    "zaya data chats corpora/chats --source chats.jsonl --sequence-length 256     # as bytes",
    "zaya data chats corpora/chats --source chats --template chat_template.jinja --sequence-length 1024",
    "zaya data chats corpora/chats_32k --source chats --tokenizer tokenizer.json --sequence-length 32768",
)


def main(argv: Sequence[str] | None = None) -> None:
    """`zaya data chats`: builds a corpus of chats and prints how they went into it."""
    summary = "Writes chats as a corpus of packed windows, with a part held out."
    options = packing_parser("data chats", summary, _EXAMPLES).parse_args(argv)
    report = build_chat_corpus(
        options.folder,
        source=options.source,
        tokenizer=load_tokenizer(options.tokenizer),
        template=options.template,
        sequence_length=options.sequence_length,
        validation_percent=options.validation_percent,
        overwrite=options.overwrite,
    )
    print_report(report)
    for trimming, count in report.trimmed.items():
        print(f"{trimming.value}: {count:,} chats")
    print_left_out(report)
