"""Shards: a corpus on disk, token blocks in ArrayRecord files beside a manifest of hashes.

Each split is one stream of tokens, its documents as `borders` lays them out, cut into blocks of one
length; a block is a record of an ArrayRecord file. The manifest has the hash of every file, and a mark
beside it the hash of the manifest. ArrayRecord itself would give a truncated file as an empty one, and
another corpus's as this one's, without an error.

Opening a corpus looks for every file and its size, and up to `HASHED_AT_OPENING` reads every byte. A larger
one would keep a run, and all its hosts at once, from beginning for minutes: `zaya data verify FOLDER`
reads it when that is wanted, and `blocks` holds each block against its own hash before it is trained on.
"""

import dataclasses
import difflib
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zaya_jax import durable
from zaya_jax.data.borders import Borders
from zaya_jax.json_files import read_json

_FORMAT, _WITHOUT_HASHES = "zaya_jax corpus 2", "zaya_jax corpus 1"
MANIFEST = "manifest.json"
COMMITTED = "committed"
"""Written last: holds the hash of the manifest."""
SPLITS = ("train", "validation")
ENDINGS = (".array_record", ".block_hashes")
"""Of files that hold tokens, and of those that hold the hashes of their blocks."""
HASHED_AT_OPENING = 4 * 2**30
"""Bytes of a corpus up to which opening it reads them all: a second or two."""
_READERS = 8
"""Threads that read files at once; hashing one waits for the disk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """What a file held when the corpus was written.

    Attributes:
      bytes: its size.
      xxh3_128: its hash.
    """

    bytes: int
    xxh3_128: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """An ArrayRecord file of a split.

    Attributes:
      file: its name in the corpus folder.
      records: token blocks in it.
      block_hashes: hash of the hashes of its blocks, in their order.
    """

    file: str
    records: int
    block_hashes: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Training or held-out documents as one stream of tokens.

    Attributes:
      shards: the files, in the order of the stream.
      documents: files of text in it.
      skipped: files that were left out, being empty or not UTF-8.
      text_bytes: UTF-8 bytes of the documents.
      tokens: with those between documents, without padding.
      gzip_9_bytes: size of the concatenated documents under gzip -9; None for training.
      xz_9_bytes: the same under xz -9.
    """

    shards: tuple[Shard, ...]
    documents: int
    skipped: int
    text_bytes: int
    tokens: int
    gzip_9_bytes: int | None = None
    xz_9_bytes: int | None = None

    @property
    def num_blocks(self) -> int:
        """Token blocks in all shards."""
        return sum(shard.records for shard in self.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus as its manifest has it.

    Attributes:
      folder: where it lies.
      tokenizer: what `load_tokenizer` was asked for when it was built.
      tokenizer_fingerprint: of that tokenizer's content.
      vocab_size: V of the tokenizer.
      bos_id: begins each document; None where its tokenizer has no such token.
      eos_id: ends each document.
      pad_id: fills up the last block of a split.
      block_tokens: tokens a record.
      dtype: little-endian type of a token in a record.
      source: where the text came from.
      train: the training split.
      validation: the held-out split.
      left_out: files of the source that are in no split, counted by reason.
      files: all files of the folder but the manifest and its mark, by name.
      chat_template: Jinja, of the chats that the corpus holds. Its blocks are then windows of whole chats
        (`zaya_jax.data.windows`), read at that length alone. None for a stream of documents.
      preferences: whether its chats are pairs of answers, the preferred one first, each pair in one window.
    """

    folder: pathlib.Path
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    block_tokens: int
    dtype: str
    source: str
    train: Split
    validation: Split
    left_out: Mapping[str, int]
    files: Mapping[str, StoredFile]
    chat_template: str | None = None
    preferences: bool = False

    @property
    def borders(self) -> Borders:
        """How documents stand in its streams."""
        return Borders(bos_id=self.bos_id, eos_id=self.eos_id, pad_id=self.pad_id)

    def split(self, name: str) -> Split:
        """The split of a name.

        Raises:
          ValueError: for another name than "train" and "validation".
        """
        if name not in SPLITS:
            raise ValueError(f'there is no split "{name}"; it must be "train" or "validation"')
        return self.train if name == "train" else self.validation

    def shard_paths(self, name: str) -> tuple[pathlib.Path, ...]:
        """The files of a split, in the order of its stream."""
        return tuple(self.folder / shard.file for shard in self.split(name).shards)


def fingerprint(corpus: Corpus) -> str:
    """The same text for corpora that give the same tokens, wherever they lie and however they are packed."""
    splits = [
        [split.tokens, [shard.block_hashes for shard in split.shards]] for split in map(corpus.split, SPLITS)
    ]
    ids = [corpus.vocab_size, corpus.bos_id, corpus.eos_id, corpus.pad_id]
    content = [corpus.tokenizer_fingerprint, ids, corpus.block_tokens, corpus.dtype, splits]
    return durable.hash_of(json.dumps(content).encode()).hex()


# Writing


def describe_files(folder: pathlib.Path) -> dict[str, StoredFile]:
    """Sizes and hashes of the files of a corpus that is being written."""
    names = sorted(path.name for path in folder.iterdir())
    stored = _map(lambda name: _describe(folder / name), names)
    return dict(zip(names, stored, strict=True))


def write_manifest(corpus: Corpus) -> None:
    """Says beside the shards what must be there; who publishes the folder has the shards on the disk."""
    values = {"format": _FORMAT, **dataclasses.asdict(corpus)}
    del values["folder"]
    durable.write(corpus.folder / MANIFEST, json.dumps(values, indent=2) + "\n")
    durable.write(corpus.folder / COMMITTED, _mark(corpus.folder))


def _describe(path: pathlib.Path) -> StoredFile:
    return StoredFile(bytes=path.stat().st_size, xxh3_128=durable.content_hash(path))


def _mark(folder: pathlib.Path) -> bytes:
    return f"{durable.content_hash(folder / MANIFEST)}\n".encode()


def _map(function: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(function, names))


# Opening


def open_corpus(folder: str | os.PathLike[str]) -> Corpus:
    """Reads a corpus's manifest and checks that its files are there, and those of a small one byte by byte.

    Raises:
      ValueError: when there is no corpus, or with a sentence for each file that is missing or differs.
    """
    corpus = read_manifest(folder)
    _check_files(corpus, hashed=sum(file.bytes for file in corpus.files.values()) <= HASHED_AT_OPENING)
    return corpus


def verify_corpus(folder: str | os.PathLike[str]) -> Corpus:
    """Opens a corpus when every byte of it is as it was written, whatever its size.

    Raises:
      ValueError: as `open_corpus`.
    """
    corpus = read_manifest(folder)
    _check_files(corpus, hashed=True)
    return corpus


def read_manifest(folder: str | os.PathLike[str]) -> Corpus:
    """A corpus as its manifest has it; none of its other files is looked for.

    Raises:
      ValueError: when there is no corpus, or its manifest is not what was written.
    """
    if not pathlib.Path(folder).exists():
        raise ValueError(describe_missing(folder))
    folder = pathlib.Path(folder).resolve()
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"there is no corpus at {folder}: it has no {MANIFEST}; zaya data build builds one")
    try:
        values = read_json(path)
        found = values.pop("format")
        if found not in (_FORMAT, _WITHOUT_HASHES):
            raise ValueError(f'it has the format "{found}"')
    except (ValueError, KeyError) as error:
        raise durable.Damaged(f'{path} is no manifest of "{_FORMAT}": {error}') from error
    if found == _WITHOUT_HASHES:
        raise ValueError(
            f"the corpus {folder} has no hashes of its files, as older versions wrote it; rebuild it with "
            "zaya data build --overwrite"
        )
    _check_mark(folder)
    return _parse(folder, values)


def _check_mark(folder: pathlib.Path) -> None:
    path = folder / COMMITTED
    if not path.is_file():
        raise durable.Damaged(f"{path} is missing; restore it, or rebuild the corpus")
    if path.read_bytes() != _mark(folder):
        raise durable.Damaged(
            f"{folder / MANIFEST} is not as it was written; restore it, or rebuild the corpus"
        )


def _parse(folder: pathlib.Path, values: dict[str, Any]) -> Corpus:
    try:
        splits = {name: _parse_split(values.pop(name)) for name in SPLITS}
        files = {name: StoredFile(**file) for name, file in values.pop("files").items()}
        return Corpus(folder=folder, files=files, **splits, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise durable.Damaged(f'{folder / MANIFEST} is no manifest of "{_FORMAT}": {error}') from error


def _parse_split(values: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in values.pop("shards"))
    return Split(shards=shards, **values)


def describe_missing(folder: str | os.PathLike[str]) -> str:
    """A sentence for a corpus whose folder is not there: which one beside it may be meant, what builds it."""
    path = pathlib.Path(folder)
    # Names with a leading dot are of corpora that are being built.
    corpora = [manifest.parent.name for manifest in path.parent.glob(f"[!.]*/{MANIFEST}")]
    close = difflib.get_close_matches(path.name, corpora, n=1)
    hint = f" (did you mean {path.with_name(close[0])}?)" if close else ""
    return f"there is no corpus at {path}{hint}; zaya data build {path} --source TEXTS builds one"


def _check_files(corpus: Corpus, *, hashed: bool) -> None:
    """Holds the files of a corpus against its manifest.

    Args:
      corpus: as its manifest has it.
      hashed: whether to read every byte; without, names and sizes tell.

    Raises:
      Damaged: with a sentence for each that is not as it was written.
    """
    found = {path.name for path in corpus.folder.iterdir()}
    damages = _map(lambda name: _damage_of(corpus, name, found, hashed=hashed), corpus.files)
    sentences = [damage for damage in damages if damage]
    sentences += [
        f"{corpus.folder / name} is not in {MANIFEST}; it was not written with the other files: remove it"
        for name in sorted(found - corpus.files.keys())
        if name.endswith(ENDINGS)  # others, such as its tokenizer, may have been laid beside the shards
    ]
    for split in map(corpus.split, SPLITS):
        if split.num_blocks != math.ceil(split.tokens / corpus.block_tokens):
            sentences.append(
                f"{corpus.folder / MANIFEST} counts {split.num_blocks} blocks of {corpus.block_tokens} for "
                f"{split.tokens} tokens; rebuild the corpus"
            )
    if sentences:
        raise durable.Damaged("\n".join(sentences))


def _damage_of(corpus: Corpus, name: str, found: set[str], *, hashed: bool) -> str | None:
    path, expected = corpus.folder / name, corpus.files[name]
    if name not in found:
        return f"{path} is missing; restore it, or rebuild the corpus"
    if not path.is_file():
        return f"{path} is no file; restore it, or rebuild the corpus"
    if (size := path.stat().st_size) != expected.bytes:
        return (
            f"{path} has {size} bytes, and the manifest says {expected.bytes}; restore it, or rebuild the "
            "corpus"
        )
    if hashed and durable.content_hash(path) != expected.xxh3_128:
        return f"{path} is not as it was written: its hash differs; restore it, or rebuild the corpus"
    return None
