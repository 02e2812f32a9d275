"""Compiled launches of kernels, and the folder that keeps them between processes."""

import base64
import binascii
import dataclasses
import json
import os
import pathlib
import time
from typing import Any

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

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "CompiledLaunch":
        """Reads the form that JSON can represent, as `to_fields` writes it."""
        x, y, z = map(int, fields["grid"])
        return cls(
            kernel=str(fields["kernel"]),
            code=base64.b64decode(fields["code"], validate=True),
            grid=(x, y, z),
            threads=int(fields["threads"]),
            lds_bytes=int(fields["lds_bytes"]),
        )

    def to_fields(self) -> dict[str, Any]:
        """Returns fields that JSON can represent; the code is in base64."""
        return dataclasses.asdict(self) | {"code": base64.b64encode(self.code).decode()}


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
        checksum, _, text = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    # A damaged file is compiled and written again, so that no error needs to be reported.
    if checksum.decode(errors="replace") != sha256(text):
        return None
    try:
        entry = CompiledLaunch.from_fields(json.loads(text))
    except (ValueError, KeyError, TypeError, binascii.Error):  # of another version of this file
        return None
    # The time of the last use, by which unused entries are deleted.
    os.utime(file)
    return entry


def write_entry(folder: pathlib.Path, key: str, entry: CompiledLaunch) -> None:
    """Writes the compiled launch of a key, after its checksum."""
    make_folder(folder)
    text = json.dumps(entry.to_fields()).encode()
    # Several processes may compile the same launch at the same time; the last one to rename its file wins.
    aside = temporary_path(folder / key)
    write(aside, sha256(text).encode() + b"\n" + text)
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
