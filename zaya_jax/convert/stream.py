"""From a source to a folder, slice by slice: bounded memory, resumable, whole or not there.

Beside the folder to be stands another, NAME.partial, with the files in the making and a journal of
those that are done: on the disk for good, with their checksums. When all are, one rename makes them
the folder. A conversion that is killed leaves the journal; the same command goes on from there.
"""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from zaya_jax.checkpoint import FOLDER as CHECKPOINTS
from zaya_jax.config import CONFIG_FILE, ModelConfig
from zaya_jax.convert.layouts import ROUTER_BIAS, WeightSlice
from zaya_jax.convert.pytorch_folder import INDEX

CHECKSUMS = "SHA256SUMS"
"""In every folder that is made here; `sha256sum --check SHA256SUMS` reads it."""
PARTIAL = ".partial"
AHEAD = 4
"""Slices that are prepared while one is written."""
WORKERS = 2
STRIP = 16
HASHED_BYTES = 2**24


@runtime_checkable
class Source(Protocol):
    """Weights that can be read slice by slice, from several threads."""

    @property
    def config(self) -> ModelConfig:
        """The config of the network whose weights these are."""
        ...

    def dtype(self, path: str) -> np.dtype:
        """The type of a weight."""
        ...

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """A slice in our order of axes, of any strides."""
        ...

    def identity(self) -> list[Any]:
        """What changes when the weights do; as JSON."""
        ...


@dataclasses.dataclass(frozen=True)
class Block:
    """A slice as it is written.

    Attributes:
      weight_slice: which part of which weight.
      dtype: its type in the file.
      arrange: from our order of axes to the file's; a view.
      padding: bytes of zeros behind it.
    """

    weight_slice: WeightSlice
    dtype: np.dtype
    arrange: Callable[[np.ndarray], np.ndarray]
    padding: int = 0

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return self.weight_slice.size * self.dtype.itemsize + self.padding


@dataclasses.dataclass(frozen=True)
class PlannedFile:
    """A file whose every byte has its place before the first is written.

    Attributes:
      name: relative to the folder.
      header: its first bytes.
      blocks: what follows, in order.
    """

    name: str
    header: bytes
    blocks: tuple[Block, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the whole file, header and padding included."""
        return len(self.header) + sum(block.size for block in self.blocks)


@dataclasses.dataclass(frozen=True)
class WriteReport:
    """What a conversion did.

    Attributes:
      size: bytes of the folder.
      resumed: bytes that an earlier attempt had written.
    """

    size: int
    resumed: int


@runtime_checkable
class Watcher(Protocol):
    """Who is told how far a conversion is."""

    def advance(self, size: int) -> None:
        """So many more bytes are done."""
        ...


class Unwatched:
    """A watcher for conversions that nobody waits for: it says nothing."""

    def advance(self, size: int) -> None:
        """Takes so many more bytes without a word."""


def target_dtype(path: str, source: np.dtype, asked: np.dtype | None) -> np.dtype:
    """The dtype rule: as asked, or as it was; balancing biases are always float32, as in [Weights]."""
    if path == ROUTER_BIAS:
        return np.dtype(np.float32)
    return source if asked is None else asked


def write_folder(
    source: Source, files: list[PlannedFile], folder: pathlib.Path, watcher: Watcher, *, replace: bool = False
) -> WriteReport:
    """Makes a folder of planned files.

    Args:
      source: of the weights.
      files: the whole folder.
      folder: must not exist, unless `replace`.
      watcher: is told of bytes.
      replace: removes what is at `folder` when the new one is whole.

    Raises:
      ValueError: if another process is at it, or the disk is too small.
    """
    aside = folder.with_name(folder.name + PARTIAL)
    aside.mkdir(parents=True, exist_ok=True)
    with _lock(aside):
        journal = _Journal(aside / "journal", plan=_fingerprint(source, files))
        content = aside / "content"
        done = _still_good(content, journal.entries, files)
        left = [file for file in files if file.name not in done]
        _check_space(aside, sum(file.size for file in left))
        resumed = sum(file.size for file in files) - sum(file.size for file in left)
        watcher.advance(resumed)
        with journal:
            _write_files(source, left, content, journal, watcher)
            checksums = {file.name: journal.entries[file.name] for file in files}
        _publish(content, checksums, folder, replaced=aside / "replaced" if replace else None)
    shutil.rmtree(aside)
    return WriteReport(sum(file.size for file in files), resumed)


@contextlib.contextmanager
def _lock(aside: pathlib.Path) -> Iterator[None]:
    with (aside / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another conversion is writing {aside}; wait for it or end it") from error
        yield


def _fingerprint(source: Source, files: list[PlannedFile]) -> str:
    """Of what is converted into what: a journal of another plan is of no use."""
    plan = [
        [
            file.name,
            file.size,
            hashlib.sha256(file.header).hexdigest(),
            *{str(block.dtype) for block in file.blocks},
        ]
        for file in files
    ]
    return hashlib.sha256(json.dumps([source.identity(), plan]).encode()).hexdigest()


class _Journal:
    """The files that are done, by name, with their checksums; a line each behind that of the plan."""

    def __init__(self, file: pathlib.Path, *, plan: str):
        self._file, self._plan = file, plan
        self._adding = threading.Lock()
        lines = file.read_text().split("\n")[:-1] if file.is_file() else []  # a torn last line is none
        self._is_new = not lines or lines[0] != plan
        self.entries: dict[str, str] = {}
        for line in lines[1:] if not self._is_new else ():
            checksum, name = line.split("  ", 1)
            self.entries[name] = checksum

    def __enter__(self) -> "_Journal":
        # Written anew, or else a torn line would spoil the next one.
        fresh = self._file.with_name("journal.new")
        lines = [self._plan, *(f"{checksum}  {name}" for name, checksum in self.entries.items())]
        with fresh.open("w") as stream:
            stream.writelines(line + "\n" for line in lines)
            _flush(stream)
        fresh.rename(self._file)
        sync_folder(self._file.parent)
        self._stream = self._file.open("a")
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stream.close()

    def add(self, name: str, checksum: str) -> None:
        """Notes a file that is on the disk.

        The note itself may be lost in a crash of the machine: the file is then written once more.
        """
        with self._adding:
            self._stream.write(f"{checksum}  {name}\n")
            self._stream.flush()
            self.entries[name] = checksum


def _flush(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: pathlib.Path) -> None:
    """Makes the names in a folder outlast a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _still_good(content: pathlib.Path, entries: dict[str, str], files: list[PlannedFile]) -> set[str]:
    """The files that an earlier attempt finished and that are as it left them; the others go."""
    sizes = {file.name: file.size for file in files}
    good = {
        name
        for name, expected in entries.items()
        if (content / name).is_file()
        and (content / name).stat().st_size == sizes.get(name)
        and checksum_of(content / name) == expected
    }
    for file in sorted(content.rglob("*")) if content.is_dir() else ():
        if file.is_file() and str(file.relative_to(content)) not in good:
            file.unlink()
    for name in entries.keys() - good:
        del entries[name]
    return good


def checksum_of(file: pathlib.Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_space(folder: pathlib.Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(f"the disk of {folder} has {free:,} bytes left; {needed:,} are still to be written")


def _write_files(
    source: Source, files: list[PlannedFile], content: pathlib.Path, journal: _Journal, watcher: Watcher
) -> None:
    """Writes in this thread; workers prepare what comes next, others wait for the disk."""
    for parent in sorted({(content / file.name).parent for file in files}):
        parent.mkdir(parents=True, exist_ok=True)
    blocks = (block for file in files for block in file.blocks)
    with ThreadPoolExecutor(WORKERS) as workers, ThreadPoolExecutor(AHEAD) as committers:
        prepared = ahead(workers, lambda block: prepare(source, block), blocks)
        commits: collections.deque[Future] = collections.deque()
        for file in files:
            stream = (content / file.name).open("wb", buffering=0)
            try:
                checksum = _write_file(file, stream, prepared, watcher)
            except BaseException:
                stream.close()
                raise
            commits.append(committers.submit(_commit, stream, file.name, checksum, journal))
            while len(commits) > AHEAD:
                commits.popleft().result()
        for commit in commits:
            commit.result()


def _write_file(file: PlannedFile, stream: BinaryIO, prepared: Iterator[memoryview], watcher: Watcher) -> str:
    digest = hashlib.sha256()
    chunks = [memoryview(file.header)] if file.header else []
    for _ in file.blocks:
        chunks.append(next(prepared))
        while chunks:
            _write(stream, chunks[0], digest, watcher)
            # Let go before the next block is waited for: each may be as large as an expert.
            del chunks[0]
    for chunk in chunks:
        _write(stream, chunk, digest, watcher)
    return digest.hexdigest()


def _write(stream: BinaryIO, chunk: memoryview, digest: Any, watcher: Watcher) -> None:
    digest.update(chunk)
    done = 0
    while done < len(chunk):  # one call writes at most 2 GiB
        done += stream.write(chunk[done:])
    watcher.advance(len(chunk))


def _commit(stream: BinaryIO, name: str, checksum: str, journal: _Journal) -> None:
    with stream:
        os.fsync(stream.fileno())
    journal.add(name, checksum)


def ahead(workers: ThreadPoolExecutor, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """`map` on workers, in order, never more than a few results ahead."""
    pending: collections.deque[Future] = collections.deque()
    for item in items:
        pending.append(workers.submit(function, item))
        if len(pending) > AHEAD:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def prepare(source: Source, block: Block) -> memoryview:
    """The bytes of a block."""
    array = source.read(block.weight_slice)
    assert array.shape == block.weight_slice.shape
    # A wide type is narrowed before its axes move, and a narrow one widened after: less to move.
    if block.dtype.itemsize < array.dtype.itemsize:
        array = array.astype(block.dtype)
    array = contiguous(block.arrange(array)).astype(block.dtype, copy=False)
    raw = array.reshape(-1).view(np.uint8)
    if block.padding:
        raw = np.concatenate([raw, np.zeros(block.padding, np.uint8)])
    return raw.data


def contiguous(view: np.ndarray) -> np.ndarray:
    """A view's values in C order; the view itself where they lie so.

    Swapped axes are copied in strips as wide as a cache line: five times as fast as NumPy does it.
    """
    if view.flags.c_contiguous:
        return view
    bits = view.view(
        np.dtype(f"u{view.dtype.itemsize}")
    )  # plain integers copy without the interpreter's lock
    out = np.empty(view.shape, bits.dtype)
    for start in range(0, view.shape[-1], STRIP):
        out[..., start : start + STRIP] = bits[..., start : start + STRIP]
    return out.view(view.dtype)


def _publish(
    content: pathlib.Path, checksums: dict[str, str], folder: pathlib.Path, *, replaced: pathlib.Path | None
) -> None:
    """Gives the finished files their place."""
    with (content / CHECKSUMS).open("w") as stream:
        stream.writelines(f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items()))
        _flush(stream)
    for inner in sorted(path for path in content.rglob("*") if path.is_dir()):
        sync_folder(inner)
    sync_folder(content)
    if replaced is not None and folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # of an attempt that was killed just here
        folder.rename(replaced)
    content.rename(folder)
    sync_folder(folder.parent)


_CHECKSUM_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def check_checksums(folder: pathlib.Path) -> str | None:
    """Holds a finished folder against its checksums: None, or a sentence on the first that is wrong."""
    sums = folder / CHECKSUMS
    listed: dict[str, str] = {}
    for number, line in enumerate(sums.read_text(errors="replace").removesuffix("\n").split("\n"), 1):
        match = _CHECKSUM_LINE.fullmatch(line)
        if not match or not _is_inside(match[2]) or match[2] in listed:
            return f"{sums} has {line!r} in line {number}; it must be a SHA-256 sum and another file's name"
        listed[match[2]] = match[1]
    for name in sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()):
        if _holds_weights(name) and name not in listed:
            return f"{folder / name} is not in {CHECKSUMS}; it was not written with the other files"
    for name, expected in listed.items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing; {CHECKSUMS} lists it"
        if checksum_of(folder / name) != expected:
            return f"{folder / name} is not as it was written: its checksum differs"
    return None


def _is_inside(name: str) -> bool:
    path = pathlib.PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def _holds_weights(name: str) -> bool:
    """Whether a file says what the weights are; others may have been laid beside them since."""
    return name.startswith(CHECKPOINTS + "/") or name.endswith(".safetensors") or name in (CONFIG_FILE, INDEX)
