"""Where text comes from: what lies in a folder, which of it is taken, and how each kind of file is read.

A source gives documents one after the other, and nothing of it stays in memory but the names of its files.
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

from zaya_jax.data.documents import Broken, Document
from zaya_jax.data.json_lines import read_json_lines
from zaya_jax.data.left_out import LeftOut
from zaya_jax.data.tables import read_arrow, read_parquet
from zaya_jax.json_files import read_json

# Beside what others installed, tests: they hold generated data, bad syntax and other encodings.
_STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_TEXT, _JSON, _PARQUET, _ARROW = "text", "JSON lines", "Parquet", "Arrow"
_KINDS = {".jsonl": _JSON, ".ndjson": _JSON, ".json": _JSON, ".parquet": _PARQUET, ".arrow": _ARROW}
_PACKED = (".gz", ".zst")
_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""What `save_to_disk` of `datasets` leaves beside the files of a data set, and beside its splits."""
FIELD = "text"
"""The field or column with the text, where none is named."""

Reader = Callable[[pathlib.Path, str], Iterator[Document | Broken]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource:
    """Files with text, in the order in which they are read.

    Attributes:
      root: the folder, or the file that is all of it.
      description: how a manifest calls it.
      named: how a sentence calls its files.
      files: their paths, relative to the folder.
      left_out: what has such a name but is no file.
      read: the documents of a file.
    """

    root: pathlib.Path
    description: str
    named: str
    files: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    read: Reader

    def __iter__(self) -> Iterator[Document | Broken]:
        """All documents, and records that are none.

        Raises:
          OSError: for a file that cannot be read.
        """
        for path in self.files:
            yield from self.read(self._folder / path, path)

    @property
    def num_bytes(self) -> int:
        """Of all its files on the disk."""
        return sum((self._folder / path).stat().st_size for path in self.files)

    @property
    def _folder(self) -> pathlib.Path:
        return self.root if self.root.is_dir() else self.root.parent


def open_source(source: str, *, pattern: str | None = None, field: str | None = None) -> TextSource:
    """Looks at what lies there.

    Args:
      source: "stdlib" for Python's own library without its tests, a file, or a folder. A file is text
        unless its name ends as one of JSON lines (.jsonl, .ndjson, .json, also with .gz or .zst), Parquet or
        Arrow. So are the files of a folder, if all are of one kind; a .json among them is text, unless
        `field` is given. A folder that `save_to_disk` of `datasets` wrote is known by what lies in it.
      pattern: names of a folder's files to take; "*.py" for "stdlib" and all for a folder when None.
      field: of a record, that has the text; "text" when None.

    Raises:
      ValueError: when there is nothing, or it cannot be known what is text.
      OSError: for a folder that cannot be read.
    """
    if source == "stdlib":
        return _open_stdlib(pattern or "*.py")
    root = pathlib.Path(source).resolve()
    if root.is_dir():
        return _open_folder(root, pattern, field)
    if not root.exists():
        raise ValueError(
            f'there is no source folder {root}; it must be a folder or a file with text, or "stdlib"'
        )
    return _open_file(root, pattern, field)


def _open_stdlib(pattern: str) -> TextSource:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"]).resolve()
    description = f"stdlib of Python {platform.python_version()}, {pattern}"
    return _text_folder(root, pattern, description, excluded=_STDLIB_EXCLUDED)


def _open_file(root: pathlib.Path, pattern: str | None, field: str | None) -> TextSource:
    if pattern is not None:
        raise ValueError(f'--pattern is "{pattern}", and the source {root} is one file; leave it out')
    if (reason := _why_no_file(root)) is not None:
        raise ValueError(f"the source {root} is {reason}; it must be a folder or a file with text")
    kind = _kind_of(root.name)
    _check_field([root.name], kind, field, str(root))
    return TextSource(
        root=root,
        description=_with_field(str(root), kind, field),
        named=f"files like {root}",
        files=(root.name,),
        read=_reader(kind, field),
    )


def _open_folder(root: pathlib.Path, pattern: str | None, field: str | None) -> TextSource:
    if (root / _SPLITS).is_file():
        names = ", ".join(str(name) for name in read_json(root / _SPLITS).get("splits", ()))
        raise ValueError(f"the source {root} has the splits {names}; name one, as --source {root}/SPLIT")
    if (root / _STATE).is_file() and pattern is None:
        return _open_data_set(root, field)
    source = _text_folder(root, pattern or "*", f"{root}, {pattern or '*'}")
    kind = _kind_of_all(source, pattern, field)
    _check_field(source.files, kind, field, source.named)
    return dataclasses.replace(
        source, read=_reader(kind, field), description=_with_field(source.description, kind, field)
    )


def _open_data_set(root: pathlib.Path, field: str | None) -> TextSource:
    """A data set as `save_to_disk` left it: the order of its files is in its state."""
    listed = read_json(root / _STATE).get("_data_files")
    try:
        files = tuple(str(each["filename"]) for each in listed or ())
    except (TypeError, KeyError) as error:
        raise ValueError(f"{root / _STATE} does not list the files of a data set") from error
    for name in files:
        if not (root / name).is_file() or pathlib.PurePath(name).name != name:
            raise ValueError(f'{root} has no "{name}", which its {_STATE} lists; it must be a whole data set')
    if not files:
        raise ValueError(f"{root / _STATE} lists no files; a corpus needs some text")
    return TextSource(
        root=root,
        description=_with_field(str(root), _ARROW, field),
        named=f"files in {root}",
        files=files,
        read=_reader(_ARROW, field),
    )


def _kind_of(name: str) -> str:
    path = pathlib.PurePath(name)
    is_packed = path.suffix in _PACKED
    kind = _KINDS.get(pathlib.PurePath(path.stem).suffix if is_packed else path.suffix, _TEXT)
    return kind if kind == _JSON or not is_packed else _TEXT


def _kind_of_all(source: TextSource, pattern: str | None, field: str | None) -> str:
    """The one kind of a folder's files; text with a pattern that takes others too.

    Raises:
      ValueError: for several kinds, when nobody said which is meant: records would be trained on with their
        braces, and tables be left out.
    """
    names = (name for name in source.files if field is not None or not name.endswith(".json"))
    counts = collections.Counter(_kind_of(name) for name in names)
    counts[_TEXT] += len(source.files) - counts.total()
    kinds = [kind for kind, count in counts.items() if count]
    if len(kinds) == 1:
        return kinds[0]
    if pattern is not None and field is None:
        return _TEXT
    found = ", ".join(f"{counts[kind]:,} of {kind}" for kind in sorted(kinds))
    raise ValueError(
        f"{source.root} has files of several kinds ({found}); --pattern must take one, as --pattern "
        "'*.jsonl', or --pattern '*' all as text"
    )


def _check_field(files: Sequence[str], kind: str, field: str | None, named: str) -> None:
    if field is not None and kind == _TEXT and files:
        raise ValueError(f'--field is "{field}", and {named} are text, which has no fields; leave it out')


def _with_field(description: str, kind: str, field: str | None) -> str:
    return description if kind == _TEXT else f'{description}, field "{field or FIELD}"'


def _reader(kind: str, field: str | None) -> Reader:
    readers = {_JSON: read_json_lines, _PARQUET: read_parquet, _ARROW: read_arrow}
    return _read_text if kind == _TEXT else functools.partial(readers[kind], field=field or FIELD)


def _read_text(place: pathlib.Path, path: str) -> Iterator[Document | Broken]:
    try:
        raw = place.read_bytes()
    except OSError as error:
        error.filename = error.filename or str(place)  # a file that opens and cannot be read has none
        raise
    yield Document(path=path, raw=raw, read=len(raw))


def _text_folder(
    root: pathlib.Path, pattern: str, description: str, *, excluded: frozenset[str] = frozenset()
) -> TextSource:
    """The files of a folder that the pattern takes, in the order of the hashes of their paths.

    Raises:
      ValueError: when it takes none.
    """
    paths: list[str] = []
    left_out: list[LeftOut] = []
    for parent, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        # A link may lead back to where it lies; os.walk follows none.
        links = [name for name in folders if pathlib.Path(parent, name).is_symlink()]
        taken = [name for name in fnmatch.filter(names, pattern) if not name.startswith(".")]
        for place in (pathlib.Path(parent, name) for name in (*links, *taken)):
            path, reason = place.relative_to(root).as_posix(), _why_no_file(place)
            if reason is None:
                paths.append(path)
            else:
                left_out.append(LeftOut(path, reason))
    if not paths:
        raise ValueError(f'no file in {root} has a name like "{pattern}"; a corpus needs some text')
    return TextSource(
        root=root,
        description=description,
        named=f'files like "{pattern}" in {root}',
        files=tuple(sorted(paths, key=lambda path: (_place_of(path), path))),
        left_out=tuple(left_out),
        read=_read_text,
    )


def _place_of(path: str) -> bytes:
    """By which files are sorted, so that the beginning of a corpus is of all its folders."""
    return hashlib.blake2b(os.fsencode(path), digest_size=8).digest()


def _why_no_file(path: pathlib.Path) -> str | None:
    """What lies at a path, as a reason to leave it out; None for a file, or a link to one.

    Opening a pipe or some devices would wait for ever.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        if path.is_symlink():
            return "a link to nothing"
        raise
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        return "a link to a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _raise(error: OSError) -> NoReturn:
    raise error
