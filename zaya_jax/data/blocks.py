"""Token blocks in shards: written with a hash of each, and held against it whenever one is read.

ArrayRecord has checksums of its own, which tell a flipped bit but not another file in a shard's place: one
that an earlier corpus left, a copy of its neighbour, or what `zaya data build --overwrite` put there under a
run. So beside its shards a split has the hashes of all its blocks, and a block that is not what was written
is never given to anyone. That costs a microsecond where reading and unpacking the block take thirty or more,
and no more memory than ArrayRecord's own index of an open shard: a corpus of any size is as safe as a small
one.
"""

import bisect
import dataclasses
import itertools
import pathlib
from typing import Any

import grain
import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from zaya_jax import durable
from zaya_jax.data.shards import Corpus, Shard
from zaya_jax.data.tokenizer import Tokenizer

_HASH_BYTES = 16


def hashes_file(split: str) -> str:
    """The file, in the folder of a corpus, with the hashes of a split's blocks in the order of its stream."""
    return f"{split}.block_hashes"


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
    """Cuts a stream of tokens into blocks, one a record, and begins a new shard when one is full.

    Args:
      folder: of the shards.
      split: whose name theirs begin with.
      shard_format: of the blocks.
      first_shard: number of the first shard; what is before it is another's.
      hashes: the file to which the hashes of blocks are appended; that of the split when None.
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
        self._rest = np.zeros(0, shard_format.dtype)
        self._writer: Any = None
        self._hashes: list[bytes] = []
        self._shards: list[Shard] = []
        self._first_shard = first_shard
        self._hashes_file = hashes or folder / hashes_file(split)
        self._hashes_file.touch()

    def append(self, tokens: np.ndarray) -> None:
        """Takes the tokens of a document."""
        tokens = np.concatenate([self._rest, tokens])
        whole = len(tokens) // self._shard_format.block_tokens * self._shard_format.block_tokens
        for block in tokens[:whole].reshape(-1, self._shard_format.block_tokens):
            self.write(block.tobytes())
        self._rest = tokens[whole:]

    def finish(self) -> tuple[Shard, ...]:
        """Pads and writes the last block.

        Raises:
          ValueError: as when any shard is full: if ArrayRecord does not read back what it wrote.
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
        """Writes a block as it is."""
        if self._writer is None:
            # group_size:1, a record a chunk: random access decodes no neighbours.
            self._writer = array_record_module.ArrayRecordWriter(str(self._path()), "group_size:1")
        self._writer.write(raw)
        self._hashes.append(durable.hash_of(raw))
        if len(self._hashes) == self._shard_format.shard_blocks:
            self._close_shard()

    def _close_shard(self) -> None:
        path, hashes = self._path(), b"".join(self._hashes)
        self._writer.close()
        # A shard that ArrayRecord cut short would pass for an empty one.
        if (records := _count_records(path)) != len(self._hashes):
            raise ValueError(f"{path} has {records} records, and {len(self._hashes)} were written")
        with self._hashes_file.open("ab") as stream:
            stream.write(hashes)
        block_hashes = durable.hash_of(hashes).hex()
        self._shards.append(Shard(file=path.name, records=len(self._hashes), block_hashes=block_hashes))
        self._writer, self._hashes = None, []


def _count_records(path: pathlib.Path) -> int:
    """Records of a shard.

    Raises:
      RuntimeError: when ArrayRecord cannot read the file.
    """
    reader = array_record_module.ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
    records = reader.num_records()
    reader.close()  # which alone raises for a truncated file: to num_records that is an empty one
    return records


@dataclasses.dataclass(frozen=True)
class _WholeFile:
    """A shard as array_record's FileInstruction; without one it would open all shards to count records."""

    filename: str
    take: int
    skip: int = 0

    @property
    def examples_in_shard(self) -> int:
        """Records of the file, by the name that array_record asks for."""
        return self.take


class BlockReader:
    """Random access to the blocks of a split, each as it was written; several threads may read."""

    def __init__(self, corpus: Corpus, split: str):
        shards = corpus.split(split).shards
        self._corpus, self._split, self._shards = corpus, split, shards
        self._firsts = [0, *itertools.accumulate(shard.records for shard in shards)]
        files: Any = [_WholeFile(str(corpus.folder / shard.file), shard.records) for shard in shards]
        self._records = grain.sources.ArrayRecordDataSource(files)
        self._hashes: dict[int, bytes] = {}

    def __getitem__(self, number: int) -> bytes:
        """The tokens of a block of the stream.

        Raises:
          Damaged: naming the file, if it is not what was written.
        """
        shard = bisect.bisect_right(self._firsts, number) - 1
        place = number - self._firsts[shard]
        try:
            raw = self._records[number]
        except (RuntimeError, IndexError, ValueError) as error:  # ArrayRecord raises all three for damage
            raise durable.Damaged(
                f"{self._path(shard)} cannot be read: {error}; restore it, or rebuild the corpus"
            ) from error
        expected = self._hashes_of(shard)[place * _HASH_BYTES : (place + 1) * _HASH_BYTES]
        if durable.hash_of(raw) != expected:
            raise durable.Damaged(
                f"{self._path(shard)} is not as it was written: its block {place} is another; restore it, or "
                "rebuild the corpus"
            )
        return raw

    def _path(self, shard: int) -> pathlib.Path:
        return self._corpus.folder / self._shards[shard].file

    def _hashes_of(self, shard: int) -> bytes:
        # Without a lock: whoever reads them a second time finds the same.
        if shard not in self._hashes:
            self._hashes[shard] = self._read_hashes(shard)
        return self._hashes[shard]

    def _read_hashes(self, shard: int) -> bytes:
        path = self._corpus.folder / hashes_file(self._split)
        with path.open("rb") as stream:
            stream.seek(self._firsts[shard] * _HASH_BYTES)
            hashes = stream.read(self._shards[shard].records * _HASH_BYTES)
        if durable.hash_of(hashes).hex() != self._shards[shard].block_hashes:
            raise durable.Damaged(f"{path} is not as it was written; restore it, or rebuild the corpus")
        return hashes
