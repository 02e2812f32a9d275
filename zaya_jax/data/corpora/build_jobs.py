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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import numpy as np

from zaya_jax.data.corpora.held_out_bytes import divide_bytes
from zaya_jax.data.corpora.shards import SPLITS, Shard
from zaya_jax.data.corpora.token_blocks import BlockWriter, ShardFormat
from zaya_jax.data.tokenizers.special_tokens import SpecialTokenNames
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
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


def tokenize(
    shard_format: ShardFormat, *, base_path: pathlib.Path, key: str, texts: Sequence[tuple[str, bytes]]
) -> dict[str, TokenFile]:
    """Converts a part, a batch of consecutive texts, to tokens, and writes its files.

    Args:
      shard_format: how tokens are stored.
      base_path: path of the part's files without a suffix.
      key: hash of the texts and their splits.
      texts: (split, UTF-8 bytes) of each text, in order.

    Returns:
      The token file of each split, by name.
    """
    tokenizer, dtype = shard_format.tokenizer, shard_format.dtype
    # Wrapping an empty document yields the delimiters alone: one or two tokens.
    *begin, end = (np.array([border], dtype) for border in tokenizer.delimiters.wrap([]))
    pieces: dict[str, list[np.ndarray]] = {}
    held_out: list[np.ndarray] = []
    documents = tokenizer.encode_documents(raw.decode("utf-8") for _, raw in texts)
    for (split, raw), ids in zip(texts, documents, strict=True):
        pieces.setdefault(split, []).extend([*begin, ids.astype(dtype), end])
        if split == HELD_OUT:
            # Delimiters before a document have no bytes of text.
            of_text = divide_bytes(tokenizer.spelled_bytes[ids], len(raw))
            held_out += [np.zeros(len(begin), of_text.dtype), of_text]
    splits = {}
    for split, arrays in pieces.items():
        tokens = np.concatenate(arrays)
        spelled = int(tokenizer.spelled_bytes[tokens].sum(dtype=np.int64))
        splits[split] = TokenFile(len(tokens), spelled, _write(base_path.with_suffix(f".{split}"), tokens))
    record = {
        "key": key,
        "splits": {split: dataclasses.asdict(file) for split, file in splits.items()},
        # A part without held-out text has no such file.
        "held_out_bytes": _write(base_path.with_suffix(BYTES_SUFFIX), np.concatenate(held_out))
        if held_out
        else None,
    }
    # Written last: the record marks the part as finished.
    base_path.with_suffix(".json").write_text(json.dumps(record))
    return splits


def _write(path: pathlib.Path, values: np.ndarray) -> str:
    """Writes an array, and returns the hash of its bytes."""
    content = values.tobytes()
    # No fsync: after a crash of the machine, the hash in the record exposes a file that was not flushed.
    path.write_bytes(content)
    return durable.hash_of(content).hex()


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


def write_shard(
    shard_format: ShardFormat,
    *,
    folder: pathlib.Path,
    base_path: pathlib.Path,
    split: str,
    number: int,
    spans: Sequence[TokenSpan],
) -> Shard:
    """Writes a shard, its hashes and its record, and returns its entry in the manifest.

    Args:
      shard_format: how tokens are stored.
      folder: folder of the shards.
      base_path: path of the shard's record and hashes without a suffix.
      split: split of the shard.
      number: number of the shard in its split.
      spans: token spans, in stream order.
    """
    hashes = base_path.with_suffix(".hashes")
    # BlockWriter appends, and a killed job may have left the file behind.
    hashes.unlink(missing_ok=True)
    writer = BlockWriter(folder, split, shard_format, first_shard=number, hashes=hashes)
    for span in spans:
        size = np.dtype(shard_format.dtype).itemsize
        # Reads only the span, since a large part may belong to several shards.
        writer.append(np.fromfile(span.file, shard_format.dtype, span.count, offset=span.first * size))
    (shard,) = writer.finish()
    # Tokens without padding, and a hash from disk and not from memory, so that a failed write is noticed.
    num_tokens, xxh3_128 = sum(span.count for span in spans), durable.content_hash(folder / shard.file)
    record = {"shard": dataclasses.asdict(shard), "tokens": num_tokens, "xxh3_128": xxh3_128}
    base_path.with_suffix(".json").write_text(json.dumps(record))
    return shard


Job = Callable[[ShardFormat], Any]
"""One of the functions above with all other arguments."""
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
        yield lambda job: completed(job(shard_format))
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
    """Loads the tokenizer in a worker process, which ends with its parent."""
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


def _run_job(job: Job) -> Any:
    return job(_worker_formats[0])
