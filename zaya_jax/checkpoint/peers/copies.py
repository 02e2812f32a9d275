"""Copies of one process's part of a train state: files in a memory-backed folder, with checksums.

A file is a line with the hash of a header and the header itself, JSON, followed by the content. It is written
under a temporary name and renamed when it is complete and verified. Nothing is flushed to a disk: the folder
outlives the process, but not the node.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import pathlib
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from zaya_jax.errors import DamagedError, UserError
from zaya_jax.fields import build
from zaya_jax.files import durable

MAX_HEADER_BYTES = 65_536
_SUFFIX = ".copy"


@dataclasses.dataclass(frozen=True, order=True)
class CopyKey:
    """What a copy contains.

    Attributes:
      step: step of the state.
      attempt: random name of the attempt of the run that computed it; copies of several are never mixed.
      owner: number of the process whose part of the state it is.
    """

    step: int
    attempt: str
    owner: int

    @property
    def file(self) -> str:
        """Name of the file in the folder of a run's copies, which tells owner, step and attempt."""
        return f"{self.owner}-{self.step}-{self.attempt}{_SUFFIX}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyHeader:
    """Header of a copy.

    Attributes:
      step: see `CopyKey`.
      attempt: see `CopyKey`.
      owner: see `CopyKey`.
      content_bytes: size of the content in bytes.
      xxh3_128: hash of the content, in hexadecimal.
      facts: what the attempt that restores it must have in common with the one that wrote it, by name.
      corpora: fingerprints of the corpora that the run reads, in the order of its config.
    """

    step: int
    attempt: str
    owner: int
    content_bytes: int
    xxh3_128: str
    facts: dict
    corpora: list

    @property
    def key(self) -> CopyKey:
        """Step, attempt and owner of the copy, as in the name of its file."""
        return CopyKey(self.step, self.attempt, self.owner)


def hash_of_parts(parts: Iterable[np.ndarray]) -> str:
    """Returns the hash of arrays of bytes, one after the other, in hexadecimal."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.data)
    return digest.hexdigest()


def write_copy(folder: pathlib.Path, header: CopyHeader, parts: Sequence[np.ndarray]) -> pathlib.Path:
    """Writes a copy, and returns its path.

    Args:
      folder: folder of the run's copies.
      header: header of the copy.
      parts: content, arrays of bytes.
    """
    text = json.dumps(dataclasses.asdict(header)).encode()
    line = b"%s %s\n" % (durable.hash_of(text).hex().encode(), text)
    return _write(folder / header.key.file, [line, *parts])


def receive_copy(folder: pathlib.Path, key: CopyKey, chunks: Iterable[bytes]) -> None:
    """Writes a copy that another process sends, and verifies it before it gets its name.

    Raises:
      DamagedError: if it is damaged, or not the announced one.
    """

    def check(path: pathlib.Path) -> None:
        header, _ = verified(map_file(path))
        if header.key != key:
            raise DamagedError(f"a copy of {header.key} was announced as {key}")

    _write(folder / key.file, chunks, check)


def _write(
    path: pathlib.Path,
    content: Iterable[Any],
    check: Callable[[pathlib.Path], None] = lambda _: None,
) -> pathlib.Path:
    aside = durable.temporary_path(path)
    try:
        with durable.path_in_errors(aside), aside.open("wb", buffering=0) as file:
            for part in content:
                _write_all(file, memoryview(part).cast("B"))
        check(aside)
        return aside.replace(path)
    except BaseException:
        # Memory is scarce: an incomplete file would remain until the next start.
        aside.unlink(missing_ok=True)
        raise


def _write_all(file: Any, part: memoryview) -> None:
    done = 0
    while done < len(part):  # one call writes at most 2 GiB
        done += file.write(part[done:])


def map_file(path: pathlib.Path) -> memoryview:
    """Maps a file to memory without copying it; it stays readable after the file is removed."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise DamagedError(f"{path} is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def verified(content: memoryview) -> tuple[CopyHeader, memoryview]:
    """Verifies a copy, and returns its header and content.

    Raises:
      DamagedError: if a byte differs from what was written.
    """
    header, length = _parse_header(bytes(content[:MAX_HEADER_BYTES]))
    parts = content[length:]
    if len(parts) != header.content_bytes:
        raise DamagedError(f"it has {len(parts):,} of {header.content_bytes:,} bytes")
    if durable.hash_of(parts).hex() != header.xxh3_128:
        raise DamagedError("its checksum differs")
    return header, parts


def _parse_header(start: bytes) -> tuple[CopyHeader, int]:
    """Returns the header, and the number of bytes before the content."""
    line, newline, _ = start.partition(b"\n")
    checksum, _, text = line.partition(b" ")
    if not newline or durable.hash_of(text).hex().encode() != checksum:
        raise DamagedError("its header is damaged")
    return build(CopyHeader, json.loads(text), ""), len(line) + 1


def read_headers(folder: pathlib.Path) -> tuple[list[CopyHeader], list[str]]:
    """Returns the headers of all copies in a folder, and a message for each one that cannot be read.

    The contents are verified when they are restored: until then each is read by one process at most.
    """
    headers, damaged = [], []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            with path.open("rb") as file:
                headers.append(_parse_header(file.read(MAX_HEADER_BYTES))[0])
        except FileNotFoundError:  # removed by another process of this node
            continue
        except (OSError, ValueError) as error:
            damaged.append(f"{path}: {error}")
    return headers, damaged


def remove_copies(folder: pathlib.Path, *, keep: Callable[[str], bool], owner: int | None = None) -> None:
    """Removes copies and incomplete files.

    Args:
      folder: folder of the run's copies.
      keep: whether a file stays, by its name.
      owner: process whose copies are removed; None for all.
    """
    for path in folder.glob("*" if owner is None else f"{owner}-*"):
        if not keep(path.name):
            path.unlink(missing_ok=True)


def make_private_folder(folder: pathlib.Path) -> None:
    """Creates a folder that only this user can enter.

    Raises:
      UserError: if it exists and belongs to another user, who could have written copies to it.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    is_private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    if not (stat.S_ISDIR(status.st_mode) and is_private):
        raise UserError(
            f"train.peer_copies_folder: {folder} must be a folder that only this user can access; run "
            f"`chmod 700 {folder}`, or choose another folder"
        )


def file_system_of(path: pathlib.Path, mounts: str) -> str:
    """Returns the type of the file system of a path, such as "tmpfs".

    Args:
      path: path, which may not exist.
      mounts: content of `/proc/mounts`.
    """
    lines = (line.split() for line in mounts.splitlines())
    places: Mapping[str, str] = {fields[1]: fields[2] for fields in lines if len(fields) > 2}
    parents = (str(parent) for parent in (path, *path.parents))
    return next((places[parent] for parent in parents if parent in places), "unknown")
