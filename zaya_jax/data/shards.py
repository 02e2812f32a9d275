"""Shards: a corpus on disk, token blocks in ArrayRecord files beside a manifest.

Each split is one stream of tokens, BOS document EOS, BOS document EOS, ..., cut into blocks of one
length; a block is a record of an ArrayRecord file. The manifest says what must be there, because
ArrayRecord gives a truncated file as an empty one without an error.
"""

import dataclasses
import difflib
import json
import math
import os
import pathlib
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from zaya_jax import durable
from zaya_jax.data.tokenizer import Tokenizer

_FORMAT = "zaya_jax corpus 1"
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """An ArrayRecord file of a split.

    Attributes:
      file: its name in the corpus folder.
      records: token blocks in it.
      bytes: its size on disk.
    """

    file: str
    records: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Training or held-out documents as one stream of tokens.

    Attributes:
      shards: the files, in the order of the stream.
      documents: files of text in it.
      skipped: files that were left out, being empty or not UTF-8.
      text_bytes: UTF-8 bytes of the documents.
      tokens: with each document's BOS and EOS, without padding.
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
    """A corpus whose files were found whole.

    Attributes:
      folder: where it lies.
      tokenizer: what `load_tokenizer` was asked for when it was built.
      tokenizer_fingerprint: of that tokenizer's content.
      vocab_size: V of the tokenizer.
      bos_id: begins each document.
      eos_id: ends each document.
      pad_id: fills up the last block of a split.
      block_tokens: tokens a record.
      dtype: little-endian type of a token in a record.
      source: where the text came from.
      train: the training split.
      validation: the held-out split.
    """

    folder: pathlib.Path
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    block_tokens: int
    dtype: str
    source: str
    train: Split
    validation: Split

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


# Writing


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFormat:
    """How tokens are laid out in shards.

    Attributes:
      tokenizer: that makes the tokens.
      block_tokens: tokens a record.
      shard_blocks: records a shard file.
    """

    tokenizer: Tokenizer
    block_tokens: int
    shard_blocks: int

    @property
    def dtype(self) -> str:
        """Of a token in a record, little-endian."""
        return "<u2" if self.tokenizer.vocab_size <= 2**16 else "<u4"


class BlockWriter:
    """Cuts a stream of tokens into blocks, one a record, and begins a new shard when one is full."""

    def __init__(self, folder: pathlib.Path, split: str, shard_format: ShardFormat):
        self._folder = folder
        self._split = split
        self._shard_format = shard_format
        self._rest = np.zeros(0, shard_format.dtype)
        self._writer: Any = None
        self._records = 0
        self._shards: list[Shard] = []

    def append(self, tokens: np.ndarray) -> None:
        """Takes the tokens of a document."""
        tokens = np.concatenate([self._rest, tokens])
        whole = len(tokens) // self._shard_format.block_tokens * self._shard_format.block_tokens
        for block in tokens[:whole].reshape(-1, self._shard_format.block_tokens):
            self._write(block)
        self._rest = tokens[whole:]

    def finish(self) -> tuple[Shard, ...]:
        """Pads and writes the last block."""
        if len(self._rest):
            missing = self._shard_format.block_tokens - len(self._rest)
            self._write(np.pad(self._rest, (0, missing), constant_values=self._shard_format.tokenizer.pad_id))
        if self._writer is not None:
            self._close_shard()
        return tuple(self._shards)

    def _path(self) -> pathlib.Path:
        return self._folder / f"{self._split}-{len(self._shards):05d}.array_record"

    def _write(self, block: np.ndarray) -> None:
        if self._writer is None:
            # group_size:1, a record a chunk: random access decodes no neighbours.
            self._writer = array_record_module.ArrayRecordWriter(str(self._path()), "group_size:1")
        self._writer.write(block.tobytes())
        self._records += 1
        if self._records == self._shard_format.shard_blocks:
            self._close_shard()

    def _close_shard(self) -> None:
        path = self._path()
        self._writer.close()
        self._shards.append(Shard(file=path.name, records=self._records, bytes=path.stat().st_size))
        self._writer, self._records = None, 0


def write_manifest(corpus: Corpus) -> None:
    """Says beside the shards what must be there; who publishes the folder has the shards on the disk."""
    values = {"format": _FORMAT, **dataclasses.asdict(corpus)}
    del values["folder"]
    durable.write(corpus.folder / MANIFEST, json.dumps(values, indent=2) + "\n")


# Opening


def open_corpus(folder: str | os.PathLike[str]) -> Corpus:
    """Reads a corpus's manifest and checks that every shard is there and whole.

    Raises:
      ValueError: when there is no corpus, or with a sentence for each shard that is missing or differs.
    """
    if not pathlib.Path(folder).exists():
        raise ValueError(describe_missing(folder))
    folder = pathlib.Path(folder).resolve()
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"there is no corpus at {folder}: it has no {MANIFEST}; zaya corpus builds one")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = values.pop("format")
        if found != _FORMAT:
            raise ValueError(f'it has the format "{found}"')
        splits = {name: _parse_split(values.pop(name)) for name in SPLITS}
        corpus = Corpus(folder=folder, **splits, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{path} is no manifest of "{_FORMAT}": {error}') from error
    sentences = [s for name in SPLITS for s in _check_shards(corpus, corpus.split(name))]
    if sentences:
        raise ValueError("\n".join(sentences))
    return corpus


def fingerprint(corpus: Corpus) -> str:
    """What another corpus does not have: a run that goes on must read the tokens that it began with."""
    return durable.sha256_of_file(corpus.folder / MANIFEST)


def describe_missing(folder: str | os.PathLike[str]) -> str:
    """A sentence for a corpus whose folder is not there: which one beside it may be meant, what builds it."""
    path = pathlib.Path(folder)
    # Names with a leading dot are of corpora that are being built.
    corpora = [manifest.parent.name for manifest in path.parent.glob(f"[!.]*/{MANIFEST}")]
    close = difflib.get_close_matches(path.name, corpora, n=1)
    hint = f" (did you mean {path.with_name(close[0])}?)" if close else ""
    return f"there is no corpus at {path}{hint}; zaya corpus {path} --source TEXTS builds one"


def _parse_split(values: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in values.pop("shards"))
    return Split(shards=shards, **values)


def _check_shards(corpus: Corpus, split: Split) -> list[str]:
    """A sentence for each shard that is not as the manifest says, and for a stream of another length."""
    sentences = [s for shard in split.shards if (s := _check_shard(corpus.folder / shard.file, shard))]
    if split.num_blocks != math.ceil(split.tokens / corpus.block_tokens):
        sentences.append(
            f"{corpus.folder / MANIFEST} counts {split.num_blocks} blocks of {corpus.block_tokens} for "
            f"{split.tokens} tokens; rebuild the corpus"
        )
    return sentences


def _check_shard(path: pathlib.Path, shard: Shard) -> str | None:
    if not path.is_file():
        return f"{path} is missing; restore it, or rebuild the corpus"
    if (size := path.stat().st_size) != shard.bytes:
        return (
            f"{path} has {size} bytes, and the manifest says {shard.bytes}; restore it, or rebuild the corpus"
        )
    try:
        records = _count_records(path)
    except RuntimeError as error:
        return f"{path} cannot be read; restore it, or rebuild the corpus: {error}"
    if records != shard.records:
        return (
            f"{path} has {records} records, and the manifest says {shard.records}; restore it, or rebuild "
            "the corpus"
        )
    return None


def _count_records(path: pathlib.Path) -> int:
    """Records of a shard.

    Raises:
      RuntimeError: when ArrayRecord cannot read the file.
    """
    reader = array_record_module.ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
    records = reader.num_records()
    reader.close()  # which alone raises for a truncated file: to num_records that is an empty one
    return records
