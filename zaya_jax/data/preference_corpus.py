"""A corpus of preferences: both sides of each pair whole in the same window, the chosen one first.

What the sides have in common teaches nothing of which is better: of the messages that both begin with no
token is learned, also where the assistant wrote it.
"""

import os
from collections.abc import Iterator, Sequence

import numpy as np

from zaya_jax.data.chat_format import ChatFormat, EncodedChat
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
from zaya_jax.data.preference_records import SIDES, Preference, read_preferences
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer

ALIKE = "both sides the same"
PAIRS = PackedKind("pairs", told_apart_by="prompts", preferences=True)


def build_preference_corpus(
    folder: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str],
    tokenizer: Tokenizer,
    template: str | None = None,
    sequence_length: int,
    validation_percent: int = 5,
    shard_tokens: int = 2**26,
    overwrite: bool = False,
) -> PackedReport:
    """Writes the pairs of JSON lines as a corpus of packed windows, all of it or nothing.

    A hash of the prompt decides a pair's split, so that no prompt is on both sides, and the same is on the
    same side in every corpus with this `validation_percent`. Pairs that are longer than a window, and those
    whose sides are the same tokens, are left out and named.

    Args:
      folder: the corpus to be.
      source: a file of JSON lines, or a folder of *.jsonl.
      tokenizer: makes the tokens.
      template: "zaya", a Jinja file, or None for the tokenizer's own, if it has one, else "zaya".
      sequence_length: T, tokens of a window; a run must read the corpus at this one.
      validation_percent: share of the pairs that is held out, about.
      shard_tokens: tokens a shard file, about.
      overwrite: replaces a corpus that is there.

    Raises:
      ValueError: for a line that is no pair or has a side of which nothing is learned, by file and line;
        when an argument cannot be, `folder` is taken, or there are no two prompts that differ and fit.
    """

    def read(chat_format: ChatFormat) -> Iterator[Example | LeftOut]:
        for pair in read_preferences(source):
            with naming(pair.place):
                yield _encode(pair, chat_format, sequence_length)

    return build_packed_corpus(
        folder,
        read,
        kind=PAIRS,
        source=source,
        tokenizer=tokenizer,
        template=template,
        sequence_length=sequence_length,
        validation_percent=validation_percent,
        shard_tokens=shard_tokens,
        overwrite=overwrite,
    )


def _encode(pair: Preference, chat_format: ChatFormat, length: int) -> Example | LeftOut:
    sides = [chat_format.encode(side) for side in (pair.chosen, pair.rejected)]
    if np.array_equal(sides[0].tokens_T, sides[1].tokens_T):
        return LeftOut(pair.place, ALIKE)
    num_shared = _common(chat_format.encode(pair.prompt), *sides)
    example = Example(pair.hash, tuple(_forget(side, num_shared) for side in sides))
    for name, side in zip(SIDES, example.chats, strict=True):
        # The first token is nobody's target.
        if not side.learned_T[1:].any():
            raise ValueError(f"nothing of {name} is learned; it must have an answer of the assistant")
    # Behind the check: a record that is wrong is so at every length.
    return example if len(example) <= length else LeftOut(pair.place, TOO_LONG)


def _common(*chats: EncodedChat) -> int:
    """Tokens that all begin with; a template may write a prompt otherwise when an answer follows."""
    shortest = min(map(len, chats))
    same_T = np.all([chat.tokens_T[:shortest] == chats[0].tokens_T[:shortest] for chat in chats], axis=0)
    return shortest if same_T.all() else int(same_T.argmin())


def _forget(chat: EncodedChat, num_tokens: int) -> EncodedChat:
    """The chat with nothing learned of its first tokens."""
    return EncodedChat(chat.tokens_T, chat.learned_T & (np.arange(len(chat)) >= num_tokens))


# zaya data preferences

_EXAMPLES = (
    "zaya data preferences corpora/pairs --source pairs.jsonl --sequence-length 512     # as bytes",
    "zaya data preferences corpora/pairs --source pairs --tokenizer tokenizer.json --sequence-length 4096",
)


def main(argv: Sequence[str] | None = None) -> None:
    """`zaya data preferences`: builds a corpus of pairs and prints how they went into it."""
    summary = (
        "Writes pairs of answers, of which one is preferred, as a corpus of packed windows, with a part held "
        'out. A record has "chosen" and "rejected", lists of messages that begin alike, or answers to its '
        '"prompt".'
    )
    options = packing_parser("data preferences", summary, _EXAMPLES).parse_args(argv)
    report = build_preference_corpus(
        options.folder,
        source=options.source,
        tokenizer=load_tokenizer(options.tokenizer),
        template=options.template,
        sequence_length=options.sequence_length,
        validation_percent=options.validation_percent,
        overwrite=options.overwrite,
    )
    print_report(report)
    print_left_out(report)
