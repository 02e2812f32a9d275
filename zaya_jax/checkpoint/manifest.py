"""What the files of a checkpoint held when it was committed: all that tells of a flipped bit.

TensorStore has no checksum of an array's values, and Orbax none of its files: a bit that a disk turned is
restored as another number, without a word. So each step has a manifest of all its files, with sizes and
hashes, and a mark that is written last and holds the hash of the manifest. A file too many counts as damage
like a file too few: arrays are read by the names of what is there.
"""

import json
import pathlib
from typing import Any

from zaya_jax import durable
from zaya_jax.checkpoint.layout import COMMITTED, FOLDER, MANIFEST, step_folder
from zaya_jax.json_files import read_json


def commit(folder: pathlib.Path, step: int) -> None:
    """Writes manifest and mark of a step whose files are all written; behind it nothing may be added."""
    names = sorted(set(durable.list_files(folder)) - {MANIFEST, COMMITTED})
    files = {name: _describe(folder / name) for name in names}
    durable.write(folder / MANIFEST, json.dumps({"step": step, "files": files}, indent=1) + "\n")
    durable.write(folder / COMMITTED, _mark(folder))


def damage_of(run_folder: str | pathlib.Path, step: int) -> str | None:
    """Holds a checkpoint against what was written: None, or what is wrong with it."""
    folder = step_folder(run_folder, step)
    try:
        if not (folder / MANIFEST).exists() and (folder.parents[1] / durable.CHECKSUMS).is_file():
            _check_converted(folder)
        else:
            _check(folder, step)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _check(folder: pathlib.Path, step: int) -> None:
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
    _check_names(names - {MANIFEST, COMMITTED}, set(listed), MANIFEST)
    for name, expected in listed.items():
        if _describe(folder / name) != expected:
            raise ValueError(f"{name} is not as it was written")


def _check_converted(folder: pathlib.Path) -> None:
    """A folder of weights that `zaya convert` wrote has the sums of all its files."""
    run_folder, start = folder.parents[1], f"{FOLDER}/{folder.name}/"
    listed = durable.read_checksums(run_folder)
    inside = {name: checksum for name, checksum in listed.items() if name.startswith(start)}
    _check_names(
        set(durable.list_files(folder)), {name.removeprefix(start) for name in inside}, durable.CHECKSUMS
    )
    damage = durable.find_damage(run_folder, inside)
    if damage is not None:
        raise ValueError(damage)


def _check_names(found: set[str], listed: set[str], where: str) -> None:
    if not listed:
        raise ValueError(f"{where} has none of its files")
    if listed - found:
        raise ValueError(f"{min(listed - found)} is missing")
    if found - listed:
        raise ValueError(f"{min(found - listed)} is not in {where}; it was not written with the other files")


def _describe(file: pathlib.Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "xxh3_128": durable.content_hash(file)}


def _mark(folder: pathlib.Path) -> bytes:
    return f"{durable.content_hash(folder / MANIFEST)}\n".encode()
