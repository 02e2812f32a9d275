"""Jobs of a corpus build, run in worker processes: texts to tokens, and tokens to shards.

Each job depends only on its inputs. It writes its files first and a JSON record of them last, so a build that
was killed reuses every job that has a record. The files are not flushed to disk, which would take longer than
the work itself; instead, a resumed build compares them with the hashes in their records.
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

from zaya_jax.data.corpora.held_out_bytes import divide_bytes
from zaya_jax.data.corpora.shards import SPLITS, Shard
from zaya_jax.data.corpora.token_blocks import BlockWriter, ShardFormat
from zaya_jax.data.tokenizers.special_tokens import SpecialTokenNames
from zaya_jax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.errors import UserError
from zaya_jax.files import durable

HELD_OUT = SPLITS[1]
BYTES_SUFFIX = ".token_bytes"
"""Suffix of the file with the original bytes of each held-out token of a part."""


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Tokens of a part in one split. The file is absent if the part has no text in the split.

    Attributes:
      tokens: number of tokens.
      spelled_bytes: UTF-8 bytes that the tokens spell.
      xxh3_128: hash of the file, in hexadecimal.
    """

    tokens: int
    spelled_bytes: int
    xxh3_128: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The tokens of a batch of consecutive documents.

    Attributes:
      key: hash of the texts and their splits.
      splits: token file of each split, by name.
      held_out_bytes: hash of the file with the original bytes of each held-out token; None if the part has no
        held-out text.
    """

    key: str
    splits: Mapping[str, TokenFile]
    held_out_bytes: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """Converts texts to tokens.

    Attributes:
      base_path: path of the part's files without a suffix.
      key: key of the part.
      texts: (split, UTF-8 bytes) of each text, in order.
    """

    base_path: pathlib.Path
    key: str
    texts: Sequence[tuple[str, bytes]]

    def run(self, shard_format: ShardFormat) -> Part:
        """Writes the files of the part, and returns its record."""
        tokenizer, dtype = shard_format.tokenizer, shard_format.dtype
        # Wrapping an empty document yields the delimiters alone: one or two tokens.
        *begin, end = (np.array([border], dtype) for border in tokenizer.delimiters.wrap([]))
        pieces: dict[str, list[np.ndarray]] = {}
        held_out: list[np.ndarray] = []
        documents = tokenizer.encode_documents(raw.decode("utf-8") for _, raw in self.texts)
        for (split, raw), ids in zip(self.texts, documents, strict=True):
            pieces.setdefault(split, []).extend([*begin, ids.astype(dtype), end])
            if split == HELD_OUT:
                # Delimiters before a document have no bytes of text.
                of_text = divide_bytes(tokenizer.spelled_bytes[ids], len(raw))
                held_out += [np.zeros(len(begin), of_text.dtype), of_text]
        splits = {
            split: self._write(split, np.concatenate(tokens), tokenizer) for split, tokens in pieces.items()
        }
        part = Part(key=self.key, splits=splits, held_out_bytes=self._write_bytes(held_out))
        # Written last: the record marks the part as finished.
        _write_record(self.base_path.with_suffix(".json"), dataclasses.asdict(part))
        return part

    def _write(self, split: str, tokens: np.ndarray, tokenizer: Tokenizer) -> TokenFile:
        content = tokens.tobytes()
        # No fsync: after a crash of the machine, the hash in the record exposes a file that was not flushed.
        self.base_path.with_suffix(f".{split}").write_bytes(content)
        spelled = int(tokenizer.spelled_bytes[tokens].sum(dtype=np.int64))
        return TokenFile(len(tokens), spelled, durable.hash_of(content).hex())

    def _write_bytes(self, pieces: list[np.ndarray]) -> str | None:
        if not pieces:
            return None
        content = np.concatenate(pieces).tobytes()
        self.base_path.with_suffix(BYTES_SUFFIX).write_bytes(content)
        return durable.hash_of(content).hex()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """A shard file that was written.

    Attributes:
      shard: the shard's entry in the manifest.
      tokens: number of tokens in it, without padding.
      xxh3_128: hash of the file, in hexadecimal.
    """

    shard: Shard
    tokens: int
    xxh3_128: str


@dataclasses.dataclass(frozen=True)
class TokenSpan:
    """A span of a part's tokens that goes into one shard.

    Attributes:
      file: token file of the part.
      first: index of the first token.
      count: number of tokens.
    """

    file: pathlib.Path
    first: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardJob:
    """Writes a shard from spans of tokens.

    Attributes:
      folder: folder of the shards.
      base_path: path of the shard's record and hashes without a suffix.
      split: split of the shard.
      number: number of the shard in its split.
      spans: token spans, in stream order.
    """

    folder: pathlib.Path
    base_path: pathlib.Path
    split: str
    number: int
    spans: Sequence[TokenSpan]

    def run(self, shard_format: ShardFormat) -> WrittenShard:
        """Writes the shard, its hashes and its record, and returns the record."""
        hashes = self.base_path.with_suffix(".hashes")
        # BlockWriter appends, and a killed job may have left the file behind.
        hashes.unlink(missing_ok=True)
        writer = BlockWriter(self.folder, self.split, shard_format, first_shard=self.number, hashes=hashes)
        for span in self.spans:
            size = np.dtype(shard_format.dtype).itemsize
            # Reads only the span, since a large part may belong to several shards.
            writer.append(np.fromfile(span.file, shard_format.dtype, span.count, offset=span.first * size))
        (shard,) = writer.finish()
        # Hashed from disk and not from memory, so that a failed write is noticed.
        xxh3_128 = durable.content_hash(self.folder / shard.file)
        tokens = sum(span.count for span in self.spans)
        written = WrittenShard(shard=shard, tokens=tokens, xxh3_128=xxh3_128)
        _write_record(self.base_path.with_suffix(".json"), dataclasses.asdict(written))
        return written


def _write_record(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values))


Job = TokenizeJob | ShardJob
Submit = Callable[[Job], "Future[Any]"]
"""Starts a job now or later, and returns a future of its result."""


@contextlib.contextmanager
def workers(count: int, shard_format: ShardFormat) -> Iterator[Submit]:
    """Starts worker processes, or runs jobs in this process if `count` is 1.

    The processes end with the context, or when this process is killed.

    Raises:
      UserError: within the context, if a worker process ends unexpectedly.
    """
    if count == 1:
        yield lambda job: completed(job.run(shard_format))
        return
    tokenizer = shard_format.tokenizer
    arguments = (
        tokenizer.name,
        tokenizer.names,
        tokenizer.fingerprint,
        shard_format.block_tokens,
        shard_format.shard_blocks,
    )
    # Not fork: a process that is forked from one with threads, such as those of jax, can deadlock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, _start_worker, arguments)
    try:
        yield lambda job: pool.submit(_run_job, job)
    finally:
        # On an error, the jobs that have not started are dropped instead of completed.
        pool.shutdown(cancel_futures=True)


def completed(value: Any) -> "Future[Any]":
    """A future that already has its result."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# The shard format of a worker process, the same for all its jobs.
_worker_formats: list[ShardFormat] = []


def _start_worker(
    tokenizer: str, names: SpecialTokenNames, fingerprint: str, block_tokens: int, shard_blocks: int
) -> None:
    """Initializes a worker process."""
    # A terminal sends Ctrl-C to all processes; the parent handles it and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # The tokenizer is loaded again by name, because its native object cannot be sent to another process.
    loaded = load_tokenizer(tokenizer, names)
    # The file may have been replaced between the start of the build and the start of this process.
    if loaded.fingerprint != fingerprint:
        raise UserError(f"the tokenizer {tokenizer} changed during the build; run the command again")
    _worker_formats.append(
        ShardFormat(tokenizer=loaded, block_tokens=block_tokens, shard_blocks=shard_blocks)
    )


def _exit_with_parent() -> None:
    """Exits when the parent was killed: the workers of a pool would otherwise wait for jobs forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_job(job: Job) -> Part | WrittenShard:
    return job.run(_worker_formats[0])
