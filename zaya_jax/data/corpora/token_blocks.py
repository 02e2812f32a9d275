"""Writes token blocks to shards with a hash of each block, and verifies the hash whenever a block is read.

ArrayRecord's own checksums detect a flipped bit, but not a shard that was replaced by another file: one from
an earlier corpus, a copy of a neighboring shard, or the output of `zaya data build --overwrite` during a run.
Each split therefore has a file with the hashes of all its blocks, and a block that does not match is never
returned. The check costs about a microsecond per block, against thirty or more for reading and decompressing
it, and no more memory than ArrayRecord's own index of an open shard.
"""

import bisect
import dataclasses
import itertools
import pathlib
from typing import Any

import grain
import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from zaya_jax.data.corpora.shards import Corpus, Shard
from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.files import durable

_HASH_BYTES = 16


def hashes_file(split: str) -> str:
    """Name of the file in a corpus folder with the hashes of a split's blocks, in stream order."""
    return f"{split}.block_hashes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFormat:
    """How tokens are stored in shards.

    Attributes:
      tokenizer: tokenizer that produces the tokens.
      block_tokens: number of tokens per block.
      shard_blocks: number of blocks per shard file.
    """

    tokenizer: Tokenizer
    block_tokens: int
    shard_blocks: int

    @property
    def dtype(self) -> str:
        """Little-endian numpy type of a token; two bytes if the vocabulary fits."""
        return "<u2" if self.tokenizer.vocab_size <= 2**16 else "<u4"


class BlockWriter:
    """Cuts a stream of tokens into blocks, and starts a new shard when one is full.

    Args:
      folder: folder of the shards.
      split: name of the split, which starts the file names.
      shard_format: format of the blocks.
      first_shard: number of the first shard; another process writes the shards before it.
      hashes: file to which the hashes of blocks are appended; None means the file of the split.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        split: str,
        shard_format: ShardFormat,
        *,
        first_shard: int = 0,
        hashes: pathlib.Path | None = None,
    ):
        self._folder = folder
        self._split = split
        self._shard_format = shard_format
        # Tokens that do not fill a block yet.
        self._rest = np.zeros(0, shard_format.dtype)
        self._writer: Any = None
        self._hashes: list[bytes] = []
        self._shards: list[Shard] = []
        self._first_shard = first_shard
        self._hashes_file = hashes or folder / hashes_file(split)
        self._hashes_file.touch()

    def append(self, tokens: np.ndarray) -> None:
        """Appends the tokens of one or several documents to the stream."""
        # Blocks ignore document boundaries: the loader cuts sequences of any length out of the stream.
        tokens = np.concatenate([self._rest, tokens])
        whole = len(tokens) // self._shard_format.block_tokens * self._shard_format.block_tokens
        for block in tokens[:whole].reshape(-1, self._shard_format.block_tokens):
            self.write(block.tobytes())
        self._rest = tokens[whole:]

    def finish(self) -> tuple[Shard, ...]:
        """Pads and writes the last block, and returns all shards.

        Raises:
          UserError: if ArrayRecord does not read back what it wrote.
        """
        if len(self._rest):
            missing = self._shard_format.block_tokens - len(self._rest)
            pad_id = self._shard_format.tokenizer.pad_id
            self.write(np.pad(self._rest, (0, missing), constant_values=pad_id).tobytes())
        if self._writer is not None:
            self._close_shard()
        return tuple(self._shards)

    def _path(self) -> pathlib.Path:
        number = self._first_shard + len(self._shards)
        return self._folder / f"{self._split}-{number:05d}.array_record"

    def write(self, raw: bytes) -> None:
        """Writes the bytes of a block without a change."""
        if self._writer is None:
            # group_size:1 stores one block per chunk, so that random access decodes no neighboring blocks.
            self._writer = array_record_module.ArrayRecordWriter(str(self._path()), "group_size:1")
        self._writer.write(raw)
        self._hashes.append(durable.hash_of(raw))
        if len(self._hashes) == self._shard_format.shard_blocks:
            self._close_shard()

    def _close_shard(self) -> None:
        path, hashes = self._path(), b"".join(self._hashes)
        self._writer.close()
        # ArrayRecord would read a shard that was cut short as an empty one, without an error.
        if (records := _count_records(path)) != len(self._hashes):
            raise UserError(
                f"{path} has {records} records, but {len(self._hashes)} were written; the disk may be full"
            )
        with self._hashes_file.open("ab") as stream:
            stream.write(hashes)
        block_hashes = durable.hash_of(hashes).hex()
        self._shards.append(Shard(file=path.name, records=len(self._hashes), block_hashes=block_hashes))
        self._writer, self._hashes = None, []


def _count_records(path: pathlib.Path) -> int:
    """Counts the records of a shard.

    Raises:
      RuntimeError: if ArrayRecord cannot read the file.
    """
    reader = array_record_module.ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
    records = reader.num_records()
    reader.close()  # only close() raises an error for a truncated file; num_records() returns 0
    return records


@dataclasses.dataclass(frozen=True)
class _WholeFile:
    """A shard as array_record's FileInstruction, which avoids opening all shards to count records."""

    filename: str
    take: int
    skip: int = 0

    @property
    def examples_in_shard(self) -> int:
        """Number of records in the file; array_record requires this name."""
        return self.take


class BlockReader:
    """Random access to the verified blocks of a split. Several threads may read at the same time."""

    def __init__(self, corpus: Corpus, split: str):
        shards = corpus.split(split).shards
        self._corpus, self._split, self._shards = corpus, split, shards
        self._firsts = [0, *itertools.accumulate(shard.records for shard in shards)]
        files: Any = [_WholeFile(str(corpus.folder / shard.file), shard.records) for shard in shards]
        # The manifest has the number of records, so no shard is opened before its first read.
        self._records = grain.sources.ArrayRecordDataSource(files)
        self._hashes: dict[int, bytes] = {}

    def __getitem__(self, number: int) -> bytes:
        """Returns the bytes of a block of the stream.

        Raises:
          DamagedError: naming the file, if the block is damaged.
        """
        # Blocks are numbered across all shards of a split.
        shard = bisect.bisect_right(self._firsts, number) - 1
        index = number - self._firsts[shard]
        try:
            raw = self._records[number]
        # ArrayRecord raises any of these three for a damaged file.
        except (RuntimeError, IndexError, ValueError) as error:
            raise DamagedError(
                f"{self._path(shard)} cannot be read: {error}; restore it, or rebuild the corpus"
            ) from error
        expected = self._hashes_of(shard)[index * _HASH_BYTES : (index + 1) * _HASH_BYTES]
        if durable.hash_of(raw) != expected:
            raise DamagedError(
                f"{self._path(shard)} is not as it was written: the hash of its block {index} differs; "
                "restore it, or rebuild the corpus"
            )
        return raw

    def _path(self, shard: int) -> pathlib.Path:
        return self._corpus.folder / self._shards[shard].file

    def _hashes_of(self, shard: int) -> bytes:
        # No lock is needed: threads that read the hashes at the same time store equal values.
        if shard not in self._hashes:
            self._hashes[shard] = self._read_hashes(shard)
        return self._hashes[shard]

    def _read_hashes(self, shard: int) -> bytes:
        path = self._corpus.folder / hashes_file(self._split)
        with path.open("rb") as stream:
            stream.seek(self._firsts[shard] * _HASH_BYTES)
            hashes = stream.read(self._shards[shard].records * _HASH_BYTES)
        # The manifest has a hash of these hashes, so that a damaged hash file is not blamed on a shard.
        if durable.hash_of(hashes).hex() != self._shards[shard].block_hashes:
            raise DamagedError(f"{path} is not as it was written; restore it, or rebuild the corpus")
        return hashes
