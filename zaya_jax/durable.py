"""Writing that lasts: whoever is killed, or loses power, finds the old or the new, never half of one.

What is written stands beside its place first, waits until the disk has all of it, and then takes its
place by a rename, which a file system does in one step. The rename itself lasts once the folder that
holds the name is on the disk too. Checksums tell later whether a disk kept what it was given.
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
from collections.abc import Iterator, Mapping

import xxhash

PARTIAL = ".partial"
"""Ends the name of what is being written; what a crash leaves of it is nobody's."""
CHECKSUMS = "SHA256SUMS"
"""The file that `sha256sum --check SHA256SUMS` reads, in the folder whose files it lists."""
_CHECKSUM_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_AT_WORKING_FOLDER, _RENAME_EXCHANGE = -100, 2
"""Linux's AT_FDCWD and RENAME_EXCHANGE (man 2 rename), which Python does not name."""
_HASHED_AT_ONCE = 4 * 2**20
_LONGEST_LIST = 100_000_000
"""Bytes of checksums of a million files."""


class Damaged(ValueError):
    """What is on the disk is not what was written there: a copy must be put back, no option helps.

    Attributes:
      is_damage: as of errors that other processes raise in its place.
    """

    is_damage = True


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says where, in an error of what is open: the system does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until a file, or the names that a folder lists, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_files(folder: pathlib.Path) -> list[str]:
    """Names, relative to a folder, of all files in it and in its folders.

    Raises:
      ValueError: if there is something else: a pipe would be waited for without end, and a link leads to what
        is not the folder's.
    """
    names = []
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = pathlib.Path(parent, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(f"{path.relative_to(folder)} is no file and no folder")
        names += [pathlib.Path(parent, name).relative_to(folder).as_posix() for name in files]
    return names


def sync_tree(folder: pathlib.Path) -> None:
    """Waits until a folder is on the disk with all files and folders in it."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file, or what replaces it; text as UTF-8. One process at a time may write a path."""
    aside = path.with_name(path.name + PARTIAL)
    aside.unlink(missing_ok=True)  # it may be a pipe, or a link to what is somebody else's
    with naming(aside), aside.open("xb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        # Without it a rename may reach the disk before the data: an empty file in the old one's place.
        os.fsync(stream.fileno())
    aside.replace(path)
    sync(path.parent)


class HashedFile:
    """A new file that is written in parts, hashed on the way; its place is in a folder not yet published."""

    def __init__(self, path: pathlib.Path):
        self._path, self._stream = path, path.open("wb", buffering=0)
        self._digest = hashlib.sha256()

    def write(self, part: memoryview) -> None:
        """Writes bytes behind those that were written before."""
        self._digest.update(part)
        done = 0
        with naming(self._path):
            while done < len(part):  # one call writes at most 2 GiB
                done += self._stream.write(part[done:])

    def commit(self) -> str:
        """Closes the file when it is on the disk, and returns its checksum; any thread may wait for it."""
        with naming(self._path), self._stream:
            os.fsync(self._stream.fileno())
        return self._digest.hexdigest()

    def close(self) -> None:
        """Gives the file up: what is written of it may be lost."""
        self._stream.close()


def make_folder(folder: pathlib.Path) -> None:
    """Makes a folder that may be there, and the missing ones above it, so that their names last."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def remove_folder(folder: pathlib.Path) -> None:
    """Removes a folder; one that loses its files by and by has lost its name before."""
    aside = name_beside(folder)
    folder.rename(aside)
    sync(folder.parent)
    shutil.rmtree(aside)


def set_aside(folder: pathlib.Path, ending: str) -> pathlib.Path:
    """Gives a folder another name, with a number behind the ending where there is one of that name already.

    Returns:
      Where it lies now.
    """
    names = itertools.chain([ending], (f"{ending}.{number}" for number in itertools.count(2)))
    place = next(path for name in names if not (path := folder.with_name(folder.name + name)).exists())
    folder.rename(place)
    sync(folder.parent)
    return place


@contextlib.contextmanager
def folder_aside(folder: pathlib.Path, *, replace: bool = False) -> Iterator[pathlib.Path]:
    """Gives an empty folder to write in, and `publish`es it behind the block; an error leaves no trace."""
    aside = name_beside(folder)
    make_folder(aside)
    try:
        yield aside
        sync_tree(aside)
        publish(aside, folder, replace=replace)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish(aside: pathlib.Path, folder: pathlib.Path, *, replace: bool = False) -> None:
    """Gives a folder that is whole its place, when the names in it are on the disk too.

    Args:
      aside: the folder, on the file system of its place. Its files must be on the disk, as `write` and
        `HashedFile` leave them: to ask for each again costs some milliseconds.
      folder: its place; must be free, or an empty folder, unless `replace`.
      replace: has what lies at `folder` change places with `aside`; removing it there is the caller's.

    Raises:
      FileExistsError: if another process was first at a place that must be free.
    """
    for path in (aside, *aside.rglob("*")):
        if path.is_dir():
            sync(path)
    if replace and folder.exists():
        _exchange(aside, folder)
    else:
        try:
            aside.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise FileExistsError(
                errno.EEXIST, "another process has made this folder", str(folder)
            ) from error
    sync(folder.parent)


def _exchange(aside: pathlib.Path, folder: pathlib.Path) -> None:
    """Has two folders change places, in one step where the file system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, paths = _AT_WORKING_FOLDER, (os.fsencode(aside), os.fsencode(folder))
    if rename is not None and rename(here, paths[0], here, paths[1], _RENAME_EXCHANGE) == 0:
        return
    # NFS and older systems cannot. A crash here leaves both, whole, under other names than the place's.
    old = name_beside(folder)
    folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    old.rename(aside)


def name_beside(folder: pathlib.Path) -> pathlib.Path:
    """A name of nothing yet, for what is made or removed; several processes may do so at once."""
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}{PARTIAL}")


def sha256(content: bytes) -> str:
    """SHA-256 of bytes in memory, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: pathlib.Path) -> str:
    """SHA-256 of what a file holds, in hexadecimal."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_hash(path: pathlib.Path) -> str:
    """XXH3's 128 bits of what a file holds, in hexadecimal.

    It tells what a disk did, not what a forger did: ten times as fast as SHA-256, which a checkpoint of all
    devices every few minutes would feel.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        while part := stream.read(_HASHED_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()


def hash_of(content: bytes) -> bytes:
    """XXH3's 128 bits of bytes in memory: of a file's content, what `content_hash` has in hexadecimal."""
    return xxhash.xxh3_128_digest(content)


def write_checksums(folder: pathlib.Path, checksums: Mapping[str, str]) -> None:
    """Writes SHA-256 sums, by the names of files relative to the folder, into its `SHA256SUMS`."""
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items())]
    write(folder / CHECKSUMS, "".join(lines))


def read_checksums(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 sums that a folder's `SHA256SUMS` lists, by the names of files in it.

    Raises:
      ValueError: for a line that is none, lists a file twice, or leads out of the folder; or if there are
        too many.
    """
    sums = folder / CHECKSUMS
    if (size := sums.stat().st_size) > _LONGEST_LIST:
        raise ValueError(f"{sums} has {size:,} bytes; it may have {_LONGEST_LIST:,}")
    listed: dict[str, str] = {}
    for number, line in enumerate(sums.read_text(errors="replace").removesuffix("\n").split("\n"), 1):
        match = _CHECKSUM_LINE.fullmatch(line)
        if not match or not _is_inside(match[2]) or match[2] in listed:
            raise ValueError(
                f"{sums} has {line!r} in line {number}; it must be a SHA-256 sum and another file's name"
            )
        listed[match[2]] = match[1]
    return listed


def _is_inside(name: str) -> bool:
    path = pathlib.PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def find_damage(folder: pathlib.Path, checksums: Mapping[str, str]) -> str | None:
    """Holds files of a folder against their checksums: None, or a sentence on the first that is wrong."""
    for name, expected in checksums.items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing; {CHECKSUMS} lists it"
        if sha256_of_file(folder / name) != expected:
            return f"{folder / name} is not as it was written: its checksum differs"
    return None
