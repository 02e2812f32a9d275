"""Builds the shards of a corpus with one or several processes, and continues a build that was killed.

One process reads the source and assigns each text to a split. Consecutive texts form a part. Worker processes
convert parts to tokens, and write a shard as soon as there are enough tokens. Both leave files with a record.
A build that was killed reads its source again, which is fast, and repeats only the jobs that have no record.
A hash of its texts identifies a part, so that nothing is reused if the source has changed. The bytes of the
corpus do not depend on the number of processes.
"""

import collections
import contextlib
import dataclasses
import fcntl
import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from zaya_jax.data.corpora.build_jobs import (
    BYTES_SUFFIX,
    HELD_OUT,
    Submit,
    TokenFile,
    TokenSpan,
    completed,
    tokenize,
    workers,
    write_shard,
)
from zaya_jax.data.corpora.compression_baseline import CompressedSize
from zaya_jax.data.corpora.document_stream import DocumentStream
from zaya_jax.data.corpora.held_out_bytes import FILE as BYTES_FILE
from zaya_jax.data.corpora.held_out_bytes import join_parts
from zaya_jax.data.corpora.shards import SPLITS, Shard, Split
from zaya_jax.data.corpora.split import SplitRule
from zaya_jax.data.corpora.token_blocks import ShardFormat, hashes_file
from zaya_jax.data.sources.documents import Document
from zaya_jax.errors import UserError
from zaya_jax.files import durable

PART_BYTES, PART_TEXTS = 4 * 2**20, 2**14
"""Size at which a part is complete. A larger text is a separate part."""
MIN_PARALLEL_BYTES = 32 * 2**20
"""Minimum size of a source in bytes for which worker processes are started; starting them takes seconds."""
_BUILDING = ".building"
_SUBFOLDERS = ("parts", "shards", "corpus")
# Maximum number of parts per process that wait for their tokens; bounds the memory of the reader.
_QUEUED_PARTS = 2


class StaleError(Exception):
    """The files of an earlier build are damaged, or belong to a source that has changed since."""


# The folder of a build


@contextlib.contextmanager
def building_folder(folder: pathlib.Path, plan: Mapping[str, Any], *, resume: bool) -> Iterator[pathlib.Path]:
    """Provides a locked folder for a build, next to the corpus folder.

    Args:
      folder: folder of the corpus.
      plan: everything except the texts that the bytes of the corpus depend on.
      resume: whether to continue an earlier build with the same plan, and to keep finished work on failure.

    Raises:
      UserError: if another process is building the corpus.
    """
    # A resumable build has a fixed name so that the next call finds it. Others use a random name, so that
    # several processes may build at the same time.
    work = folder.with_name(f".{folder.name}{_BUILDING}") if resume else durable.temporary_path(folder)
    durable.make_folder(work)
    keep = resume
    try:
        with _lock(work, folder):
            _prepare(work, json.dumps(plan, sort_keys=True))
            yield work
            keep = False
    finally:
        # Without a finished part there is nothing to continue from.
        if not keep or not any((work / "parts").glob("*.json")):
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _lock(work: pathlib.Path, folder: pathlib.Path) -> Iterator[None]:
    with (work / "lock").open("w") as lock:
        try:
            # The kernel releases the lock when the process dies, so a stale lock file cannot block a later
            # build.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Waiting instead would look like a hang: a build may take hours.
            raise UserError(f"another process is building {folder}; wait for it, or stop it") from error
        yield


def _prepare(work: pathlib.Path, plan: str) -> None:
    file = work / "plan.json"
    # Any difference in the recipe changes the bytes of the corpus, so nothing of the earlier build is
    # reusable.
    if file.is_file() and file.read_text(errors="replace") != plan:
        discard(work)
    for name in _SUBFOLDERS:
        (work / name).mkdir(exist_ok=True)
    durable.write(file, plan)


def discard(work: pathlib.Path) -> None:
    """Removes all finished work from a building folder."""
    for name in _SUBFOLDERS:
        shutil.rmtree(work / name, ignore_errors=True)
        (work / name).mkdir()


# Parts


@dataclasses.dataclass(frozen=True)
class _DocumentBatch:
    """Consecutive texts.

    Attributes:
      texts: (split, UTF-8 bytes) of each text.
      read: approximate number of bytes of the source that were read for them.
    """

    texts: list[tuple[str, bytes]]
    read: int

    @property
    def key(self) -> str:
        digest = xxhash.xxh3_128()
        for split, raw in self.texts:
            # The length separates texts: without it, moving bytes from one text to the next would not show.
            digest.update(f"{split} {len(raw)} ".encode())
            digest.update(raw)
        return digest.hexdigest()

    def of(self, split: str) -> list[bytes]:
        return [raw for name, raw in self.texts if name == split]


def _batched(documents: Iterable[Document], split_rule: SplitRule) -> Iterator[_DocumentBatch]:
    texts, size, read = [], 0, 0
    for document in documents:
        # A text that is cut contributes one part to each split.
        texts += split_rule.divide(document.raw)
        size, read = size + len(document.raw), read + document.read
        if size >= PART_BYTES or len(texts) >= PART_TEXTS:
            yield _DocumentBatch(texts, read)
            texts, size, read = [], 0, 0
    if texts:
        yield _DocumentBatch(texts, read)


def write_splits(
    work: pathlib.Path,
    stream: DocumentStream,
    split_rule: SplitRule,
    *,
    shard_format: ShardFormat,
    num_workers: int,
    num_bytes: int,
    advance: Callable[[int], None],
) -> dict[str, Split]:
    """Writes the shards of both splits into the subfolder `corpus` of a building folder.

    Args:
      work: building folder.
      stream: documents of the source, not read yet.
      split_rule: assigns texts to splits.
      shard_format: format of the shards.
      num_workers: number of worker processes; 1 uses this process, and so do small sources.
      num_bytes: size of the source in bytes.
      advance: called with the number of bytes of the source that were processed.

    Returns:
      The description of each split, by name.

    Raises:
      StaleError: if the building folder contains work that does not match the source.
      UserError: as `DocumentStream.documents`, or if a worker process ends unexpectedly.
    """
    num_processes = num_workers if num_bytes >= MIN_PARALLEL_BYTES else 1
    # The compressors need the held-out texts in order, so a single thread runs them.
    with workers(num_processes, shard_format) as submit, ThreadPoolExecutor(1) as compressor:
        splits = {name: _SplitAssembly(work, name, shard_format, submit) for name in SPLITS}
        compressed = CompressedSize()
        pending: collections.deque[_PendingPart] = collections.deque()
        for number, batch in enumerate(_batched(stream.documents(), split_rule)):
            compression = compressor.submit(compressed.append, batch.of(HELD_OUT))
            pending.append(_PendingPart(batch, number, _start_part(work, number, batch, submit), compression))
            # Collecting in order keeps the token stream independent of which worker finishes first.
            while len(pending) > _QUEUED_PARTS * num_processes:
                _collect(pending.popleft(), splits, work, advance)
        while pending:
            _collect(pending.popleft(), splits, work, advance)
        shards = {name: split.finish() for name, split in splits.items()}
    # Only the held-out split has a compression baseline: it is what evaluation results are compared with.
    sizes = dict(zip(("gzip_9_bytes", "xz_9_bytes"), compressed.finish(), strict=True))
    described = {
        name: split.describe(shards[name], skipped=stream.num_skipped[name]) for name, split in splits.items()
    }
    return described | {HELD_OUT: dataclasses.replace(described[HELD_OUT], **sizes)}


@dataclasses.dataclass(frozen=True)
class _PendingPart:
    """A part whose jobs have been started."""

    batch: _DocumentBatch
    number: int
    part: "Future[Any]"
    compression: "Future[None]"


def _start_part(work: pathlib.Path, number: int, batch: _DocumentBatch, submit: Submit) -> "Future[Any]":
    """Reuses the part of an earlier build, or starts a job that tokenizes it."""
    base_path, key = _part_path(work, number), batch.key
    # The record is written last, so if it exists, so do the other files of the part.
    if (record := _read_record(base_path)) is None:
        return submit(functools.partial(tokenize, base_path=base_path, key=key, texts=batch.texts))
    if record.get("key") != key:
        raise StaleError
    splits = {name: TokenFile(**values) for name, values in record["splits"].items()}
    for name, tokens in splits.items():
        file = base_path.with_suffix(f".{name}")
        # A token file is removed once a finished shard contains all of its tokens, so it may be absent.
        if file.exists() and durable.content_hash(file) != tokens.xxh3_128:
            raise StaleError
    # The file of held-out bytes is needed until the end of the build, so it must exist.
    if (held_out_bytes := record["held_out_bytes"]) is not None:
        file = base_path.with_suffix(BYTES_SUFFIX)
        if not file.exists() or durable.content_hash(file) != held_out_bytes:
            raise StaleError
    return completed(splits)


def _collect(
    pending: _PendingPart,
    splits: "Mapping[str, _SplitAssembly]",
    work: pathlib.Path,
    advance: Callable[[int], None],
) -> None:
    part: dict[str, TokenFile] = _result(pending.part)
    for name, tokens in part.items():
        file = _part_path(work, pending.number).with_suffix(f".{name}")
        splits[name].append(file, tokens, pending.batch.of(name))
    pending.compression.result()
    advance(pending.batch.read)


def _result(future: "Future[Any]") -> Any:
    try:
        return future.result()
    except BrokenExecutor as error:
        raise UserError(
            "a worker process was killed; Linux does this when memory is short. Run the same command with "
            "fewer --workers: it continues from the finished work"
        ) from error


def _part_path(work: pathlib.Path, number: int) -> pathlib.Path:
    return work / "parts" / f"{number:08d}"


def _read_record(base_path: pathlib.Path) -> dict[str, Any] | None:
    """The record of a finished job; None if the job did not finish."""
    try:
        return json.loads(base_path.with_suffix(".json").read_bytes())
    except (FileNotFoundError, ValueError):  # ValueError: a partly written record
        return None


# Shards


class _SplitAssembly:
    """Collects the tokens of a split, and starts a job for each shard as soon as it is full."""

    def __init__(self, work: pathlib.Path, name: str, shard_format: ShardFormat, submit: Submit):
        self._work, self._name, self._submit = work, name, submit
        # Shards have a whole number of blocks, so that only the last block of a split is padded.
        self._shard_tokens = shard_format.shard_blocks * shard_format.block_tokens
        # Tokens that are not assigned to a shard yet, as spans of token files.
        self._spans: collections.deque[TokenSpan] = collections.deque()
        self._num_unassigned = 0
        # Running shard jobs in order, each with the token files that no later shard needs.
        self._running: collections.deque[tuple[Future[Any], list[pathlib.Path]]] = collections.deque()
        self._shards: list[Shard] = []
        # The counts of the split's entry in the manifest, by field.
        self._counts = collections.Counter(documents=0, text_bytes=0, tokens=0, spelled_bytes=0)
        self._parts: list[pathlib.Path] = []
        self._opening = len(shard_format.tokenizer.delimiters.opening)
        self._append_opening(shard_format)

    def _append_opening(self, shard_format: ShardFormat) -> None:
        """Starts the stream with a delimiter, if documents have one between them but none in front."""
        opening = np.array(shard_format.tokenizer.delimiters.opening, shard_format.dtype)
        if opening.size:
            file = self._work / "parts" / f"opening.{self._name}"
            opening.tofile(file)
            self._append_span(file, opening.size)

    def append(self, file: pathlib.Path, part: TokenFile, texts: list[bytes]) -> None:
        """Appends the tokens of a part, and starts the jobs of shards that are now full."""
        text_bytes = sum(map(len, texts))
        self._counts.update(documents=len(texts), text_bytes=text_bytes, spelled_bytes=part.spelled_bytes)
        self._parts.append(file)
        self._append_span(file, part.tokens)
        while self._num_unassigned >= self._shard_tokens:
            self._start_shard(self._shard_tokens)
        # Collecting finished shards early frees the disk space of their token files.
        while self._running and self._running[0][0].done():
            self._collect()

    def _append_span(self, file: pathlib.Path, num_tokens: int) -> None:
        self._counts["tokens"] += num_tokens
        self._num_unassigned += num_tokens
        self._spans.append(TokenSpan(file, 0, num_tokens))

    def finish(self) -> tuple[Shard, ...]:
        """Writes the last shard and the hashes of all blocks, and returns all shards."""
        if self._num_unassigned:
            self._start_shard(self._num_unassigned)
        while self._running:
            self._collect()
        # BlockReader expects the hashes of all shards of a split in one file.
        hashes = (self._shard_path(number).with_suffix(".hashes") for number in range(len(self._shards)))
        durable.write(
            self._work / "corpus" / hashes_file(self._name), b"".join(each.read_bytes() for each in hashes)
        )
        if self._name == HELD_OUT:
            parts = [each.with_suffix(BYTES_SUFFIX) for each in self._parts]
            join_parts(parts, opening=self._opening, file=self._work / "corpus" / BYTES_FILE)
        return tuple(self._shards)

    def describe(self, shards: tuple[Shard, ...], *, skipped: int) -> Split:
        """The split's entry in the manifest, after all shards are written."""
        return Split(shards=shards, skipped=skipped, **self._counts)

    def _start_shard(self, num_tokens: int) -> None:
        spans = list(self._pop_spans(num_tokens))
        number = len(self._shards) + len(self._running)
        # The file of the first remaining span is still needed by the next shard.
        next_file = self._spans[0].file if self._spans else None
        used_up = [each.file for each in spans if each.file != next_file]
        shard = self._earlier_shard(number, num_tokens) or self._submit_shard(number, spans)
        self._running.append((shard, used_up))

    def _pop_spans(self, num_tokens: int) -> Iterator[TokenSpan]:
        self._num_unassigned -= num_tokens
        while num_tokens:
            span = self._spans.popleft()
            count = min(num_tokens, span.count)
            yield TokenSpan(span.file, span.first, count)
            if count < span.count:
                self._spans.appendleft(TokenSpan(span.file, span.first + count, span.count - count))
            num_tokens -= count

    def _earlier_shard(self, number: int, num_tokens: int) -> "Future[Any] | None":
        """The intact shard of an earlier build; None if there is no record of one."""
        if (record := _read_record(self._shard_path(number))) is None:
            return None
        shard = Shard(**record["shard"])
        file = self._work / "corpus" / shard.file
        hashes = self._shard_path(number).with_suffix(".hashes")
        if (
            record["tokens"] != num_tokens
            or not (file.exists() and hashes.exists())
            or durable.content_hash(file) != record["xxh3_128"]
            or durable.content_hash(hashes) != shard.block_hashes
        ):
            raise StaleError
        return completed(shard)

    def _submit_shard(self, number: int, spans: list[TokenSpan]) -> "Future[Any]":
        if not all(each.file.exists() for each in spans):
            raise StaleError
        return self._submit(
            functools.partial(
                write_shard,
                folder=self._work / "corpus",
                base_path=self._shard_path(number),
                split=self._name,
                number=number,
                spans=spans,
            )
        )

    def _collect(self) -> None:
        """Waits for the oldest running shard, and removes the token files that only it needed."""
        future, used_up = self._running.popleft()
        self._shards.append(_result(future))
        for file in used_up:
            file.unlink(missing_ok=True)

    def _shard_path(self, number: int) -> pathlib.Path:
        return self._work / "shards" / f"{self._name}-{number:05d}"
