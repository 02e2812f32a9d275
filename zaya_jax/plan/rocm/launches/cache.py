"""Compiled launches of kernels, and the folder that keeps them between processes."""

import dataclasses
import json
import os
import pathlib
import time
from typing import Any

import msgpack

from zaya_jax.files.durable import make_folder, sha256, temporary_path, write

FOLDER_VARIABLE = "ZAYA_COMPILED_KERNELS"
"""Environment variable that selects another folder; empty, nothing is kept."""
SECONDS_UNUSED = 30 * 24 * 3600.0
"""Entries that nobody read or wrote for this long are deleted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledLaunch:
    """Machine code of a kernel and the sizes of its launch.

    Attributes:
      kernel: name of the kernel in the code object.
      code: code object, an ELF file.
      grid: workgroups along three axes.
      threads: threads per workgroup.
      lds_bytes: dynamic local memory per workgroup, in bytes.
    """

    kernel: str
    code: bytes
    grid: tuple[int, int, int]
    threads: int
    lds_bytes: int


def key_of(program: bytes, **conditions: Any) -> str:
    """Returns the key of a compiled launch: a hash of all that its code depends on.

    Args:
      program: serialized program.
      **conditions: versions and options of the compiler, as values that JSON can represent.
    """
    # A hash of fixed length first, so that no program and conditions together read as another pair.
    text = json.dumps(conditions, sort_keys=True).encode()
    return sha256(sha256(program).encode() + text)


def default_folder() -> pathlib.Path | None:
    """The folder of compiled launches; None if the environment turns it off."""
    # One folder for all versions of jax: the key of each entry has them.
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return pathlib.Path(named) if named else None
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "zaya_jax" / "compiled_kernels"


def read_entry(folder: pathlib.Path, key: str) -> CompiledLaunch | None:
    """Returns the compiled launch of a key; None if there is none, or the file is damaged."""
    file = folder / key
    try:
        checksum, _, content = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    # A damaged file is compiled and written again, so that no error needs to be reported.
    if checksum.decode(errors="replace") != sha256(content):
        return None
    try:
        fields = msgpack.unpackb(content)
        entry = CompiledLaunch(**fields | {"grid": tuple(fields["grid"])})
    except (ValueError, KeyError, TypeError):  # of another version of this file
        return None
    # The time of the last use, by which unused entries are deleted.
    os.utime(file)
    return entry


def write_entry(folder: pathlib.Path, key: str, entry: CompiledLaunch) -> None:
    """Writes the compiled launch of a key, after its checksum."""
    make_folder(folder)
    content: Any = msgpack.packb(dataclasses.asdict(entry))
    # Several processes may compile the same launch at the same time; the last one to rename its file wins.
    aside = temporary_path(folder / key)
    write(aside, sha256(content).encode() + b"\n" + content)
    aside.replace(folder / key)


def delete_unused(folder: pathlib.Path, *, seconds: float = SECONDS_UNUSED) -> None:
    """Deletes files that nobody has used for some seconds."""
    oldest = time.time() - seconds
    for file in folder.glob("*"):
        try:
            if file.stat().st_mtime < oldest:
                file.unlink()
        except FileNotFoundError:  # another process has deleted it
            continue
