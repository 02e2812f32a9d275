"""What the files of a checkpoint held when it was committed: all that tells of a flipped bit.

TensorStore has no checksum of an array's values, and Orbax none of its files: a bit that a disk turned is
restored as another number, without a word. So each step has a manifest of all its files, with sizes and
hashes, and a mark that is written last and holds the hash of the manifest. A file too many counts as damage
like a file too few: arrays are read by the names of what is there.
"""

import concurrent.futures
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from zaya_jax import durable
from zaya_jax.checkpoint.layout import ABOUT, COMMITTED, FOLDER, MANIFEST, step_folder
from zaya_jax.json_files import read_json

_FILES_AT_ONCE = 4
Files = dict[str, dict[str, Any]]
"""Size and hash of files, by their names in the folder of a step."""


def commit(folder: pathlib.Path, step: int, files: Files) -> None:
    """Writes manifest and mark of a step whose files are on the disk; behind it nothing may be added."""
    files = dict(sorted(files.items()))
    durable.write(folder / MANIFEST, json.dumps({"step": step, "files": files}, indent=1) + "\n")
    durable.write(folder / COMMITTED, _mark(folder))


def sync_and_describe(folder: pathlib.Path, names: Iterable[str]) -> Files:
    """Waits until files are on the disk, for which Orbax does not wait, and hashes them."""
    names = list(names)

    def sync_and_describe_one(name: str) -> dict[str, Any]:
        durable.sync(folder / name)
        return _describe(folder / name)

    # Several at a time: while the disk takes one file, another is hashed.
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return dict(zip(names, pool.map(sync_and_describe_one, names), strict=True))


def damage_of(run_folder: str | pathlib.Path, step: int) -> str | None:
    """Holds a checkpoint against what was written: None, or the first that is wrong with it."""
    return next(all_damage(run_folder, step), None)


def all_damage(run_folder: str | pathlib.Path, step: int, *, hashes: bool = True) -> Iterator[str]:
    """All that is wrong with a checkpoint, a file at a time; nothing of one that is as it was written.

    Args:
      run_folder: of the run.
      step: of the checkpoint.
      hashes: whether files are read. Without, names and sizes must do, which no flipped bit changes; what
        the step says of itself is read all the same, as it is little and shown.
    """
    folder = step_folder(run_folder, step)
    try:
        if not (folder / MANIFEST).exists() and (folder.parents[1] / durable.CHECKSUMS).is_file():
            yield from _check_converted(folder, hashes=hashes)
        else:
            yield from _check(folder, step, hashes=hashes)
    except (OSError, ValueError) as error:
        yield str(error)


def identity_of(run_folder: str | pathlib.Path, step: int) -> str:
    """The same text for copies of a checkpoint, wherever they lie: the hash of all its files' hashes."""
    folder = step_folder(run_folder, step)
    listed = folder / MANIFEST
    return durable.content_hash(listed if listed.exists() else folder.parents[1] / durable.CHECKSUMS)


def _check(folder: pathlib.Path, step: int, *, hashes: bool) -> Iterator[str]:
    names = set(durable.list_files(folder))
    for name in (MANIFEST, COMMITTED):
        if name not in names:
            raise ValueError(f"{name} is missing")
    if (folder / COMMITTED).read_bytes() != _mark(folder):
        raise ValueError(f"{MANIFEST} is not as it was written")
    manifest = read_json(folder / MANIFEST)
    if manifest.get("step") != step:  # a copy of another step, under this one's name
        raise ValueError(f"it is that of step {manifest.get('step')}")
    listed = manifest.get("files")
    if not isinstance(listed, dict):
        raise ValueError(f"{MANIFEST} lists no files")
    yield from _check_names(names - {MANIFEST, COMMITTED}, set(listed), MANIFEST)
    for name in sorted(names & set(listed)):
        try:
            if not _is_as_listed(folder / name, listed[name], hashes=hashes or name == ABOUT):
                yield f"{name} is not as it was written"
        except OSError as error:  # a disk that gives this file no more may give the others
            yield f"{name} cannot be read: {error.strerror}"


def _check_converted(folder: pathlib.Path, *, hashes: bool) -> Iterator[str]:
    """A folder of weights that `zaya convert` wrote has the sums of all its files, and not their sizes."""
    run_folder, start = folder.parents[1], f"{FOLDER}/{folder.name}/"
    listed = durable.read_checksums(run_folder)
    inside = {name: checksum for name, checksum in listed.items() if name.startswith(start)}
    found = set(durable.list_files(folder))
    yield from _check_names(found, {name.removeprefix(start) for name in inside}, durable.CHECKSUMS)
    for name, checksum in inside.items() if hashes else ():
        if name.removeprefix(start) in found:
            damage = durable.find_damage(run_folder, {name: checksum})
            if damage is not None:
                yield damage


def _check_names(found: set[str], listed: set[str], where: str) -> Iterator[str]:
    if not listed:
        raise ValueError(f"{where} has none of its files")
    for name in sorted(listed - found):
        yield f"{name} is missing"
    for name in sorted(found - listed):
        yield f"{name} is not in {where}; it was not written with the other files"


def _is_as_listed(file: pathlib.Path, expected: Any, *, hashes: bool) -> bool:
    if not isinstance(expected, dict) or file.stat().st_size != expected.get("bytes"):
        return False
    return not hashes or _describe(file) == expected


def _describe(file: pathlib.Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "xxh3_128": durable.content_hash(file)}


def _mark(folder: pathlib.Path) -> bytes:
    return f"{durable.content_hash(folder / MANIFEST)}\n".encode()
