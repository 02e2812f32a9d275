"""A corpus of chats: each encoded by a template, trimmed to the length, and packed whole into windows.

What a run reads is decided here, once for each length: `zaya_jax.data.loader` only takes a window apart. The
folder is a corpus like any other (`zaya_jax.data.shards`), a window a block, so that mixture, order, position
and resume are those of documents.
"""

import argparse
import collections
import contextlib
import dataclasses
import errno
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import rich.box
import rich.console
import rich.table

from zaya_jax.config import lies_in
from zaya_jax.data.blocks import BlockWriter, ShardFormat
from zaya_jax.data.chat_format import ChatFormat, EncodedChat, load_chat_format
from zaya_jax.data.chat_records import Chat, find_chat_files, read_chats
from zaya_jax.data.chat_trimming import Trimming, fit
from zaya_jax.data.corpus import check_sizes, check_vacant
from zaya_jax.data.left_out import LeftOut, count_reasons, describe_left_out, write_left_out
from zaya_jax.data.packing import Packing, best_fit_decreasing, compare_packings
from zaya_jax.data.shards import SPLITS, Corpus, Split, describe_files, open_corpus, write_manifest
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.data.windows import window_to_bytes
from zaya_jax.durable import folder_aside
from zaya_jax.options import Parser
from zaya_jax.tables import name_column, number_column

TOO_LONG = "longer than a window"


@dataclasses.dataclass(frozen=True)
class ChatReport:
    """How chats went into a corpus.

    Attributes:
      corpus: that was built.
      trimmed: chats by what they lost.
      num_tokens: by split, of all chats, without padding.
      num_learned: by split, of those the assistant's.
      packings: of the training split, the one that was taken first.
    """

    corpus: Corpus
    trimmed: Mapping[Trimming, int]
    num_tokens: Mapping[str, int]
    num_learned: Mapping[str, int]
    packings: tuple[Packing, ...]


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
    folder = pathlib.Path(folder).resolve()
    if sequence_length < 2:
        raise ValueError(
            f"sequence_length is {sequence_length}; it must be at least 2: a token and its target"
        )
    check_sizes(
        block_tokens=sequence_length, validation_percent=validation_percent, shard_tokens=shard_tokens
    )
    check_vacant(folder, overwrite=overwrite)
    _check_apart(folder, source)
    chat_format = load_chat_format(template, tokenizer)
    if not chat_format.template.marks_generation:
        raise ValueError(
            f"the chat template {chat_format.template.name} has no {{% generation %}} blocks, which say what "
            'is learned; put them around what the assistant writes, or take "zaya" (--template zaya)'
        )
    shard_format = ShardFormat(
        tokenizer=tokenizer,
        block_tokens=sequence_length,
        shard_blocks=max(1, shard_tokens // sequence_length),
    )
    try:
        with folder_aside(folder, replace=overwrite) as aside:
            report = _write(aside, source, chat_format, shard_format, validation_percent)
            open_corpus(aside)  # what a run could not open must not take the place of what it can
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "another process has built this corpus", str(folder)) from error
    return dataclasses.replace(report, corpus=open_corpus(folder))


def _check_apart(folder: pathlib.Path, source: str | os.PathLike[str]) -> None:
    """A corpus must not be removed with what it is made of."""
    for path in find_chat_files(source):
        if lies_in(path, folder):
            raise ValueError(f"the chats {path} lie in the corpus {folder}; --overwrite would remove them")


def _write(
    folder: pathlib.Path,
    source: str | os.PathLike[str],
    chat_format: ChatFormat,
    shard_format: ShardFormat,
    validation_percent: int,
) -> ChatReport:
    with _Examples(folder, shard_format.dtype) as examples:
        trimmed, left_out = _encode_all(source, chat_format, shard_format.block_tokens, examples)
        chosen = _choose_splits(examples.hashes, source, validation_percent)
        count_bytes = _counter_of_bytes(shard_format.tokenizer)
        splits = {
            name: _write_split(folder, name, examples, numbers, shard_format, count_bytes)
            for name, numbers in chosen.items()
        }
        lengths = {name: [examples.lengths[i] for i in numbers] for name, numbers in chosen.items()}
        num_learned = {
            name: sum(examples.num_learned[i] for i in numbers) for name, numbers in chosen.items()
        }
    write_left_out(folder, left_out)
    tokenizer = shard_format.tokenizer
    corpus = Corpus(
        folder=folder,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        block_tokens=shard_format.block_tokens,
        dtype=shard_format.dtype,
        source=f"{pathlib.Path(source).resolve()}, chats by {chat_format.template.name}",
        left_out=count_reasons(left_out),
        files=describe_files(folder),
        chat_template=chat_format.template.text,
        **splits,
    )
    write_manifest(corpus)
    return ChatReport(
        corpus=corpus,
        trimmed=trimmed,
        num_tokens={name: sum(each) for name, each in lengths.items()},
        num_learned=num_learned,
        packings=compare_packings(lengths["train"], shard_format.block_tokens),
    )


def _encode_all(
    source: str | os.PathLike[str], chat_format: ChatFormat, length: int, examples: "_Examples"
) -> tuple[dict[Trimming, int], list[LeftOut]]:
    """Encodes and trims each chat once; at most one is in memory."""
    counts: collections.Counter[Trimming] = collections.Counter()
    left_out: list[LeftOut] = []
    for chat in read_chats(source):
        with _naming(chat):
            fitted = fit(chat.messages, chat_format, most_tokens=length)
            if fitted is None:
                left_out.append(LeftOut(chat.place, TOO_LONG))
                continue
            encoded, trimming = fitted
            # The first token is nobody's target.
            if not encoded.learned_T[1:].any():
                raise ValueError("nothing in it is learned; there must be a message of the assistant")
        counts[trimming] += 1
        examples.append(chat.hash, encoded)
    return {each: counts[each] for each in Trimming if counts[each]}, left_out


@contextlib.contextmanager
def _naming(chat: Chat) -> Iterator[None]:
    """Says in a mistake of a chat where it stands."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{chat.place}: {error}") from error


class _Examples:
    """Encoded chats in a nameless file beside the shards, read again when it is known where each goes."""

    def __init__(self, folder: pathlib.Path, dtype: str):
        self.hashes: list[int] = []
        self.lengths: list[int] = []
        self.num_learned: list[int] = []
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)
        self._places: list[int] = []
        self._end = 0

    def __enter__(self) -> "_Examples":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getitem__(self, number: int) -> EncodedChat:
        length = self.lengths[number]
        self._file.seek(self._places[number])
        tokens_T = np.frombuffer(self._file.read(length * self._dtype.itemsize), self._dtype)
        return EncodedChat(tokens_T, np.frombuffer(self._file.read(length), np.bool_))

    def append(self, chat_hash: int, chat: EncodedChat) -> None:
        """Writes a chat behind the others."""
        self.hashes.append(chat_hash)
        self.lengths.append(len(chat))
        self.num_learned.append(int(chat.learned_T.sum()))
        self._places.append(self._end)
        raw = chat.tokens_T.astype(self._dtype).tobytes() + chat.learned_T.tobytes()
        self._file.write(raw)
        self._end += len(raw)


def _choose_splits(
    hashes: Sequence[int], source: str | os.PathLike[str], validation_percent: int
) -> dict[str, list[int]]:
    """Numbers of the chats of each split.

    Raises:
      ValueError: when there are no two that differ.
    """
    different = sorted(set(hashes), key=lambda each: (each % 100, each))
    if len(different) < 2:
        raise ValueError(
            f"{source} has {len(different)} different chats that fit a window; there must be two, one of "
            "them to be held out"
        )
    held_out = {each for each in different if each % 100 < validation_percent}
    # With few chats chance may leave a split empty: those next to the border change sides.
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
    examples: _Examples,
    numbers: Sequence[int],
    shard_format: ShardFormat,
    count_bytes: Callable[[np.ndarray], int],
) -> Split:
    length = shard_format.block_tokens
    writer = BlockWriter(folder, name, shard_format)
    packed = best_fit_decreasing([examples.lengths[i] for i in numbers], length)
    windows = [[numbers[i] for i in window] for window in packed]
    # Packed from the longest on, the first windows would have the longest chats, and whoever scores the first
    # few of a split would score no others.
    windows.sort(key=lambda window: (examples.hashes[window[0]], window[0]))
    text_bytes = 0
    for window in windows:
        chats = [examples[i] for i in window]
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


# zaya data chats

_EXAMPLES = (
    "zaya data chats corpora/chats --source chats.jsonl --sequence-length 256     # as bytes",
    "zaya data chats corpora/chats --source chats --template chat_template.jinja --sequence-length 1024",
    "zaya data chats corpora/chats_32k --source chats --tokenizer tokenizer.json --sequence-length 32768",
)


def main(argv: Sequence[str] | None = None) -> None:
    """`zaya data chats`: builds a corpus of chats and prints how they went into it."""
    options = _parse_options(argv)
    report = build_chat_corpus(
        options.folder,
        source=options.source,
        tokenizer=load_tokenizer(options.tokenizer),
        template=options.template,
        sequence_length=options.sequence_length,
        validation_percent=options.validation_percent,
        overwrite=options.overwrite,
    )
    console = rich.console.Console()
    console.print(_make_split_table(report))
    console.print(_make_packing_table(report))
    for trimming, count in report.trimmed.items():
        print(f"{trimming.value}: {count:,} chats")
    print(describe_left_out(report.corpus.folder, report.corpus.left_out), end="")


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "data chats", "Writes chats as a corpus of packed windows, with a part held out.", _EXAMPLES
    )
    parser.add_argument("folder", metavar="OUT", help="folder of the corpus to be")
    parser.add_argument("--source", required=True, help="a file of JSON lines, or a folder of *.jsonl")
    parser.add_argument(
        "--tokenizer", default="byte-chat", help='"byte-chat" (default) or the path of a tokenizer.json'
    )
    parser.add_argument(
        "--template", help='"zaya" or a Jinja file; default the tokenizer\'s own, else "zaya"'
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        required=True,
        help="tokens of a window: the run's data.sequence_length",
    )
    parser.add_argument(
        "--validation-percent", type=int, default=5, help="share of the chats that is held out; default 5"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    return parser.parse_args(argv)


def _make_split_table(report: ChatReport) -> rich.table.Table:
    table = rich.table.Table(
        name_column("split"),
        *map(number_column, ("chats", "windows", "tokens", "learned", "padding")),
        box=rich.box.SIMPLE,
        padding=0,
    )
    for name in SPLITS:
        split, num_tokens = report.corpus.split(name), report.num_tokens[name]
        counts = (split.documents, split.num_blocks, num_tokens, report.num_learned[name])
        table.add_row(name, *(f"{n:,}" for n in counts), f"{1 - num_tokens / split.tokens:.2%}")
    return table


def _make_packing_table(report: ChatReport) -> rich.table.Table:
    """What others would have made of the training chats; the first row is what was written."""
    table = rich.table.Table(
        name_column("training windows by"),
        *map(number_column, ("windows", "padding", "chats cut")),
        box=rich.box.SIMPLE,
        padding=0,
    )
    for each in report.packings:
        table.add_row(each.name, f"{each.num_windows:,}", f"{each.padding:.2%}", f"{each.num_cut:,}")
    return table
