"""Conversion of a source to a folder, slice by slice: bounded memory, resumable, atomic.

Next to the target folder is a temporary one, NAME.partial, with the files that are being written and a
journal of those that are complete and synced, with their checksums. When all are, one rename publishes the
folder. After a conversion was killed, the same command resumes from the journal.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np

from zaya_jax.config import CONFIG_FILE, ExecutionConfig, ModelConfig
from zaya_jax.convert.nonfinite import NonFinite
from zaya_jax.convert.pytorch.folder import INDEX
from zaya_jax.convert.pytorch.layouts import ROUTER_BIAS, WeightSlice
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import read_limited
from zaya_jax.run_folder.names import CHECKPOINTS_FOLDER

PREFETCH = 4
"""Number of slices that are prepared while one is written."""
WORKERS = 2
STRIP = 16
"""Columns that are copied at a time when axes are swapped: a cache line of float32."""


@runtime_checkable
class Source(Protocol):
    """Weights that can be read slice by slice, from several threads."""

    @property
    def config(self) -> ModelConfig:
        """The architecture of the weights."""
        ...

    def dtype(self, path: str) -> np.dtype:
        """Type of a weight, by path."""
        ...

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """Reads a slice, in our order of axes and with any strides."""
        ...

    def identity(self) -> list[Any]:
        """JSON-compatible values that change when the weights do."""
        ...


@dataclasses.dataclass(frozen=True)
class Block:
    """A slice in an output file.

    Attributes:
      weight_slice: part of a weight.
      dtype: type in the file.
      arrange: function from our order of axes to that of the file; returns a view.
      padding: number of zero bytes after the slice.
    """

    weight_slice: WeightSlice
    dtype: np.dtype
    arrange: Callable[[np.ndarray], np.ndarray]
    padding: int = 0

    @property
    def size(self) -> int:
        """Size in the file in bytes, padding included."""
        return self.weight_slice.size * self.dtype.itemsize + self.padding

    @property
    def num_values(self) -> int:
        """Number of values that the tensor takes from the source."""
        return self.weight_slice.size

    def load(self, source: Source) -> np.ndarray:
        """Reads and converts the values, contiguous and in the type and order of the file."""
        array = source.read(self.weight_slice)
        # A wrong shape would shift all following bytes of the file.
        assert array.shape == self.weight_slice.shape
        # Narrow before the axes are moved and widen afterwards, so that fewer bytes are moved.
        if self.dtype.itemsize < array.dtype.itemsize:
            array = array.astype(self.dtype)
        return contiguous(self.arrange(array)).astype(self.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class PlannedFile:
    """An output file whose layout is known before it is written.

    Attributes:
      name: path relative to the folder.
      header: first bytes of the file.
      blocks: slices that follow the header, in order.
    """

    name: str
    header: bytes
    blocks: tuple[Block, ...] = ()

    @property
    def size(self) -> int:
        """Size of the file in bytes, header and padding included."""
        return len(self.header) + sum(block.size for block in self.blocks)


@dataclasses.dataclass(frozen=True)
class WriteReport:
    """Result of a conversion.

    Attributes:
      size: size of the folder in bytes.
      resumed: number of bytes that an earlier attempt had written.
      nonfinite: number of NaN and infinite values in the output, by weight.
    """

    size: int
    resumed: int
    nonfinite: Mapping[str, int]


@runtime_checkable
class Progress(Protocol):
    """Receiver of the progress of a conversion."""

    def advance(self, size: int) -> None:
        """Reports that this many more bytes are done."""
        ...


class NoProgress:
    """A receiver that ignores progress."""

    def advance(self, size: int) -> None:
        """Ignores the bytes that were written."""


def execution_of(source: Source) -> ExecutionConfig:
    """Default execution of converted weights: float32 if the weights are float32, else bfloat16."""
    # All weights but router biases have the same type.
    stored = source.dtype("embedding/table")
    return ExecutionConfig(dtype="float32" if stored == np.dtype(np.float32) else "bfloat16")


def target_dtype(path: str, source: np.dtype, dtype: np.dtype | None) -> np.dtype:
    """Type of a weight in the output: `dtype`, or its own type if that is None.

    Router biases are always float32, as in [Weights].
    """
    if path == ROUTER_BIAS:
        return np.dtype(np.float32)
    return source if dtype is None else dtype


def write_folder(
    source: Source,
    files: list[PlannedFile],
    folder: pathlib.Path,
    progress: Progress,
    *,
    replace: bool = False,
) -> WriteReport:
    """Writes a folder of planned files.

    Args:
      source: the weights.
      files: all files of the folder.
      folder: path of the new folder; it must not exist unless `replace` is true.
      progress: receiver of the number of bytes written.
      replace: whether to replace an existing folder when the new one is complete.

    Raises:
      UserError: if another process writes the same folder, or the disk has too little space.
    """
    aside = folder.with_name(folder.name + durable.PARTIAL)
    _check_own(aside)
    durable.make_folder(aside)
    # The lock is released when the process ends, so a killed conversion does not block the next one.
    with lock_folder(aside):
        journal = _Journal(aside / "journal", plan=_fingerprint(source, files))
        content = aside / "content"
        done = _still_good(content, journal.entries, files)
        left = [file for file in files if file.name not in done]
        _check_space(aside, sum(file.size for file in left))
        resumed = sum(file.size for file in files) - sum(file.size for file in left)
        nonfinite = NonFinite()
        for file in files:
            if file.name in done:
                _count_written(content / file.name, file, nonfinite)
        progress.advance(resumed)
        with journal:
            _write_files(source, left, content, journal, progress, nonfinite)
        # Written last: a folder with this file is complete.
        durable.write_checksums(content, {file.name: journal.entries[file.name] for file in files})
        if replace:
            journal.forget()
        durable.publish(content, folder, replace=replace)
    shutil.rmtree(aside)
    return WriteReport(sum(file.size for file in files), resumed, nonfinite.counts)


def _count_written(path: pathlib.Path, file: PlannedFile, nonfinite: NonFinite) -> None:
    """Counts NaN and infinite values in a file that an earlier attempt wrote."""
    with path.open("rb") as stream:
        stream.seek(len(file.header))
        for block in file.blocks:
            # Files of earlier attempts are read again only for this count.
            values = np.frombuffer(stream.read(block.size - block.padding), block.dtype)
            nonfinite.count(block.weight_slice.path, values)
            stream.seek(block.padding, 1)


def _check_own(aside: pathlib.Path) -> None:
    """Checks that the temporary folder has no links or pipes, which would redirect or block writes."""
    problem = "it is a link" if aside.is_symlink() else None
    try:
        durable.list_files(aside)
    except UserError as error:
        problem = str(error)
    if problem:
        raise UserError(f"{aside} was not left by a conversion ({problem}); remove it")


@contextlib.contextmanager
def lock_folder(aside: pathlib.Path) -> Iterator[None]:
    """Locks the temporary folder of a conversion.

    Raises:
      UserError: if another process has locked it.
    """
    with (aside / "lock").open("w") as lock:
        try:
            # Not blocking: two conversions to the same folder are a mistake.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"another conversion is writing {aside}; wait until it ends, or stop it"
            ) from error
        yield


def _fingerprint(source: Source, files: list[PlannedFile]) -> str:
    """Hash of source and plan, which the journal must match to be resumed."""
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
    """Names and checksums of complete files: one line per file, after a line with the hash of the plan."""

    def __init__(self, file: pathlib.Path, *, plan: str):
        self._file, self._plan = file, plan
        self._adding = threading.Lock()
        # An incomplete last line is dropped, and a damaged line matches no file: those files are written
        # again.
        lines = _read_journal(file).split("\n")[:-1]
        self._is_new = not lines or lines[0] != plan
        self.entries: dict[str, str] = {}
        for line in lines[1:] if not self._is_new else ():
            # The format of sha256sum, so that a journal can be verified by hand.
            checksum, _, name = line.partition("  ")
            self.entries[name] = checksum

    def __enter__(self) -> "_Journal":
        # Rewritten, because an incomplete last line would corrupt the next one.
        # The plan is the first line, so that a journal of another conversion is recognized.
        lines = [self._plan, *(f"{checksum}  {name}" for name, checksum in self.entries.items())]
        durable.write(self._file, "".join(line + "\n" for line in lines))
        self._stream = self._file.open("a")
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stream.close()

    def forget(self) -> None:
        """Makes the next attempt start from scratch; `content` may contain the replaced folder after this."""
        self._file.unlink()

    def add(self, name: str, checksum: str) -> None:
        """Records a file that is synced to disk.

        The record itself is not synced: after a crash of the machine the file may be written again.
        """
        with self._adding:
            self._stream.write(f"{checksum}  {name}\n")
            self._stream.flush()
            self.entries[name] = checksum


def _still_good(content: pathlib.Path, entries: dict[str, str], files: list[PlannedFile]) -> set[str]:
    """Names of intact files of an earlier attempt; removes all other files."""
    if not entries:  # a different plan, whose subfolders would be in the way as well
        shutil.rmtree(content, ignore_errors=True)
    sizes = {file.name: file.size for file in files}
    # Sizes first, because hashing reads the whole file.
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
        raise UserError(f"the disk of {folder} has {free:,} free bytes; the conversion needs {needed:,} more")


def _write_files(
    source: Source,
    files: list[PlannedFile],
    content: pathlib.Path,
    journal: _Journal,
    progress: Progress,
    nonfinite: NonFinite,
) -> None:
    """Writes in this thread, while other threads prepare the next slices and sync finished files."""
    # Folders of chunks, one per weight of a run.
    for parent in sorted({(content / file.name).parent for file in files}):
        parent.mkdir(parents=True, exist_ok=True)
    blocks = (block for file in files for block in file.blocks)
    with ThreadPoolExecutor(WORKERS) as workers, ThreadPoolExecutor(PREFETCH) as committers:
        prepared = ahead(workers, lambda block: prepare(source, block, nonfinite), blocks)
        commits: collections.deque[Future] = collections.deque()
        for file in files:
            hashed = durable.HashedFile(content / file.name)
            try:
                _write_file(file, hashed, prepared, progress)
            except BaseException:
                hashed.close()
                raise
            # Syncing waits for the disk, so it runs in other threads, a few files at a time.
            commits.append(committers.submit(commit_file, hashed, file.name, journal))
            while len(commits) > PREFETCH:
                commits.popleft().result()
        for commit in commits:
            commit.result()


def _write_file(
    file: PlannedFile, hashed: durable.HashedFile, prepared: Iterator[memoryview], progress: Progress
) -> None:
    # Not a `for` loop, whose variable would keep one block in memory while the next is prepared.
    chunks = itertools.chain((memoryview(file.header),), itertools.islice(prepared, len(file.blocks)))
    while (chunk := next(chunks, None)) is not None:
        hashed.write(chunk)
        progress.advance(len(chunk))
        del chunk


def commit_file(hashed: durable.HashedFile, name: str, journal: _Journal) -> None:
    """Syncs a file and records it in the journal."""
    journal.add(name, hashed.commit())


def ahead(workers: ThreadPoolExecutor, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """`map` on workers in order, with at most `PREFETCH` results ahead of the consumer."""
    pending: collections.deque[Future] = collections.deque()
    for item in items:
        pending.append(workers.submit(function, item))
        # Bounded, because each result is a slice in memory.
        if len(pending) > PREFETCH:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def prepare(source: Source, block: Block, nonfinite: NonFinite) -> memoryview:
    """Reads and converts the bytes of a block, and counts its NaN and infinite values."""
    array = block.load(source)
    nonfinite.count(block.weight_slice.path, array)
    raw = array.reshape(-1).view(np.uint8)
    if block.padding:
        raw = np.concatenate([raw, np.zeros(block.padding, np.uint8)])
    return raw.data


def contiguous(view: np.ndarray) -> np.ndarray:
    """Returns the values in C order, without a copy if they are already.

    Swapped axes are copied in strips as wide as a cache line, five times as fast as NumPy's own copy.
    """
    if view.flags.c_contiguous:
        return view
    # As integers: NumPy copies bfloat16, a type of ml_dtypes, while holding the interpreter lock.
    bits = view.view(np.dtype(f"u{view.dtype.itemsize}"))
    out = np.empty(view.shape, bits.dtype)
    for start in range(0, view.shape[-1], STRIP):
        out[..., start : start + STRIP] = bits[..., start : start + STRIP]
    return out.view(view.dtype)


def check_checksums(folder: pathlib.Path) -> str | None:
    """Verifies the checksums of a folder: a message about the first damage, or None if it is intact."""
    try:
        listed = durable.read_checksums(folder)
    except UserError as error:
        return str(error)
    for name in sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()):
        # An added file could change the weights that are loaded.
        if _is_weight_file(name) and name not in listed:
            return f"{folder / name} is not in {durable.CHECKSUMS}; it was added later"
    return durable.find_damage(folder, listed)


def _is_weight_file(name: str) -> bool:
    """Whether a file determines the weights; users may add others."""
    return (
        name.startswith(CHECKPOINTS_FOLDER + "/")
        or name.endswith(".safetensors")
        or name in (CONFIG_FILE, INDEX)
    )
