"""Opens sources of text: finds the files, and selects a reader by the kind of file.

A source yields documents one by one; only the names of its files stay in memory.
"""

import collections
import dataclasses
import fnmatch
import functools
import hashlib
import os
import pathlib
import platform
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from zaya_jax.data.sources.documents import BrokenRecord, Document
from zaya_jax.data.sources.json_lines import is_json_lines, read_json_lines
from zaya_jax.data.sources.parquet import ARROW, SUFFIXES, read_table
from zaya_jax.data.sources.skipped import Skipped
from zaya_jax.errors import UserError
from zaya_jax.files.hub import fetch
from zaya_jax.files.json_files import read_json
from zaya_jax.files.untrusted_folder import describe_special

# Installed packages are not part of Python. Tests contain generated data, bad syntax and other encodings.
_STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_TEXT, _JSON = "text", "JSON lines"
# Suffixes of compressed files and archives that are not supported.
_COMPRESSED = (".7z", ".br", ".lz4", ".lzma", ".rar", ".snappy", ".sz", ".tar", ".tgz", ".z", ".zip")
# Files of a data set on the Hugging Face hub that may contain its text; excludes the data card.
_HUB_PATTERNS = ("*.parquet", "*.arrow", "*.feather", "*.json", "*.jsonl", "*.ndjson", "*.gz", "*.zst",
                 "*.xz", "*.bz2", "*.txt")  # fmt: skip
# Files that `save_to_disk` of `datasets` writes next to the files of a data set, and next to its splits.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
FIELD = "text"
"""Default field or column with the text."""

Reader = Callable[[pathlib.Path, str], Iterator[Document | BrokenRecord]]


def _read_text(file_path: pathlib.Path, path: str) -> Iterator[Document | BrokenRecord]:
    try:
        raw = file_path.read_bytes()
    except OSError as error:
        # A file that opens but cannot be read raises an error without a file name.
        error.filename = error.filename or str(file_path)
        raise
    yield Document(path=path, raw=raw, read=len(raw))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource:
    """Files with text, in the order in which they are read.

    Attributes:
      root: the source's folder, or its only file.
      description: description of the source in the manifest of a corpus.
      named: description of the files in error messages.
      files: paths of the files, relative to the folder.
      skipped: entries whose name matches, but which are not regular files.
      size: size of a source without files in bytes, 0 if it is not known; None for a source with files.
      read: yields the documents of one file.
    """

    root: pathlib.Path
    description: str
    named: str
    files: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()
    size: int | None = None
    read: Reader = _read_text

    def __iter__(self) -> Iterator[Document | BrokenRecord]:
        """Yields all documents and broken records.

        Raises:
          OSError: if a file cannot be read.
        """
        for path in self.files:
            yield from self.read(self._folder / path, path)

    @property
    def num_bytes(self) -> int:
        """Total size of the source in bytes, for progress; 0 if it is not known."""
        if self.size is not None:
            return self.size
        return sum((self._folder / path).stat().st_size for path in self.files)

    @property
    def _folder(self) -> pathlib.Path:
        return self.root if self.root.is_dir() else self.root.parent


def open_source(source: str, *, pattern: str | None = None, field: str | None = None) -> TextSource:
    """Finds the files of a source and how to read them.

    Args:
      source: "stdlib" for Python's standard library without its tests; a file; a folder; or the id of a data
        set on the Hugging Face hub, which is downloaded. A file is plain text unless its suffix is one of
        JSON Lines (.jsonl, .ndjson, .json, also with .gz, .zst, .xz or .bz2), Parquet or Arrow (or .feather).
        The files of a folder must all be of one kind; a .json file in a folder counts as text unless `field`
        is set. A folder written by `save_to_disk` of `datasets` is detected by its state files.
      pattern: glob pattern for file names in a folder; None means "*.py" for "stdlib" and "*" for a folder.
      field: field of a record that contains the text; None means "text".

    Raises:
      UserError: if there are no files, or the kind of the files is unclear.
      OSError: if a folder cannot be read.
    """
    if source == "stdlib":
        return _open_stdlib(pattern or "*.py")
    if download := fetch(source, "dataset", patterns=_HUB_PATTERNS if pattern is None else (pattern,)):
        opened = _open_folder(download.folder.resolve(), pattern, field)
        # The manifest names the data set instead of the local cache folder.
        folder = str(download.folder.resolve())
        return dataclasses.replace(
            opened, description=opened.description.replace(folder, f"data set {download.name}", 1)
        )
    # Resolved, because the manifest records where the text came from.
    root = pathlib.Path(source).resolve()
    if root.is_dir():
        return _open_folder(root, pattern, field)
    if not root.exists():
        raise UserError(
            f'the source {root} does not exist; it must be a folder or a file with text, or "stdlib"'
        )
    return _open_file(root, pattern, field)


def _open_stdlib(pattern: str) -> TextSource:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"]).resolve()
    description = f"stdlib of Python {platform.python_version()}, {pattern}"
    return _text_folder(root, pattern, description, excluded=_STDLIB_EXCLUDED)


def _open_file(root: pathlib.Path, pattern: str | None, field: str | None) -> TextSource:
    if pattern is not None:
        raise UserError(f'--pattern is "{pattern}", but the source {root} is a single file; remove --pattern')
    if (reason := _why_no_file(root)) is not None:
        raise UserError(f"the source {root} is {reason}; it must be a folder or a file with text")
    _check_compression(root.parent, [root.name])
    source = TextSource(root=root, description=str(root), named=f"files like {root}", files=(root.name,))
    return _with_kind(source, _kind_of(root.name), field, named=str(root))


def _open_folder(root: pathlib.Path, pattern: str | None, field: str | None) -> TextSource:
    if (root / _SPLITS).is_file():
        names = ", ".join(str(name) for name in read_json(root / _SPLITS).get("splits", ()))
        raise UserError(f"the source {root} has the splits {names}; choose one: --source {root}/SPLIT")
    # A pattern selects files explicitly, and so disables the detection.
    if (root / _STATE).is_file() and pattern is None:
        return _open_data_set(root, field)
    source = _text_folder(root, pattern or "*", f"{root}, {pattern or '*'}")
    if pattern is None:
        _check_compression(root, source.files)
    return _with_kind(source, _kind_of_all(source, pattern, field), field, named=source.named)


def _open_data_set(root: pathlib.Path, field: str | None) -> TextSource:
    """Opens a data set that `save_to_disk` wrote; its state file lists its files in order."""
    listed = read_json(root / _STATE).get("_data_files")
    try:
        files = tuple(str(each["filename"]) for each in listed or ())
    except (TypeError, KeyError) as error:
        raise UserError(f"{root / _STATE} does not list the files of a data set") from error
    for name in files:
        # The name comes from a file of others: it must not point outside the folder.
        if not (root / name).is_file() or pathlib.PurePath(name).name != name:
            raise UserError(
                f'{root} has no file "{name}", which its {_STATE} lists; restore the complete data set'
            )
    if not files:
        raise UserError(f"{root / _STATE} lists no files; a corpus needs some text")
    source = TextSource(root=root, description=str(root), named=f"files in {root}", files=files)
    return _with_kind(source, ARROW, field, named=source.named)


def _kind_of(name: str) -> str:
    return _JSON if is_json_lines(name) else SUFFIXES.get(pathlib.PurePath(name).suffix, _TEXT)


def _check_compression(root: pathlib.Path, names: Sequence[str]) -> None:
    """Rejects records in an unsupported compression; they would be skipped, or trained on as text.

    Raises:
      UserError: naming the first such file.
    """
    for name in names:
        path = pathlib.PurePath(name)
        if path.suffix.lower() in _COMPRESSED and _kind_of(path.stem) != _TEXT:
            raise UserError(
                f"{root / name} has the compression {path.suffix}, which is not supported; unpack it, or "
                "compress it with gzip, Zstandard, xz or bzip2"
            )


def _kind_of_all(source: TextSource, pattern: str | None, field: str | None) -> str:
    """The one kind of a folder's files. With an explicit pattern, mixed files count as text.

    Raises:
      UserError: if there are several kinds and no pattern: records would be trained on as raw JSON, and
        tables would be skipped.
    """
    # A .json file may be a single document, such as a config, so it counts as records only with a field.
    names = (name for name in source.files if field is not None or not name.endswith(".json"))
    counts = collections.Counter(_kind_of(name) for name in names)
    counts[_TEXT] += len(source.files) - counts.total()
    kinds = [kind for kind, count in counts.items() if count]
    if len(kinds) == 1:
        return kinds[0]
    # The user selected these files explicitly.
    if pattern is not None and field is None:
        return _TEXT
    listed = ", ".join(f"{counts[kind]:,} of {kind}" for kind in sorted(kinds))
    raise UserError(
        f"{source.root} has files of several kinds ({listed}); select one kind, as with --pattern "
        "'*.jsonl', or read all as text with --pattern '*'"
    )


def _with_kind(source: TextSource, kind: str, field: str | None, *, named: str) -> TextSource:
    """The source with the reader of a kind of files; texts are read as they are."""
    if kind != _TEXT:
        field = field or FIELD
        read = functools.partial(read_json_lines if kind == _JSON else read_table, field=field)
        return dataclasses.replace(source, read=read, description=f'{source.description}, field "{field}"')
    if field is not None:
        raise UserError(
            f'--field is "{field}", but {named} are plain text, which has no fields; remove --field'
        )
    return source


def _text_folder(
    root: pathlib.Path, pattern: str, description: str, *, excluded: frozenset[str] = frozenset()
) -> TextSource:
    """The files of a folder whose names match the pattern, ordered by a hash of their paths.

    Raises:
      UserError: if no file matches.
    """
    paths: list[str] = []
    skipped: list[Skipped] = []
    for parent, folders, names in os.walk(root, onerror=_raise):
        # Assigned in place, so that os.walk does not descend into the excluded folders.
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        # os.walk does not follow links to folders, which could form a cycle; they are reported as skipped.
        links = [name for name in folders if pathlib.Path(parent, name).is_symlink()]
        matching = [name for name in fnmatch.filter(names, pattern) if not name.startswith(".")]
        for file_path in (pathlib.Path(parent, name) for name in (*links, *matching)):
            path, reason = file_path.relative_to(root).as_posix(), _why_no_file(file_path)
            if reason is None:
                paths.append(path)
            else:
                skipped.append(Skipped(path, reason))
    if not paths:
        raise UserError(f'no file in {root} has a name that matches "{pattern}"; a corpus needs some text')
    return TextSource(
        root=root,
        description=description,
        named=f'files like "{pattern}" in {root}',
        files=tuple(sorted(paths, key=lambda path: (_sort_key(path), path))),
        skipped=tuple(skipped),
    )


def _sort_key(path: str) -> bytes:
    """A hash, so that the start of a corpus mixes files from all folders."""
    return hashlib.blake2b(os.fsencode(path), digest_size=8).digest()


def _why_no_file(path: pathlib.Path) -> str | None:
    """The reason why a path is not a regular file; None for a file or a link to one.

    Opening a pipe or some devices would block forever.
    """

    try:
        # Follows links, so a link to a file is read like the file.
        mode = path.stat().st_mode
    except OSError:
        if path.is_symlink():
            return "a link to nothing"
        raise
    return "a link to a folder" if stat.S_ISDIR(mode) else describe_special(mode)


def _raise(error: OSError) -> NoReturn:
    raise error
