"""Manifest of a checkpoint: sizes and hashes of all its files, which detect damage such as a flipped bit.

TensorStore has no checksums of array values and Orbax none of its files: a bit that a disk flips would
silently be restored as another number. Each step therefore has a manifest of all its files with sizes and
hashes, and a commit marker that is written last and contains the hash of the manifest. An extra file counts
as damage as well as a missing one, because arrays are found by listing files.
"""

import concurrent.futures
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from zaya_jax.checkpoint.format.layout import COMMITTED, DESCRIPTION, EMA, MANIFEST, TRAINING, step_folder
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import read_json
from zaya_jax.run_folder.names import CHECKPOINTS_FOLDER

_NUM_THREADS = 4
"""Threads that read files: a disk or a file system of a cluster serves several at a time faster than one."""
MIN_BYTES_FOR_THREADS = 2**24
"""Size of files that take longer to read than threads to start."""
Files = dict[str, dict[str, Any]]
"""Size and hash of each file, by its name relative to the folder of the step."""
Part = Callable[[str], bool]
"""Whether a file belongs to a part of a checkpoint, by its name relative to the folder of the step."""


def all_files(name: str) -> bool:
    """Selects every file of a step, weights and training state."""
    del name
    return True


def weight_files(name: str) -> bool:
    """Selects the files that inference needs: all except those of the training state and the average."""
    return not name.startswith((f"{TRAINING}/", f"{EMA}/"))


def average_files(name: str) -> bool:
    """Selects the files that inference with the average needs: frozen weights are in the item of weights."""
    return not name.startswith(f"{TRAINING}/")


def description_files(name: str) -> bool:
    """Selects the file of the description."""
    return name == DESCRIPTION


def commit(folder: pathlib.Path, step: int, files: Files) -> None:
    """Writes manifest and commit marker of a step whose files are synced. No file may be added later."""
    # Sorted, so that copies of a checkpoint have equal manifests and equal hashes.
    files = dict(sorted(files.items()))
    durable.write(folder / MANIFEST, manifest_text(step, files))
    durable.write(folder / COMMITTED, _marker(folder))


def manifest_text(step: int, files: Files) -> str:
    """Returns a manifest: JSON with an indent of one space."""
    if not files:
        return json.dumps({"step": step, "files": files}, indent=1) + "\n"
    # With an indent, Python does not use its encoder in C, and takes thrice as long. JSON escapes line breaks
    # in strings, so that they separate names.
    names = json.dumps(list(files), separators=("\n", ": "))[1:-1].split("\n")
    lines = ",\n".join(
        f'  {name}: {{\n   "bytes": {each["bytes"]},\n   "xxh3_128": "{each["xxh3_128"]}"\n  }}'
        for name, each in zip(names, files.values(), strict=True)
    )
    return f'{{\n "step": {step},\n "files": {{\n{lines}\n }}\n}}\n'


def sync_and_describe(folder: pathlib.Path, names: Iterable[str]) -> Files:
    """Syncs files to disk, which Orbax does not do, and returns their sizes and hashes."""
    names = list(names)

    def sync_and_describe_one(name: str) -> dict[str, Any]:
        durable.sync(folder / name)
        return _describe(folder / name)

    # In parallel, so that one file is hashed while another is being synced.
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        return dict(zip(names, pool.map(sync_and_describe_one, names), strict=True))


def damage_of(run_folder: str | pathlib.Path, step: int, part: Part = all_files) -> str | None:
    """Verifies a checkpoint or a part of it: the first damage as a message, or None if it is intact."""
    return next(all_damage(run_folder, step, part=part), None)


def all_damage(
    run_folder: str | pathlib.Path, step: int, *, hashes: bool = True, part: Part = all_files
) -> Iterator[str]:
    """Yields a message for each missing, extra or changed file of a checkpoint.

    Args:
      run_folder: folder of the run.
      step: step of the checkpoint.
      hashes: whether to read files and compare hashes. Without, only names and sizes are compared, which does
        not detect flipped bits; the description is read anyway, because it is small and shown to users.
      part: predicate of the files to verify; manifest and commit marker are always verified.
    """
    folder = step_folder(run_folder, step)
    try:
        if _is_converted(folder):
            yield from _check_converted(folder, hashes=hashes, part=part)
        else:
            yield from _check(folder, step, hashes=hashes, part=part)
    # A manifest that cannot be read or parsed is damage as well, not a crash.
    except (OSError, ValueError) as error:
        yield str(error)


def damage_in_share(
    run_folder: str | pathlib.Path, step: int, *, index: int, count: int, part: Part = all_files
) -> str | None:
    """Reads one of several shares of a checkpoint's files, of about as many bytes each, and compares hashes.

    Args:
      run_folder: folder of the run.
      step: step of the checkpoint, whose names `all_damage` has verified.
      index: number of the share, from 0.
      count: number of shares.
      part: predicate of the files to verify.

    Returns:
      The first damage as a message, or None if the files of the share are intact.
    """
    folder = step_folder(run_folder, step)
    try:
        if _is_converted(folder):
            expected = _converted_checksums(folder, part)
            # Of unknown sizes.
            names = sorted(expected)[index::count]
            return durable.find_damage(folder.parents[1], {name: expected[name] for name in names})
        listed = _read_manifest(folder, step)
        # In turn by size, so that no share has most of the large files.
        names = sorted(filter(part, listed), key=lambda name: (-_listed_bytes(listed[name]), name))
        return next(_changed_files(folder, listed, names[index::count], hashes=True), None)
    except (OSError, ValueError) as error:
        return str(error)


def identity_of(run_folder: str | pathlib.Path, step: int) -> str:
    """Hash that identifies a checkpoint and all its copies: the hash of the list of its files' hashes."""
    folder = step_folder(run_folder, step)
    manifest = folder / MANIFEST
    return durable.content_hash(manifest if manifest.exists() else folder.parents[1] / durable.CHECKSUMS)


def _check(folder: pathlib.Path, step: int, *, hashes: bool, part: Part) -> Iterator[str]:
    # Listing first: reading a pipe or a link to elsewhere could block or leave the folder.
    names = set(durable.list_files(folder))
    for name in (MANIFEST, COMMITTED):
        if name not in names:
            raise UserError(f"{name} is missing")
    listed = _read_manifest(folder, step)
    names, expected = set(filter(part, names - {MANIFEST, COMMITTED})), set(filter(part, listed))
    yield from _check_names(names, expected, MANIFEST)
    yield from _changed_files(folder, listed, sorted(names & expected), hashes=hashes)


def _read_manifest(folder: pathlib.Path, step: int) -> Files:
    # The marker protects the manifest itself, which protects all other files.
    if (folder / COMMITTED).read_bytes() != _marker(folder):
        raise UserError(f"{MANIFEST} is not as it was written")
    manifest = read_json(folder / MANIFEST)
    if manifest.get("step") != step:  # the folder is a renamed copy of another step
        raise UserError(f"it is a copy of step {manifest.get('step')}")
    listed = manifest.get("files")
    if not isinstance(listed, dict):
        raise UserError(f"{MANIFEST} lists no files")
    return listed


def _changed_files(
    folder: pathlib.Path, listed: Files, names: Iterable[str], *, hashes: bool
) -> Iterator[str]:
    """Yields a message for each file that differs from its entry, in the order of the names."""

    def damage(name: str) -> str | None:
        try:
            is_intact = _is_as_listed(folder / name, listed[name], hashes=hashes or name == DESCRIPTION)
        except OSError as error:  # other files of a failing disk may still be readable
            return f"{name} cannot be read: {error.strerror}"
        return None if is_intact else f"{name} is not as it was written"

    names = list(names)
    if not hashes or sum(_listed_bytes(listed[name]) for name in names) < MIN_BYTES_FOR_THREADS:
        yield from filter(None, map(damage, names))
        return
    pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS)
    try:
        # One by one, so that the caller can print damage while a large checkpoint is read.
        yield from filter(None, pool.map(damage, names))
    finally:
        # The caller may have enough of the first one.
        pool.shutdown(cancel_futures=True)


def _is_converted(folder: pathlib.Path) -> bool:
    """Whether `zaya convert` wrote a step: it has checksums for the whole folder instead of a manifest."""
    return not (folder / MANIFEST).exists() and (folder.parents[1] / durable.CHECKSUMS).is_file()


def _converted_checksums(folder: pathlib.Path, part: Part) -> dict[str, str]:
    """Returns the checksums of a converted step's files, by their names relative to the run folder."""
    start = f"{CHECKPOINTS_FOLDER}/{folder.name}/"
    listed = durable.read_checksums(folder.parents[1])
    return {
        name: checksum
        for name, checksum in listed.items()
        if name.startswith(start) and part(name.removeprefix(start))
    }


def _check_converted(folder: pathlib.Path, *, hashes: bool, part: Part) -> Iterator[str]:
    """Verifies weights that `zaya convert` wrote: that folder has one list of checksums, without sizes."""
    run_folder, start = folder.parents[1], f"{CHECKPOINTS_FOLDER}/{folder.name}/"
    expected = _converted_checksums(folder, part)
    names = set(filter(part, durable.list_files(folder)))
    yield from _check_names(names, {name.removeprefix(start) for name in expected}, durable.CHECKSUMS)
    for name, checksum in expected.items() if hashes else ():
        if name.removeprefix(start) in names:
            damage = durable.find_damage(run_folder, {name: checksum})
            if damage is not None:
                yield damage


def _check_names(names: set[str], listed: set[str], where: str) -> Iterator[str]:
    # An empty list would otherwise verify nothing and report success.
    if not listed:
        raise UserError(f"{where} lists none of its files")
    for name in sorted(listed - names):
        yield f"{name} is missing"
    for name in sorted(names - listed):
        yield f"{name} is not in {where}; it was added later"


def _listed_bytes(expected: Any) -> int:
    # An entry that another program has written is reported when its file is compared.
    size = expected.get("bytes") if isinstance(expected, dict) else None
    return size if isinstance(size, int) else 0


def _is_as_listed(file: pathlib.Path, expected: Any, *, hashes: bool) -> bool:
    # Comparing sizes is cheap and detects truncated files without reading them.
    if not isinstance(expected, dict) or file.stat().st_size != expected.get("bytes"):
        return False
    return not hashes or _describe(file) == expected


def _describe(file: pathlib.Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "xxh3_128": durable.content_hash(file)}


def _marker(folder: pathlib.Path) -> bytes:
    return f"{durable.content_hash(folder / MANIFEST)}\n".encode()
