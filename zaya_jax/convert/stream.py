"""From a source to a folder, slice by slice: bounded memory, resumable, whole or not there.

Beside the folder to be stands another, NAME.partial, with the files in the making and a journal of
those that are done: on the disk for good, with their checksums. When all are, one rename makes them
the folder. A conversion that is killed leaves the journal; the same command goes on from there.
"""

import collections
import contextlib
import dataclasses
import fcntl
import itertools
import json
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np

from zaya_jax import durable
from zaya_jax.checkpoint import FOLDER as CHECKPOINTS
from zaya_jax.config import CONFIG_FILE, ExecutionConfig, ModelConfig
from zaya_jax.convert.layouts import ROUTER_BIAS, WeightSlice
from zaya_jax.convert.pytorch_folder import INDEX
from zaya_jax.json_files import read_limited

AHEAD = 4
"""Slices that are prepared while one is written."""
WORKERS = 2
STRIP = 16


@runtime_checkable
class Source(Protocol):
    """Weights that can be read slice by slice, from several threads."""

    @property
    def config(self) -> ModelConfig:
        """The config of the network that they are of."""
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
    """What a conversion did, and what an earlier one had done.

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


def execution_of(source: Source) -> ExecutionConfig:
    """How to compute a network whose files do not say it: in float32 where its weights are, else bfloat16."""
    stored = source.dtype("embedding/table")
    return ExecutionConfig(dtype="float32" if stored == np.dtype(np.float32) else "bfloat16")


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
    aside = folder.with_name(folder.name + durable.PARTIAL)
    _check_own(aside)
    durable.make_folder(aside)
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
        durable.write_checksums(content, {file.name: journal.entries[file.name] for file in files})
        if replace:
            journal.forget()
        durable.publish(content, folder, replace=replace)
    shutil.rmtree(aside)
    return WriteReport(sum(file.size for file in files), resumed)


def _check_own(aside: pathlib.Path) -> None:
    """Refuses remains that no conversion leaves: to write on would write, or wait, somewhere else."""
    strange = "it is a link" if aside.is_symlink() else None
    try:
        durable.list_files(aside)
    except ValueError as error:
        strange = str(error)
    if strange:
        raise ValueError(f"{aside} was not left by a conversion ({strange}); remove it")


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
            durable.sha256(file.header),
            *{str(block.dtype) for block in file.blocks},
        ]
        for file in files
    ]
    return durable.sha256(json.dumps([source.identity(), plan]).encode())


def _read_journal(file: pathlib.Path) -> str:
    return read_limited(file).decode(errors="replace") if file.is_file() else ""


class _Journal:
    """The files that are done, by name, with their checksums; a line each behind that of the plan."""

    def __init__(self, file: pathlib.Path, *, plan: str):
        self._file, self._plan = file, plan
        self._adding = threading.Lock()
        # A torn last line is none, and one that is damaged of no file: what it told of is written once more.
        lines = _read_journal(file).split("\n")[:-1]
        self._is_new = not lines or lines[0] != plan
        self.entries: dict[str, str] = {}
        for line in lines[1:] if not self._is_new else ():
            checksum, _, name = line.partition("  ")
            self.entries[name] = checksum

    def __enter__(self) -> "_Journal":
        # Written anew, or else a torn line would spoil the next one.
        lines = [self._plan, *(f"{checksum}  {name}" for name, checksum in self.entries.items())]
        durable.write(self._file, "".join(line + "\n" for line in lines))
        self._stream = self._file.open("a")
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stream.close()

    def forget(self) -> None:
        """Has whoever comes next begin anew: `content` may hold, from here on, what was replaced."""
        self._file.unlink()

    def add(self, name: str, checksum: str) -> None:
        """Notes a file that is on the disk.

        The note itself may be lost in a crash of the machine: the file is then written once more.
        """
        with self._adding:
            self._stream.write(f"{checksum}  {name}\n")
            self._stream.flush()
            self.entries[name] = checksum


def _still_good(content: pathlib.Path, entries: dict[str, str], files: list[PlannedFile]) -> set[str]:
    """The files that an earlier attempt finished and that are as it left them; the others go."""
    if not entries:  # of another plan, whose folders have no place in this one either
        shutil.rmtree(content, ignore_errors=True)
    sizes = {file.name: file.size for file in files}
    good = {
        name
        for name, expected in entries.items()
        if (content / name).is_file()
        and (content / name).stat().st_size == sizes.get(name)
        and durable.sha256_of_file(content / name) == expected
    }
    for file in sorted(content.rglob("*")) if content.is_dir() else ():
        if file.is_file() and str(file.relative_to(content)) not in good:
            file.unlink()
    for name in entries.keys() - good:
        del entries[name]
    return good


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
            hashed = durable.HashedFile(content / file.name)
            try:
                _write_file(file, hashed, prepared, watcher)
            except BaseException:
                hashed.close()
                raise
            commits.append(committers.submit(_commit, hashed, file.name, journal))
            while len(commits) > AHEAD:
                commits.popleft().result()
        for commit in commits:
            commit.result()


def _write_file(
    file: PlannedFile, hashed: durable.HashedFile, prepared: Iterator[memoryview], watcher: Watcher
) -> None:
    # Not a `for` over the blocks: its variable would hold one in memory while the next is prepared.
    chunks = itertools.chain((memoryview(file.header),), itertools.islice(prepared, len(file.blocks)))
    while (chunk := next(chunks, None)) is not None:
        hashed.write(chunk)
        watcher.advance(len(chunk))
        del chunk


def _commit(hashed: durable.HashedFile, name: str, journal: _Journal) -> None:
    journal.add(name, hashed.commit())


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


def check_checksums(folder: pathlib.Path) -> str | None:
    """Holds a finished folder against its checksums: None, or a sentence on the first that is wrong."""
    try:
        listed = durable.read_checksums(folder)
    except ValueError as error:
        return str(error)
    for name in sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()):
        if _holds_weights(name) and name not in listed:
            return f"{folder / name} is not in {durable.CHECKSUMS}; it was not written with the other files"
    return durable.find_damage(folder, listed)


def _holds_weights(name: str) -> bool:
    """Whether a file says what the weights are; others may have been laid beside them since."""
    return name.startswith(CHECKPOINTS + "/") or name.endswith(".safetensors") or name in (CONFIG_FILE, INDEX)
