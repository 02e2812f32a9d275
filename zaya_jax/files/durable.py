"""Durable, atomic writes: after a crash or a power failure there is the old content or the new, never a
mixture.

New content is written under a temporary name, flushed to disk, and renamed, which a file system does in one
step. The rename itself is durable once the parent folder is flushed too. Checksums detect later damage by the
disk.
"""

import contextlib
import ctypes
import errno
import hashlib
import itertools
import os
import pathlib
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping

import xxhash

from zaya_jax.errors import UserError

PARTIAL = ".partial"
"""Suffix of temporary names. Files that a crash leaves under such names can be deleted."""
CHECKSUMS = "SHA256SUMS"
"""Name of a folder's list of checksums, in the format of `sha256sum --check SHA256SUMS`."""
_CHECKSUM_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_AT_WORKING_FOLDER, _RENAME_EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux (man 2 rename), which Python does not define."""
_HASH_CHUNK_BYTES = 4 * 2**20
_MAX_CHECKSUMS_BYTES = 100_000_000
"""Size of the checksums of a million files."""


@contextlib.contextmanager
def path_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds a path to an OSError that has none, such as one of an open file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def sync(path: str | os.PathLike[str]) -> None:
    """Flushes a file to disk; for a folder, the names of its entries."""
    # Linux flushes a file also through a descriptor that was opened for reading, as folders must be.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with path_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_files(folder: pathlib.Path, *, skip: Callable[[str], bool] | None = None) -> list[str]:
    """Returns the paths of all files at any depth of a folder, relative to it.

    Args:
      folder: folder to list.
      skip: whether to skip a folder in it, by its name; None to skip none.

    Raises:
      UserError: if the folder has anything but files and folders. Reading a pipe would block for ever, and a
        link leads out of the folder.
    """
    names = []
    for parent, folders, files in _walk(folder, skip):
        for name in (*folders, *files):
            path = pathlib.Path(parent, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise UserError(f"{path.relative_to(folder)} is neither a file nor a folder")
        names += [pathlib.Path(parent, name).relative_to(folder).as_posix() for name in files]
    return names


def _walk(
    folder: pathlib.Path, skip: Callable[[str], bool] | None
) -> Iterator[tuple[str, list[str], list[str]]]:
    for parent, folders, files in os.walk(folder):
        # In place: os.walk then does not enter them.
        folders[:] = [name for name in folders if skip is None or not skip(name)]
        yield parent, folders, files


def sync_folders(folder: pathlib.Path, *, skip: Callable[[str], bool] | None = None) -> None:
    """Flushes the names of all entries of a folder and its subfolders to disk, not the content of files.

    Args:
      folder: folder to flush.
      skip: whether to skip a folder in it, by its name; None to skip none.
    """
    for parent, _, _ in _walk(folder, skip):
        sync(parent)


def sync_tree(folder: pathlib.Path) -> None:
    """Flushes a folder to disk, with all files and folders in it."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Creates or replaces a file; text as UTF-8. Only one process at a time may write to a path."""
    # The same folder is on the same file system, which a rename requires.
    aside = path.with_name(path.name + PARTIAL)
    # Another program may have left a pipe there, or a link to a file elsewhere.
    aside.unlink(missing_ok=True)
    with path_in_errors(aside), aside.open("xb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        # Otherwise the rename may reach the disk before the data, and a crash would leave an empty file.
        os.fsync(stream.fileno())
    aside.replace(path)
    sync(path.parent)


class HashedFile:
    """A new file that is written and hashed in parts, in a folder that is not yet published."""

    def __init__(self, path: pathlib.Path):
        self._path, self._stream = path, path.open("wb", buffering=0)
        self._digest = hashlib.sha256()

    def write(self, part: memoryview) -> None:
        """Appends bytes to the file."""
        # Hash while the bytes are in memory: reading the file again would take as long as writing it.
        self._digest.update(part)
        done = 0
        with path_in_errors(self._path):
            while done < len(part):  # one call writes at most 2 GiB
                done += self._stream.write(part[done:])

    def commit(self) -> str:
        """Flushes and closes the file, and returns its SHA-256. May be called from any thread."""
        with path_in_errors(self._path), self._stream:
            os.fsync(self._stream.fileno())
        return self._digest.hexdigest()

    def close(self) -> None:
        """Closes the file without flushing it to disk."""
        self._stream.close()


def make_folder(folder: pathlib.Path) -> None:
    """Creates a folder durably, with its missing parents. It may already exist."""
    # A new folder is durable once its parent is flushed.
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def remove_folder(folder: pathlib.Path) -> None:
    """Removes a folder, renamed first: a crash never leaves a half-deleted folder under its name."""
    shutil.rmtree(hide_folder(folder))


def hide_folder(folder: pathlib.Path) -> pathlib.Path:
    """Renames a folder that will be removed to a temporary name, which is returned."""
    aside = temporary_path(folder)
    folder.rename(aside)
    sync(folder.parent)
    return aside


def set_aside(folder: pathlib.Path, ending: str) -> pathlib.Path:
    """Renames a folder by appending an ending, and a number if that name is taken.

    Returns:
      New path of the folder.
    """
    names = itertools.chain([ending], (f"{ending}.{number}" for number in itertools.count(2)))
    place = next(path for name in names if not (path := folder.with_name(folder.name + name)).exists())
    folder.rename(place)
    sync(folder.parent)
    return place


@contextlib.contextmanager
def temporary_folder(folder: pathlib.Path, *, replace: bool = False) -> Iterator[pathlib.Path]:
    """Creates a temporary folder to write to, and publishes it after the block; an error removes it."""
    aside = temporary_path(folder)
    make_folder(aside)
    try:
        yield aside
        sync_tree(aside)
        publish(aside, folder, replace=replace)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish(
    aside: pathlib.Path,
    folder: pathlib.Path,
    *,
    replace: bool = False,
    skip: Callable[[str], bool] | None = None,
) -> None:
    """Renames a complete folder to its final path, after flushing the names in it to disk.

    Args:
      aside: path of the complete folder, on the same file system as `folder`. Its files must already be on
        disk, as `write` and `HashedFile` leave them, because flushing each again costs milliseconds.
      folder: final path; must be free or an empty folder, unless `replace` is True.
      replace: whether to exchange an existing folder with `aside`; the caller then removes it there.
      skip: whether the names in a folder are on disk already, by the folder's name; None if none are.

    Raises:
      FileExistsError: if another process created the folder first.
    """
    sync_folders(aside, skip=skip)
    if replace and folder.exists():
        _exchange(aside, folder)
    else:
        try:
            aside.rename(folder)
        except OSError as error:
            # A rename replaces an empty folder. Both numbers mean that it is not empty, depending on the
            # system.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise FileExistsError(errno.EEXIST, "another process created this folder", str(folder)) from error
    sync(folder.parent)


def _exchange(aside: pathlib.Path, folder: pathlib.Path) -> None:
    """Exchanges two folders, in one step if the file system supports it."""
    # Python has no function for renameat2.
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, paths = _AT_WORKING_FOLDER, (os.fsencode(aside), os.fsencode(folder))
    if rename is not None and rename(here, paths[0], here, paths[1], _RENAME_EXCHANGE) == 0:
        return
    # NFS and older systems do not. A crash here leaves both folders complete, but none under the final name.
    old = temporary_path(folder)
    folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    old.rename(aside)


def temporary_path(folder: pathlib.Path) -> pathlib.Path:
    """Returns a unique temporary path next to a folder; several processes may create one at the same time."""
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}{PARTIAL}")


def sha256(content: bytes) -> str:
    """Returns the SHA-256 of bytes in memory, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_hash(path: pathlib.Path) -> str:
    """Returns the 128-bit XXH3 hash of a file's content, in hexadecimal.

    It detects damage by a disk, but not forgery. It is ten times as fast as SHA-256, which matters for
    checkpoints of all devices every few minutes.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        # XXH3 is faster than a disk, so that larger reads would not help.
        while part := stream.read(_HASH_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def hash_of(content: bytes | memoryview) -> bytes:
    """Returns the 128-bit XXH3 hash of bytes in memory; `content_hash` is the same in hexadecimal."""
    return xxhash.xxh3_128_digest(content)


def write_checksums(folder: pathlib.Path, checksums: Mapping[str, str]) -> None:
    """Writes a folder's `SHA256SUMS` file.

    Args:
      folder: the folder.
      checksums: SHA-256 in hexadecimal by file name, relative to the folder.
    """
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items())]
    write(folder / CHECKSUMS, "".join(lines))


def read_checksums(folder: pathlib.Path) -> dict[str, str]:
    """Returns the checksums in a folder's `SHA256SUMS` file: SHA-256 in hexadecimal by file name.

    Raises:
      UserError: if a line is invalid, repeats a file, or names one outside the folder, or the list is too
        long.
    """
    sums = folder / CHECKSUMS
    if (size := sums.stat().st_size) > _MAX_CHECKSUMS_BYTES:
        raise UserError(f"{sums} has {size:,} bytes; the maximum is {_MAX_CHECKSUMS_BYTES:,}")
    listed: dict[str, str] = {}
    for number, line in enumerate(sums.read_text(errors="replace").removesuffix("\n").split("\n"), 1):
        match = _CHECKSUM_LINE.fullmatch(line)
        # A list from others must not make the caller read files elsewhere.
        if not match or not _is_inside(match[2]) or match[2] in listed:
            raise UserError(
                f"{sums} has {line!r} in line {number}; it must be a SHA-256 sum and another file's name"
            )
        listed[match[2]] = match[1]
    return listed


def _is_inside(name: str) -> bool:
    path = pathlib.PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def find_damage(folder: pathlib.Path, checksums: Mapping[str, str]) -> str | None:
    """Verifies files against their checksums. Returns a message about the first wrong one; None for none."""
    for name, expected in checksums.items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing; {CHECKSUMS} lists it"
        if sha256_of_file(folder / name) != expected:
            return f"{folder / name} is not as it was written: its checksum differs"
    return None
