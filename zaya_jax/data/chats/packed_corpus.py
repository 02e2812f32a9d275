"""Builds a corpus of chats or pairs of answers, each packed whole into a window.

Packing happens here, once per sequence length; `zaya_jax.data.reading.loader` only unpacks windows. The
folder is a normal corpus (`zaya_jax.data.corpora.shards`) with one window per block, so mixture, order,
position and resume work as for documents.
"""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NotRequired, TypedDict, Unpack

from zaya_jax.config import is_inside
from zaya_jax.data.chats.example_store import Example, ExampleStore
from zaya_jax.data.chats.packed_windows import window_to_bytes
from zaya_jax.data.chats.packing import Packing, best_fit_decreasing, compare_packings
from zaya_jax.data.chats.record_formats import RecordFormat
from zaya_jax.data.chats.records import find_chat_files
from zaya_jax.data.chats.templates.encoding import ChatFormat, EncodedChat, checked_format
from zaya_jax.data.chats.templates.template import ChatInput, load_template
from zaya_jax.data.corpora.corpus import (
    SHARD_TOKENS,
    VALIDATION_PERCENT,
    check_sizes,
    check_vacant,
    describe_corpus,
    naming_corpus,
)
from zaya_jax.data.corpora.shards import Corpus, Split, open_corpus, write_manifest
from zaya_jax.data.corpora.token_blocks import BlockWriter, ShardFormat
from zaya_jax.data.sources.skipped import Skipped, count_reasons, write_skipped
from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.files.durable import temporary_folder

TOO_LONG = "longer than a window"
# Number of records that a worker renders per request.
_BATCH = 64


class PackingOptions(TypedDict):
    """Options of a packed corpus.

    Attributes:
      source: a file of records, a folder of such files, or the id of a data set on the Hugging Face hub, as
        `find_chat_files` accepts it.
      record_format: format of the records; None detects it from the first record.
      tokenizer: tokenizer of the corpus.
      template: "zaya", the path of a Jinja file, or None for the tokenizer's own template (else "zaya").
      sequence_length: T, tokens per window; a run must read the corpus with this length.
      validation_percent: approximate share of held-out examples in percent.
      shard_tokens: approximate number of tokens per shard file.
      overwrite: whether to replace an existing corpus.
    """

    source: str | os.PathLike[str]
    record_format: NotRequired[RecordFormat | None]
    tokenizer: Tokenizer
    template: NotRequired[str | None]
    sequence_length: int
    validation_percent: NotRequired[int]
    shard_tokens: NotRequired[int]
    overwrite: NotRequired[bool]


@dataclasses.dataclass(frozen=True)
class PackedKind:
    """A kind of example.

    Attributes:
      name: name in the plural, for messages and tables.
      split_by: what determines the split of an example, in the plural.
      preferences: whether the examples are pairs of answers, the preferred one first.
      unpaired: whether they are labeled answers instead, each followed by an answer to another prompt.
    """

    name: str
    split_by: str
    preferences: bool = False
    unpaired: bool = False


class PackedRecord(NamedTuple):
    """A record of a source before its chats are encoded.

    Attributes:
      location: file and line, for error messages.
      chats: the chats of the record.
      encode: returns the example of the encoded chats, or the reason to skip the record.
    """

    location: str
    chats: Sequence[ChatInput]
    encode: Callable[[Sequence[EncodedChat], ChatFormat], Example | str]


@dataclasses.dataclass(frozen=True)
class PackedReport:
    """Statistics of a packed corpus.

    Attributes:
      kind: kind of the examples.
      corpus: the new corpus.
      num_tokens: number of tokens of all examples without padding, by split.
      num_learned: number of those tokens that have a loss, by split.
      packings: comparison of ways to pack the training split; the first one was used.
    """

    kind: PackedKind
    corpus: Corpus
    num_tokens: Mapping[str, int]
    num_learned: Mapping[str, int]
    packings: tuple[Packing, ...]


def build_packed_corpus(
    folder: str | os.PathLike[str],
    records: Iterable[PackedRecord],
    *,
    kind: PackedKind,
    **options: Unpack[PackingOptions],
) -> PackedReport:
    """Writes examples as a corpus of packed windows, completely or not at all.

    Args:
      folder: folder of the new corpus.
      records: the records of the source, read lazily: only one batch is in memory at a time.
      kind: kind of the examples.
      **options: see `PackingOptions`.

    Raises:
      UserError: as the `encode` of a record; if an argument is invalid, `folder` is not free, or fewer than
        two different examples fit a window.
    """
    folder = pathlib.Path(folder).resolve()
    length, source, tokenizer = options["sequence_length"], options["source"], options["tokenizer"]
    validation_percent = options.get("validation_percent", VALIDATION_PERCENT)
    overwrite, shard_tokens = options.get("overwrite", False), options.get("shard_tokens", SHARD_TOKENS)
    # `check_sizes` would report this as block_tokens, a name that the caller does not know.
    if length < 2:
        raise UserError(f"sequence_length is {length}; it must be at least 2: a token and its target")
    check_sizes(block_tokens=length, validation_percent=validation_percent, shard_tokens=shard_tokens)
    check_vacant(folder, overwrite=overwrite)
    _check_apart(folder, source, kind)
    chat_format = _load_learning_format(options.get("template"), tokenizer)
    shard_format = ShardFormat(
        tokenizer=tokenizer, block_tokens=length, shard_blocks=max(1, shard_tokens // length)
    )
    with (
        naming_corpus(folder),
        temporary_folder(folder, replace=overwrite) as aside,
        ExampleStore(aside, shard_format.dtype) as examples,
    ):
        # The first pass encodes, the second packs: packing needs the lengths of all examples.
        skipped = _store(records, chat_format, examples, length)
        # Only known now: with few examples the choice depends on all of them.
        numbers = _choose_splits(examples.hashes, source, kind, validation_percent)
        splits = {name: _write_split(aside, name, examples, numbers[name], shard_format) for name in numbers}
        write_skipped(aside, skipped)
        corpus = describe_corpus(
            aside,
            shard_format,
            source=f"{pathlib.Path(source).resolve()}, {kind.name} by {chat_format.template.name}",
            left_out=count_reasons(skipped),
            chat_template=chat_format.template.text,
            preferences=kind.preferences,
            unpaired=kind.unpaired,
            **splits,
        )
        write_manifest(corpus)
        open_corpus(aside)  # verify it before it replaces a corpus that works
    lengths = _by_split(numbers, examples.lengths)
    return PackedReport(
        kind=kind,
        corpus=open_corpus(folder),
        num_tokens={name: sum(each) for name, each in lengths.items()},
        num_learned={name: sum(each) for name, each in _by_split(numbers, examples.num_learned).items()},
        packings=compare_packings(lengths["train"], length),
    )


def _load_learning_format(template: str | None, tokenizer: Tokenizer) -> ChatFormat:
    """Loads a chat format whose template marks what is learned."""
    chat_format = ChatFormat(load_template(template, tokenizer), tokenizer)
    # Checked before the delimiters: a template without these blocks is the wrong one in any case.
    if not chat_format.template.marks_generation:
        raise UserError(
            f"the chat template {chat_format.template.name} has no {{% generation %}} blocks, which mark "
            "what is learned; put them around what the assistant writes, or use --template zaya"
        )
    return checked_format(chat_format)


def _by_split(numbers: Mapping[str, Sequence[int]], values: Sequence[int]) -> dict[str, list[int]]:
    return {name: [values[i] for i in of_split] for name, of_split in numbers.items()}


def _check_apart(folder: pathlib.Path, source: str | os.PathLike[str], kind: PackedKind) -> None:
    """A corpus must not be deleted together with its own source."""
    # Compared file by file, because a source may also be a data set in the cache of the hub.
    for path in find_chat_files(source):
        if is_inside(path, folder):
            raise UserError(
                f"the {kind.name} {path} are inside the corpus {folder}; --overwrite would delete them"
            )


def _store(
    records: Iterable[PackedRecord], chat_format: ChatFormat, examples: ExampleStore, length: int
) -> list[Skipped]:
    """Encodes records in batches and stores their examples; returns what is skipped."""
    skipped: list[Skipped] = []
    # Records stream, so that a source of any size fits in memory.
    remaining = iter(records)
    while batch := list(itertools.islice(remaining, _BATCH)):
        encoded = chat_format.encode_all([chat for record in batch for chat in record.chats])
        for record in batch:
            # An error of the template names no record by itself.
            try:
                chats = [_checked(each) for each in itertools.islice(encoded, len(record.chats))]
                example = record.encode(chats, chat_format)
            except UserError as error:
                raise UserError(f"{record.location}: {error}") from error
            # Checked last, so that an invalid record is an error at every sequence length.
            if isinstance(example, Example) and len(example) <= length:
                examples.append(example)
            else:
                skipped.append(Skipped(record.location, example if isinstance(example, str) else TOO_LONG))
    return skipped


def _checked(encoded: EncodedChat | UserError) -> EncodedChat:
    if isinstance(encoded, UserError):
        raise encoded
    return encoded


def _choose_splits(
    hashes: Sequence[int], source: str | os.PathLike[str], kind: PackedKind, validation_percent: int
) -> dict[str, list[int]]:
    """Numbers of the examples of each split.

    Raises:
      UserError: if fewer than two examples differ.
    """
    # Equal examples have one hash, and must be in the same split.
    different = sorted(set(hashes), key=lambda each: (each % 100, each))
    if len(different) < 2:
        raise UserError(
            f"{source} has {len(different)} different {kind.split_by} that fit a window; at least two are "
            "required, one of them for the held-out split"
        )
    held_out = {each for each in different if each % 100 < validation_percent}
    # With few examples a split may be empty by chance: the one closest to the threshold is moved.
    held_out = (held_out | {different[0]}) - ({different[-1]} if len(held_out) == len(different) else set())
    return {
        "train": [i for i, each in enumerate(hashes) if each not in held_out],
        "validation": [i for i, each in enumerate(hashes) if each in held_out],
    }


def _write_split(
    folder: pathlib.Path,
    name: str,
    examples: ExampleStore,
    numbers: Sequence[int],
    shard_format: ShardFormat,
) -> Split:
    length, tokenizer = shard_format.block_tokens, shard_format.tokenizer
    writer = BlockWriter(folder, name, shard_format)
    packed = best_fit_decreasing([examples.lengths[i] for i in numbers], length)
    windows = [[numbers[i] for i in window] for window in packed]
    # Packing starts with the longest examples. Without shuffling, an evaluation on the first few windows
    # would only see the longest ones.
    windows.sort(key=lambda window: (examples.hashes[window[0]], window[0]))
    text_bytes = spelled_bytes = 0
    for window in windows:
        chats = [chat for i in window for chat in examples[i]]
        # Original text, and not what the tokens spell, as for corpora of documents.
        text_bytes += sum(chat.text_bytes for chat in chats)
        spelled_bytes += sum(int(tokenizer.spelled_bytes[chat.tokens_T].sum()) for chat in chats)
        writer.write(window_to_bytes(chats, length=length, pad_id=tokenizer.pad_id, dtype=shard_format.dtype))
    return Split(
        shards=writer.finish(),
        documents=len(numbers),
        # Unlike a document, a record without text is an error and is never skipped.
        skipped=0,
        text_bytes=text_bytes,
        tokens=len(windows) * length,
        spelled_bytes=spelled_bytes,
    )
