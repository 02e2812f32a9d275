"""A corpus of what is packed whole into windows: chats, or pairs of answers.

What a run reads is decided here, once for each length: `zaya_jax.data.loader` only takes a window apart. The
folder is a corpus like any other (`zaya_jax.data.shards`), a window a block, so that mixture, order, position
and resume are those of documents.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from zaya_jax.config import lies_in
from zaya_jax.data.blocks import BlockWriter, ShardFormat
from zaya_jax.data.chat_format import ChatFormat, EncodedChat, load_chat_format
from zaya_jax.data.chat_records import find_chat_files
from zaya_jax.data.corpus import check_sizes, check_vacant
from zaya_jax.data.left_out import LeftOut, count_reasons, write_left_out
from zaya_jax.data.packing import Packing, best_fit_decreasing, compare_packings
from zaya_jax.data.shards import Corpus, Split, describe_files, open_corpus, write_manifest
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.data.windows import window_to_bytes
from zaya_jax.durable import folder_aside

TOO_LONG = "longer than a window"


@dataclasses.dataclass(frozen=True)
class PackedKind:
    """What a corpus is packed of.

    Attributes:
      name: in the plural.
      told_apart_by: what decides the split of one, in the plural.
      preferences: whether they are pairs of answers, of which the first is preferred.
    """

    name: str
    told_apart_by: str
    preferences: bool = False


@dataclasses.dataclass(frozen=True)
class Example:
    """What stays together in a window.

    Attributes:
      hash: decides the split.
      chats: a chat, or the two of a pair, one after the other.
    """

    hash: int
    chats: tuple[EncodedChat, ...]

    def __len__(self) -> int:
        return sum(map(len, self.chats))


@dataclasses.dataclass(frozen=True)
class PackedReport:
    """How examples went into a corpus.

    Attributes:
      kind: of the examples.
      corpus: that was built.
      num_tokens: by split, of all examples, without padding.
      num_learned: by split, of those the ones that are learned.
      packings: of the training split, the one that was taken first.
    """

    kind: PackedKind
    corpus: Corpus
    num_tokens: Mapping[str, int]
    num_learned: Mapping[str, int]
    packings: tuple[Packing, ...]


def build_packed_corpus(
    folder: str | os.PathLike[str],
    read: Callable[[ChatFormat], Iterator[Example | LeftOut]],
    *,
    kind: PackedKind,
    source: str | os.PathLike[str],
    tokenizer: Tokenizer,
    template: str | None,
    sequence_length: int,
    validation_percent: int,
    shard_tokens: int,
    overwrite: bool,
) -> PackedReport:
    """Writes examples as a corpus of packed windows, all of it or nothing.

    Args:
      folder: the corpus to be.
      read: gives the examples in the tokens of a format, each once: at most one is in memory.
      kind: of the examples.
      source: a file of JSON lines, or a folder of *.jsonl.
      tokenizer: makes the tokens.
      template: "zaya", a Jinja file, or None for the tokenizer's own, if it has one, else "zaya".
      sequence_length: T, tokens of a window.
      validation_percent: share of the examples that is held out, about.
      shard_tokens: tokens a shard file, about.
      overwrite: replaces a corpus that is there.

    Raises:
      ValueError: as `read`; when an argument cannot be, `folder` is taken, or there are no two examples that
        differ and fit.
    """
    folder = pathlib.Path(folder).resolve()
    if sequence_length < 2:
        raise ValueError(
            f"sequence_length is {sequence_length}; it must be at least 2: a token and its target"
        )
    check_sizes(
        block_tokens=sequence_length, validation_percent=validation_percent, shard_tokens=shard_tokens
    )
    check_vacant(folder, overwrite=overwrite)
    _check_apart(folder, source, kind)
    chat_format = _load_learning_format(template, tokenizer)
    shard_format = ShardFormat(
        tokenizer=tokenizer,
        block_tokens=sequence_length,
        shard_blocks=max(1, shard_tokens // sequence_length),
    )
    try:
        with folder_aside(folder, replace=overwrite) as aside, _Stored(aside, shard_format.dtype) as examples:
            left_out = _store(read(chat_format), examples)
            chosen = _choose_splits(examples.hashes, source, kind, validation_percent)
            origin = f"{pathlib.Path(source).resolve()}, {kind.name} by {chat_format.template.name}"
            corpus = _write(aside, examples, chosen, left_out, shard_format, origin)
            corpus = dataclasses.replace(
                corpus, chat_template=chat_format.template.text, preferences=kind.preferences
            )
            write_manifest(corpus)
            open_corpus(aside)  # what a run could not open must not take the place of what it can
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "another process has built this corpus", str(folder)) from error
    lengths = _by_split(chosen, examples.lengths)
    return PackedReport(
        kind=kind,
        corpus=open_corpus(folder),
        num_tokens={name: sum(each) for name, each in lengths.items()},
        num_learned={name: sum(each) for name, each in _by_split(chosen, examples.num_learned).items()},
        packings=compare_packings(lengths["train"], sequence_length),
    )


def _load_learning_format(template: str | None, tokenizer: Tokenizer) -> ChatFormat:
    """The format of a template that says what is learned."""
    chat_format = load_chat_format(template, tokenizer)
    if not chat_format.template.marks_generation:
        raise ValueError(
            f"the chat template {chat_format.template.name} has no {{% generation %}} blocks, which say what "
            'is learned; put them around what the assistant writes, or take "zaya" (--template zaya)'
        )
    return chat_format


def _by_split(chosen: Mapping[str, Sequence[int]], values: Sequence[int]) -> dict[str, list[int]]:
    return {name: [values[i] for i in numbers] for name, numbers in chosen.items()}


def _check_apart(folder: pathlib.Path, source: str | os.PathLike[str], kind: PackedKind) -> None:
    """A corpus must not be removed with what it is made of."""
    for path in find_chat_files(source):
        if lies_in(path, folder):
            raise ValueError(
                f"the {kind.name} {path} lie in the corpus {folder}; --overwrite would remove them"
            )


def _store(found: Iterator[Example | LeftOut], examples: "_Stored") -> list[LeftOut]:
    left_out: list[LeftOut] = []
    for each in found:
        if isinstance(each, LeftOut):
            left_out.append(each)
        else:
            examples.append(each)
    return left_out


def _write(
    folder: pathlib.Path,
    examples: "_Stored",
    chosen: Mapping[str, Sequence[int]],
    left_out: Sequence[LeftOut],
    shard_format: ShardFormat,
    source: str,
) -> Corpus:
    """Writes all but the manifest."""
    tokenizer = shard_format.tokenizer
    count_bytes = _counter_of_bytes(tokenizer)
    splits = {
        name: _write_split(folder, name, examples, numbers, shard_format, count_bytes)
        for name, numbers in chosen.items()
    }
    write_left_out(folder, left_out)
    return Corpus(
        folder=folder,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        block_tokens=shard_format.block_tokens,
        dtype=shard_format.dtype,
        source=source,
        left_out=count_reasons(left_out),
        files=describe_files(folder),
        train=splits["train"],
        validation=splits["validation"],
    )


class _Stored:
    """Examples in a nameless file beside the shards, read again when it is known where each goes."""

    def __init__(self, folder: pathlib.Path, dtype: str):
        self.hashes: list[int] = []
        self.lengths: list[int] = []
        self.num_learned: list[int] = []
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)
        self._places: list[int] = []
        self._chats: list[tuple[int, ...]] = []
        self._end = 0

    def __enter__(self) -> "_Stored":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getitem__(self, number: int) -> tuple[EncodedChat, ...]:
        self._file.seek(self._places[number])
        return tuple(map(self._read, self._chats[number]))

    def _read(self, length: int) -> EncodedChat:
        tokens_T = np.frombuffer(self._file.read(length * self._dtype.itemsize), self._dtype)
        return EncodedChat(tokens_T, np.frombuffer(self._file.read(length), np.bool_))

    def append(self, example: Example) -> None:
        """Writes an example behind the others."""
        self.hashes.append(example.hash)
        self.lengths.append(len(example))
        self.num_learned.append(sum(int(chat.learned_T.sum()) for chat in example.chats))
        self._places.append(self._end)
        self._chats.append(tuple(map(len, example.chats)))
        for chat in example.chats:
            raw = chat.tokens_T.astype(self._dtype).tobytes() + chat.learned_T.tobytes()
            self._file.write(raw)
            self._end += len(raw)


def _choose_splits(
    hashes: Sequence[int], source: str | os.PathLike[str], kind: PackedKind, validation_percent: int
) -> dict[str, list[int]]:
    """Numbers of the examples of each split.

    Raises:
      ValueError: when there are no two that differ.
    """
    different = sorted(set(hashes), key=lambda each: (each % 100, each))
    if len(different) < 2:
        raise ValueError(
            f"{source} has {len(different)} different {kind.told_apart_by} that fit a window; there must be "
            "two, one of them to be held out"
        )
    held_out = {each for each in different if each % 100 < validation_percent}
    # With few of them chance may leave a split empty: those next to the border change sides.
    held_out = (held_out | {different[0]}) - ({different[-1]} if len(held_out) == len(different) else set())
    return {
        "train": [i for i, each in enumerate(hashes) if each not in held_out],
        "validation": [i for i, each in enumerate(hashes) if each in held_out],
    }


def _counter_of_bytes(tokenizer: Tokenizer) -> Callable[[np.ndarray], int]:
    """Counts the bytes of text that tokens stand for."""
    bytes_V = tokenizer.token_bytes()
    if bytes_V is None:  # case and spaces are lost, in the text that a model could give back too
        return lambda tokens_T: len(tokenizer.decode(tokens_T.tolist()).encode())
    return lambda tokens_T: int(bytes_V[tokens_T].sum())


def _write_split(
    folder: pathlib.Path,
    name: str,
    examples: _Stored,
    numbers: Sequence[int],
    shard_format: ShardFormat,
    count_bytes: Callable[[np.ndarray], int],
) -> Split:
    length = shard_format.block_tokens
    writer = BlockWriter(folder, name, shard_format)
    packed = best_fit_decreasing([examples.lengths[i] for i in numbers], length)
    windows = [[numbers[i] for i in window] for window in packed]
    # Packed from the longest on, the first windows would have the longest, and whoever scores the first few
    # of a split would score no others.
    windows.sort(key=lambda window: (examples.hashes[window[0]], window[0]))
    text_bytes = 0
    for window in windows:
        chats = [chat for i in window for chat in examples[i]]
        text_bytes += sum(count_bytes(chat.tokens_T) for chat in chats)
        pad_id, dtype = shard_format.tokenizer.pad_id, shard_format.dtype
        writer.write(window_to_bytes(chats, length=length, pad_id=pad_id, dtype=dtype))
    return Split(
        shards=writer.finish(),
        documents=len(numbers),
        skipped=0,
        text_bytes=text_bytes,
        tokens=len(windows) * length,
    )


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Says in a mistake of a record where it stands."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
