"""The on-disk format of a corpus: token blocks in ArrayRecord files, and a manifest with hashes.

Each split is one stream of tokens, with documents separated by `delimiters`, cut into blocks of equal length.
A block is one record of an ArrayRecord file. The manifest contains the hash of every file; a separate marker
file contains the hash of the manifest. The hashes are needed because ArrayRecord reads a truncated file as an
empty one, and cannot tell a file of another corpus, both without an error.

Opening a corpus checks that every file exists and has the right size. Up to `HASHED_AT_OPENING` bytes it also
hashes every file. Hashing a larger corpus would delay the start of a run on all hosts by minutes; `zaya data
verify FOLDER` does it on demand, and `token_blocks` checks each block before it is trained on.
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

from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import read_json

_FORMAT = "zaya_jax corpus 2"
MANIFEST = "manifest.json"
COMMITTED = "committed"
"""Marker file with the hash of the manifest; written last."""
SPLITS = ("train", "validation")
ENDINGS = (".array_record", ".block_hashes")
"""Suffixes of files with tokens, and of files with the hashes of token blocks."""
HASHED_AT_OPENING = 4 * 2**30
"""Corpora up to this size in bytes are hashed completely when they are opened, in one or two seconds."""
# Number of threads that hash files; a single one would mostly wait for the disk.
_READERS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and hash of a file when the corpus was written.

    Attributes:
      bytes: size in bytes.
      xxh3_128: hash of the content, in hexadecimal.
    """

    bytes: int
    xxh3_128: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One ArrayRecord file of a split.

    Attributes:
      file: file name in the corpus folder.
      records: number of token blocks in the file.
      block_hashes: hash of the concatenated hashes of its blocks, in hexadecimal.
    """

    file: str
    records: int
    block_hashes: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Training or held-out documents as one stream of tokens.

    Attributes:
      shards: the split's files, in stream order.
      documents: number of documents.
      skipped: number of documents that were skipped because they are empty or not UTF-8.
      text_bytes: UTF-8 bytes of the documents.
      tokens: number of tokens, including delimiters but not padding.
      spelled_bytes: bytes that the tokens spell, which may differ from those of the text; None in corpora of
        older versions.
      gzip_9_bytes: size of the concatenated documents under gzip -9; None for the training split.
      xz_9_bytes: size of the concatenated documents under xz -9; None for the training split.
    """

    shards: tuple[Shard, ...]
    documents: int
    skipped: int
    text_bytes: int
    tokens: int
    spelled_bytes: int | None = None
    gzip_9_bytes: int | None = None
    xz_9_bytes: int | None = None

    @property
    def num_blocks(self) -> int:
        """Number of token blocks in all shards."""
        return sum(shard.records for shard in self.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus, as its manifest describes it.

    Attributes:
      folder: folder of the corpus.
      tokenizer: name or path of the tokenizer, as `load_tokenizer` accepts it.
      tokenizer_fingerprint: fingerprint of the tokenizer's content.
      vocab_size: V, vocabulary size of the tokenizer.
      bos_id: token that starts each document; None if the tokenizer has none.
      eos_id: token that ends each document.
      pad_id: token that pads the last block of a split.
      block_tokens: number of tokens per block.
      dtype: little-endian numpy type of a token in a block.
      source: description of where the text came from.
      train: training split.
      validation: held-out split.
      left_out: number of skipped files and records of the source, by reason.
      files: all files of the folder except the manifest and its marker, by name.
      chat_template: Jinja template of the chats in the corpus. Its blocks are then windows of whole chats
        (`zaya_jax.data.chats.packed_windows`), which can be read only at that length. None for documents.
      preferences: whether the chats are pairs of answers, preferred first, with each pair in one window.
      unpaired: whether the first answer of each pair has a label instead, and the second one is an answer to
        another prompt.
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
    unpaired: bool = False

    @property
    def delimiters(self) -> DocumentDelimiters:
        """Tokens between the documents of its streams."""
        return DocumentDelimiters(bos_id=self.bos_id, eos_id=self.eos_id, pad_id=self.pad_id)

    def split(self, name: str) -> Split:
        """Returns the split with a name.

        Raises:
          UserError: if the name is not "train" or "validation".
        """
        if name not in SPLITS:
            raise UserError(f'unknown split "{name}"; it must be "train" or "validation"')
        return self.train if name == "train" else self.validation

    def shard_paths(self, name: str) -> tuple[pathlib.Path, ...]:
        """Paths of the shards of a split, in stream order."""
        return tuple(self.folder / shard.file for shard in self.split(name).shards)


def fingerprint(corpus: Corpus) -> str:
    """A hash that is equal for corpora with the same tokens, independent of folder, sources and metadata."""
    splits = [
        [split.tokens, [shard.block_hashes for shard in split.shards]] for split in map(corpus.split, SPLITS)
    ]
    # These ids change how the same tokens are read.
    ids = [corpus.vocab_size, corpus.bos_id, corpus.eos_id, corpus.pad_id]
    content = [corpus.tokenizer_fingerprint, ids, corpus.block_tokens, corpus.dtype, splits]
    return durable.hash_of(json.dumps(content).encode()).hex()


# Writing


def describe_files(folder: pathlib.Path) -> dict[str, StoredFile]:
    """Sizes and hashes of the files of a corpus that is being written, by name."""
    # Sorted, so that the same files yield the same manifest, byte for byte.
    names = sorted(path.name for path in folder.iterdir())
    stored = _map(lambda name: _describe(folder / name), names)
    return dict(zip(names, stored, strict=True))


def write_manifest(corpus: Corpus) -> None:
    """Writes the manifest and its marker. The caller flushes the shards to disk before publishing them."""
    values = {"format": _FORMAT, **dataclasses.asdict(corpus)}
    # A corpus may be moved or copied to another machine.
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
    """Opens a corpus: reads its manifest and checks its files. A small corpus is hashed completely.

    Raises:
      UserError: if there is no corpus, or with one line for each file that is missing or damaged.
    """
    corpus = read_manifest(folder)
    _check_files(corpus, hashed=sum(file.bytes for file in corpus.files.values()) <= HASHED_AT_OPENING)
    return corpus


def verify_corpus(folder: str | os.PathLike[str]) -> Corpus:
    """Opens a corpus after comparing every byte of it with its hashes, whatever its size.

    Raises:
      UserError: as `open_corpus`.
    """
    corpus = read_manifest(folder)
    _check_files(corpus, hashed=True)
    return corpus


def read_manifest(folder: str | os.PathLike[str]) -> Corpus:
    """Reads the manifest of a corpus without looking at its other files.

    Raises:
      UserError: if there is no corpus, or its manifest is damaged.
    """
    if not pathlib.Path(folder).exists():
        raise UserError(describe_missing(folder))
    folder = pathlib.Path(folder).resolve()
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"there is no corpus at {folder}: it has no {MANIFEST}; zaya data build creates one")
    try:
        values = read_json(path)
        version = values.pop("format")
        if version != _FORMAT:
            raise UserError(f'unknown format "{version}"')
    except (ValueError, KeyError) as error:
        raise DamagedError(f'{path} is not a manifest of "{_FORMAT}": {error}') from error
    # Only now: a manifest of another format has a clearer error message.
    _check_mark(folder)
    return _parse(folder, values)


def _check_mark(folder: pathlib.Path) -> None:
    path = folder / COMMITTED
    if not path.is_file():
        raise DamagedError(f"{path} is missing; restore it, or rebuild the corpus")
    if path.read_bytes() != _mark(folder):
        raise DamagedError(f"{folder / MANIFEST} is not as it was written; restore it, or rebuild the corpus")


def _parse(folder: pathlib.Path, values: dict[str, Any]) -> Corpus:
    try:
        splits = {name: _parse_split(values.pop(name)) for name in SPLITS}
        files = {name: StoredFile(**file) for name, file in values.pop("files").items()}
        return Corpus(folder=folder, files=files, **splits, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f'{folder / MANIFEST} is not a manifest of "{_FORMAT}": {error}') from error


def _parse_split(values: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in values.pop("shards"))
    return Split(shards=shards, **values)


def describe_missing(folder: str | os.PathLike[str]) -> str:
    """An error message for a missing corpus, with a similarly named one and the command that builds it."""
    path = pathlib.Path(folder)
    # The names of corpora under construction start with a dot.
    corpora = [manifest.parent.name for manifest in path.parent.glob(f"[!.]*/{MANIFEST}")]
    # A misspelled name is the most frequent cause of a missing corpus.
    close = difflib.get_close_matches(path.name, corpora, n=1)
    hint = f" (did you mean {path.with_name(close[0])}?)" if close else ""
    return f"there is no corpus at {path}{hint}; zaya data build {path} --source TEXTS creates one"


def _check_files(corpus: Corpus, *, hashed: bool) -> None:
    """Compares the files of a corpus with its manifest.

    Args:
      corpus: corpus as its manifest describes it.
      hashed: whether to hash every file; otherwise only names and sizes are compared.

    Raises:
      DamagedError: with one line for each file that is missing or damaged.
    """
    present = {path.name for path in corpus.folder.iterdir()}
    damages = _map(lambda name: _damage_of(corpus, name, present, hashed=hashed), corpus.files)
    # All damages are reported at once, so that one restore can fix them.
    sentences = [damage for damage in damages if damage]
    sentences += [
        f"{corpus.folder / name} is not in {MANIFEST}; it was not written with the other files: remove it"
        for name in sorted(present - corpus.files.keys())
        # Other files, such as a tokenizer, may have been put next to the shards by the user.
        if name.endswith(ENDINGS)
    ]
    for split in map(corpus.split, SPLITS):
        # The manifest itself may be consistent with its hash but wrong, if an older version wrote it.
        if split.num_blocks != math.ceil(split.tokens / corpus.block_tokens):
            sentences.append(
                f"{corpus.folder / MANIFEST} counts {split.num_blocks} blocks of {corpus.block_tokens} for "
                f"{split.tokens} tokens; rebuild the corpus"
            )
    if sentences:
        raise DamagedError("\n".join(sentences))


def _damage_of(corpus: Corpus, name: str, present: set[str], *, hashed: bool) -> str | None:
    path, expected = corpus.folder / name, corpus.files[name]
    if name not in present:
        return f"{path} is missing; restore it, or rebuild the corpus"
    if not path.is_file():
        return f"{path} is not a file; restore it, or rebuild the corpus"
    # Comparing sizes costs nothing and detects truncated copies, the most common damage.
    if (size := path.stat().st_size) != expected.bytes:
        return (
            f"{path} has {size} bytes, but the manifest says {expected.bytes}; restore it, or rebuild the "
            "corpus"
        )
    if hashed and durable.content_hash(path) != expected.xxh3_128:
        return f"{path} is not as it was written: its hash differs; restore it, or rebuild the corpus"
    return None
