"""What is done of a corpus by processes beside each other: texts to tokens, and tokens to shards.

Each task is a function of what it is given and leaves files whose record is written last: what a killed
build has done is found by its records, and is as good as done again. Nothing waits for the disk, which would
take longer than the work: whoever goes on holds files against the hashes in their records.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import numpy as np

from zaya_jax import durable
from zaya_jax.data.blocks import BlockWriter, ShardFormat
from zaya_jax.data.shards import Shard
from zaya_jax.data.specials import SpecialNames
from zaya_jax.data.tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Tokens of a part that are in one split: a file without any is not written.

    Attributes:
      tokens: how many.
      xxh3_128: hash of the file.
    """

    tokens: int
    xxh3_128: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Texts that come one after the other, as tokens.

    Attributes:
      key: hash of the texts and of their splits.
      splits: their tokens.
    """

    key: str
    splits: Mapping[str, TokenFile]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartTask:
    """Makes tokens of texts.

    Attributes:
      place: of the part's files, whose names begin with it.
      key: of the part.
      texts: in their order, each with its split.
    """

    place: pathlib.Path
    key: str
    texts: Sequence[tuple[str, bytes]]

    def run(self, shard_format: ShardFormat) -> Part:
        """Writes the files of the part."""
        tokenizer, dtype = shard_format.tokenizer, shard_format.dtype
        *begin, end = (np.array([border], dtype) for border in tokenizer.borders.lay_out([]))
        pieces: dict[str, list[np.ndarray]] = {}
        documents = tokenizer.encode_documents(raw.decode("utf-8") for _, raw in self.texts)
        for (split, _), ids in zip(self.texts, documents, strict=True):
            pieces.setdefault(split, []).extend([*begin, ids.astype(dtype), end])
        splits = {split: self._write(split, np.concatenate(tokens)) for split, tokens in pieces.items()}
        part = Part(key=self.key, splits=splits)
        _write_record(self.place.with_suffix(".json"), dataclasses.asdict(part))
        return part

    def _write(self, split: str, tokens: np.ndarray) -> TokenFile:
        content = tokens.tobytes()
        self.place.with_suffix(f".{split}").write_bytes(content)
        return TokenFile(len(tokens), durable.hash_of(content).hex())


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """A shard that is on the disk.

    Attributes:
      shard: as the manifest has it.
      tokens: in it, without padding.
      xxh3_128: hash of its file.
    """

    shard: Shard
    tokens: int
    xxh3_128: str


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Tokens of a part that go into a shard.

    Attributes:
      file: of the part.
      first: token of it.
      count: of tokens.
    """

    file: pathlib.Path
    first: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardTask:
    """Makes a shard of tokens.

    Attributes:
      folder: of the shards.
      place: of its record and its hashes, whose names begin with it.
      split: of the shard.
      number: in its split.
      stretches: of tokens, in their order.
    """

    folder: pathlib.Path
    place: pathlib.Path
    split: str
    number: int
    stretches: Sequence[Stretch]

    def run(self, shard_format: ShardFormat) -> WrittenShard:
        """Writes the shard, its hashes and its record."""
        hashes = self.place.with_suffix(".hashes")
        hashes.unlink(missing_ok=True)
        writer = BlockWriter(self.folder, self.split, shard_format, first_shard=self.number, hashes=hashes)
        for stretch in self.stretches:
            size = np.dtype(shard_format.dtype).itemsize
            writer.append(
                np.fromfile(stretch.file, shard_format.dtype, stretch.count, offset=stretch.first * size)
            )
        (shard,) = writer.finish()
        xxh3_128 = durable.content_hash(self.folder / shard.file)
        tokens = sum(stretch.count for stretch in self.stretches)
        written = WrittenShard(shard=shard, tokens=tokens, xxh3_128=xxh3_128)
        _write_record(self.place.with_suffix(".json"), dataclasses.asdict(written))
        return written


def _write_record(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values))


Task = PartTask | ShardTask
Submit = Callable[[Task], "Future[Any]"]
"""Has a task done now or later; the future has its result."""


@contextlib.contextmanager
def workers(count: int, shard_format: ShardFormat) -> Iterator[Submit]:
    """So many processes that do tasks, or this one; they end with the block, or with this process.

    Raises:
      ValueError: within the block, when one of them ended before its time.
    """
    if count == 1:
        yield lambda task: _do_here(task, shard_format)
        return
    tokenizer = shard_format.tokenizer
    arguments = (
        tokenizer.name,
        tokenizer.names,
        tokenizer.fingerprint,
        shard_format.block_tokens,
        shard_format.shard_blocks,
    )
    # A process that is forked beside threads, as those of jax are, may wait for ever.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, _begin, arguments)
    try:
        yield lambda task: pool.submit(_do, task)
    finally:
        pool.shutdown(cancel_futures=True)


def _do_here(task: Task, shard_format: ShardFormat) -> "Future[Any]":
    done: Future[Any] = Future()
    done.set_result(task.run(shard_format))
    return done


_at_work: list[ShardFormat] = []
"""Of a worker process: the format that all its tasks have."""


def _begin(
    tokenizer: str, names: SpecialNames, fingerprint: str, block_tokens: int, shard_blocks: int
) -> None:
    """Gets a worker process ready."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that waits for it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loaded = load_tokenizer(tokenizer, names)
    if loaded.fingerprint != fingerprint:
        raise ValueError(f"the tokenizer {tokenizer} has changed while a corpus was being built")
    _at_work.append(ShardFormat(tokenizer=loaded, block_tokens=block_tokens, shard_blocks=shard_blocks))


def _end_with_parent() -> None:
    """A pool's processes wait for more work for ever when whoever began them was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(task: Task) -> Part | WrittenShard:
    return task.run(_at_work[0])
