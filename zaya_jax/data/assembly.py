"""Documents to shards: by several processes or one, with the same bytes, and on from where one was killed.

One process reads the source and decides, of each text in its turn, whether it is held out. Texts that follow
each other are a part; others make tokens of parts, and shards of the tokens as soon as there are enough.
Both are files with records, so that a build that was killed reads its source anew, which is quick, and does
again only what has no record. A part is known by a hash of its texts: nothing is taken over of a source that
changed.
"""

import collections
import contextlib
import dataclasses
import fcntl
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from zaya_jax import durable
from zaya_jax.data.blocks import ShardFormat, hashes_file
from zaya_jax.data.compressed import CompressedSize
from zaya_jax.data.division import Division
from zaya_jax.data.documents import Document
from zaya_jax.data.intake import Intake
from zaya_jax.data.shards import SPLITS, Shard, Split
from zaya_jax.data.tasks import (
    Part,
    PartTask,
    ShardTask,
    Stretch,
    Submit,
    TokenFile,
    WrittenShard,
    workers,
)

PART_BYTES, PART_TEXTS = 4 * 2**20, 2**14
"""Of a part, at most; a text that is larger is one by itself."""
_PARALLEL_BYTES = 32 * 2**20
"""Of a source that is worth other processes: they take seconds to begin."""
_BUILDING = ".building"
_AHEAD = 2
"""Parts of each process that are read and wait."""


class StaleError(Exception):
    """What an earlier build left is of another source, or damaged."""


@contextlib.contextmanager
def building_folder(folder: pathlib.Path, plan: Mapping[str, Any], *, resume: bool) -> Iterator[pathlib.Path]:
    """A folder beside a corpus to be, with what is done of it.

    Args:
      folder: of the corpus.
      plan: of what its bytes depend on, but for the texts.
      resume: finds what an earlier build of the plan left, and leaves what is done when it fails.

    Raises:
      ValueError: when another process builds there.
    """
    work = folder.with_name(f".{folder.name}{_BUILDING}") if resume else durable.name_beside(folder)
    durable.make_folder(work)
    try:
        with _lock(work, folder):
            _begin_with(work, json.dumps(plan, sort_keys=True))
            yield work
            resume = False
    finally:
        if not resume or not any((work / "parts").glob("*.json")):
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _lock(work: pathlib.Path, folder: pathlib.Path) -> Iterator[None]:
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process builds {folder}; wait for it or end it") from error
        yield


def _begin_with(work: pathlib.Path, plan: str) -> None:
    file = work / "plan.json"
    if file.is_file() and file.read_text(errors="replace") != plan:
        forget(work)
    for name in ("parts", "shards", "corpus"):
        (work / name).mkdir(exist_ok=True)
    durable.write(file, plan)


def forget(work: pathlib.Path) -> None:
    """Removes all that is done."""
    for name in ("parts", "shards", "corpus"):
        shutil.rmtree(work / name, ignore_errors=True)
        (work / name).mkdir()


@dataclasses.dataclass(frozen=True)
class _Texts:
    """Texts that follow each other, each with its split, and bytes of the source that they took."""

    texts: list[tuple[str, bytes]]
    read: int

    @property
    def key(self) -> str:
        digest = xxhash.xxh3_128()
        for split, raw in self.texts:
            digest.update(f"{split} {len(raw)} ".encode())
            digest.update(raw)
        return digest.hexdigest()

    def of(self, split: str) -> list[bytes]:
        return [raw for name, raw in self.texts if name == split]


def _gather(documents: Iterable[Document], division: Division) -> Iterator[_Texts]:
    texts, size, read = [], 0, 0
    for document in documents:
        texts += division.divide(document.raw)
        size, read = size + len(document.raw), read + document.read
        if size >= PART_BYTES or len(texts) >= PART_TEXTS:
            yield _Texts(texts, read)
            texts, size, read = [], 0, 0
    if texts:
        yield _Texts(texts, read)


def write_splits(
    work: pathlib.Path,
    intake: Intake,
    division: Division,
    *,
    shard_format: ShardFormat,
    num_workers: int,
    num_bytes: int,
    advance: Callable[[int], None],
) -> dict[str, Split]:
    """Writes the shards of both splits into the folder `corpus` of a building folder.

    Args:
      work: the building folder.
      intake: of the source, not read yet.
      division: of its texts.
      shard_format: of the shards.
      num_workers: processes that make tokens; one is this process, and so is it for small sources.
      num_bytes: of the source.
      advance: is told of bytes of the source that are done.

    Raises:
      StaleError: when what is there already does not fit the source; it must go.
      ValueError: as `Intake.texts`, or when a process ends before its time.
    """
    count = num_workers if num_bytes >= _PARALLEL_BYTES else 1
    with workers(count, shard_format) as submit, ThreadPoolExecutor(1) as compressing:
        splits = {name: _SplitAssembly(work, name, shard_format, submit) for name in SPLITS}
        compressed = CompressedSize()
        waiting: collections.deque[_Waiting] = collections.deque()
        for number, texts in enumerate(_gather(intake.texts(), division)):
            held_out = compressing.submit(_compress, compressed, texts.of("validation"))
            waiting.append(_Waiting(texts, number, _begin_part(work, number, texts, submit), held_out))
            while len(waiting) > _AHEAD * count:
                _settle(waiting.popleft(), splits, work, advance)
        while waiting:
            _settle(waiting.popleft(), splits, work, advance)
        shards = {name: split.finish() for name, split in splits.items()}
    sizes = dict(zip(("gzip_9_bytes", "xz_9_bytes"), compressed.finish(), strict=True))
    return {
        name: dataclasses.replace(
            split.describe(shards[name], skipped=intake.skipped[name]),
            **(sizes if name == "validation" else {}),
        )
        for name, split in splits.items()
    }


def _compress(compressed: CompressedSize, texts: Iterable[bytes]) -> None:
    for raw in texts:
        compressed.append(raw)


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A part that is under way."""

    texts: _Texts
    number: int
    part: "Future[Any]"
    compressed: "Future[None]"


def _begin_part(work: pathlib.Path, number: int, texts: _Texts, submit: Submit) -> "Future[Any]":
    place, key = _part_place(work, number), texts.key
    if (found := _read_record(place)) is None:
        return submit(PartTask(place=place, key=key, texts=texts.texts))
    if found.get("key") != key:
        raise StaleError
    splits = {name: TokenFile(**values) for name, values in found["splits"].items()}
    for name, tokens in splits.items():
        file = place.with_suffix(f".{name}")
        if file.exists() and durable.content_hash(file) != tokens.xxh3_128:
            raise StaleError
    done: Future[Any] = Future()
    done.set_result(Part(key=key, splits=splits))
    return done


def _settle(
    waiting: _Waiting,
    splits: "Mapping[str, _SplitAssembly]",
    work: pathlib.Path,
    advance: Callable[[int], None],
) -> None:
    part: Part = _result(waiting.part)
    for name, tokens in part.splits.items():
        file = _part_place(work, waiting.number).with_suffix(f".{name}")
        splits[name].append(file, tokens.tokens, waiting.texts.of(name))
    waiting.compressed.result()
    advance(waiting.texts.read)


def _result(future: "Future[Any]") -> Any:
    try:
        return future.result()
    except BrokenExecutor as error:
        raise ValueError(
            "a process that makes tokens was ended, as Linux does when memory is short; the same command "
            "with fewer --workers goes on from what is done"
        ) from error


def _part_place(work: pathlib.Path, number: int) -> pathlib.Path:
    return work / "parts" / f"{number:08d}"


def _read_record(place: pathlib.Path) -> dict[str, Any] | None:
    """What a task wrote of its work; None where it did not come to that."""
    try:
        return json.loads(place.with_suffix(".json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


class _SplitAssembly:
    """The tokens of a split, cut into shards as they come."""

    def __init__(self, work: pathlib.Path, name: str, shard_format: ShardFormat, submit: Submit):
        self._work, self._name, self._submit = work, name, submit
        self._shard_tokens = shard_format.shard_blocks * shard_format.block_tokens
        self._stretches: collections.deque[Stretch] = collections.deque()
        self._left = 0
        self._running: collections.deque[tuple[Future[Any], list[pathlib.Path]]] = collections.deque()
        self._num_shards = 0
        self._shards: list[Shard] = []
        self._documents = self._text_bytes = self._tokens = 0
        self._open(shard_format)

    def _open(self, shard_format: ShardFormat) -> None:
        """Takes what stands before the first document, where documents have only a token between them."""
        opening = np.array(shard_format.tokenizer.borders.opening, shard_format.dtype)
        if opening.size:
            file = self._work / "parts" / f"opening.{self._name}"
            opening.tofile(file)
            self._tokens = self._left = opening.size
            self._stretches.append(Stretch(file, 0, opening.size))

    def append(self, file: pathlib.Path, tokens: int, texts: list[bytes]) -> None:
        """Takes the tokens of a part, and begins the shards that they fill."""
        self._documents += len(texts)
        self._text_bytes += sum(map(len, texts))
        self._tokens += tokens
        self._left += tokens
        self._stretches.append(Stretch(file, 0, tokens))
        while self._left >= self._shard_tokens:
            self._begin_shard(self._shard_tokens)
        while self._running and self._running[0][0].done():
            self._settle()

    def finish(self) -> tuple[Shard, ...]:
        """Makes a last shard of what is left, and gathers the hashes of all blocks."""
        if self._left:
            self._begin_shard(self._left)
        while self._running:
            self._settle()
        hashes = (self._place(number).with_suffix(".hashes") for number in range(self._num_shards))
        durable.write(
            self._work / "corpus" / hashes_file(self._name), b"".join(each.read_bytes() for each in hashes)
        )
        return tuple(self._shards)

    def describe(self, shards: tuple[Shard, ...], *, skipped: int) -> Split:
        """The split as a manifest has it, all shards written."""
        return Split(
            shards=shards,
            documents=self._documents,
            skipped=skipped,
            text_bytes=self._text_bytes,
            tokens=self._tokens,
        )

    def _begin_shard(self, tokens: int) -> None:
        taken = list(self._take(tokens))
        number, self._num_shards = self._num_shards, self._num_shards + 1
        rest = self._stretches[0].file if self._stretches else None
        used_up = [each.file for each in taken if each.file != rest]
        self._running.append((self._find(number, tokens) or self._make(number, taken), used_up))

    def _take(self, tokens: int) -> Iterator[Stretch]:
        self._left -= tokens
        while tokens:
            stretch = self._stretches.popleft()
            count = min(tokens, stretch.count)
            yield Stretch(stretch.file, stretch.first, count)
            if count < stretch.count:
                self._stretches.appendleft(
                    Stretch(stretch.file, stretch.first + count, stretch.count - count)
                )
            tokens -= count

    def _find(self, number: int, tokens: int) -> "Future[Any] | None":
        """A shard that an earlier build wrote, if it is whole."""
        if (values := _read_record(self._place(number))) is None:
            return None
        written = WrittenShard(**{**values, "shard": Shard(**values["shard"])})
        file, hashes = self._work / "corpus" / written.shard.file, self._place(number).with_suffix(".hashes")
        if (
            written.tokens != tokens
            or not (file.exists() and hashes.exists())
            or durable.content_hash(file) != written.xxh3_128
            or durable.content_hash(hashes) != written.shard.block_hashes
        ):
            raise StaleError
        done: Future[Any] = Future()
        done.set_result(written)
        return done

    def _make(self, number: int, stretches: list[Stretch]) -> "Future[Any]":
        if not all(each.file.exists() for each in stretches):
            raise StaleError
        folder = self._work / "corpus"
        place = self._place(number)
        return self._submit(
            ShardTask(folder=folder, place=place, split=self._name, number=number, stretches=stretches)
        )

    def _settle(self) -> None:
        """Takes over a shard, and removes the tokens that are in no other."""
        future, used_up = self._running.popleft()
        self._shards.append(_result(future).shard)
        for file in used_up:
            file.unlink(missing_ok=True)

    def _place(self, number: int) -> pathlib.Path:
        return self._work / "shards" / f"{self._name}-{number:05d}"
