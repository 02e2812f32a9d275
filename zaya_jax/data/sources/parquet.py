"""Reads rows of Parquet and Arrow files, as documents or as records."""

import pathlib
from collections.abc import Iterator
from typing import Any

from zaya_jax.data.sources.documents import MAX_RECORD_BYTES, BrokenRecord, Document, find_package
from zaya_jax.data.sources.json_lines import describe_fields
from zaya_jax.data.sources.skipped import Skipped
from zaya_jax.errors import UserError
from zaya_jax.files.content_type import HEAD_BYTES, describe_content

PARQUET, ARROW = "Parquet", "Arrow"
SUFFIXES = {".parquet": PARQUET, ".arrow": ARROW, ".feather": ARROW}
"""Formats by file suffix."""
# Number of Parquet rows that are read at a time.
_ROWS = 256
# First bytes of a file. An Arrow stream, as `datasets` writes it, has no such mark.
_MARKS = {PARQUET: b"PAR1", ARROW: b"ARROW1"}
_FEATHER_1 = b"FEA1"


def read_table(file_path: pathlib.Path, path: str, *, field: str) -> Iterator[Document | BrokenRecord]:
    """Yields the texts in a column of a Parquet or Arrow file, one per row, in bounded memory.

    Args:
      file_path: path of the file; its suffix must be one of `SUFFIXES`. An Arrow file may be a stream, as
        `datasets` writes it, or a file (Feather).
      path: path that documents report, relative to the source.
      field: column with the text.

    Raises:
      UserError: if pyarrow is not installed.
      OSError: if the file cannot be read.
    """
    pyarrow, kind = find_package("pyarrow", str(file_path)), SUFFIXES[file_path.suffix]
    if (content := _wrong_format(file_path, kind)) is not None:
        yield BrokenRecord(Skipped(path, f"not {kind}"), f"it is {content}")
        return
    batches = _OPENERS[kind](file_path, field)
    number, size, before = 0, file_path.stat().st_size, 0
    try:
        if (broken := _check_column(next(batches), path, field)) is not None:
            yield broken
            return
        for batch in batches:
            for raw in _texts(batch.column(batch.schema.names.index(field)), pyarrow):
                number += 1
                # Rows have no byte offsets in the file, so progress counts text, up to the file's size.
                read = min(len(raw or b""), size - before)
                yield _document(raw, path, number, field=field, read=read)
                before += read
    except (pyarrow.ArrowException, OSError) as error:
        yield BrokenRecord(Skipped(path, "the rest is damaged", record=number + 1), _damage_of(error))


def read_rows(file_path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows of a Parquet or Arrow file with their numbers, from 1.

    Args:
      file_path: path of the file; its suffix must be one of `SUFFIXES`.

    Raises:
      UserError: if pyarrow is not installed, or the file is damaged or has another format.
      OSError: if the file cannot be read.
    """
    pyarrow, kind, number = find_package("pyarrow", str(file_path)), SUFFIXES[file_path.suffix], 0
    if (content := _wrong_format(file_path, kind)) is not None:
        raise UserError(f"{file_path} is {content}; it must be a file of the format {kind}")
    batches = _OPENERS[kind](file_path, None)
    try:
        next(batches)
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{file_path}, record {number + 1}: the rest of the file is damaged; {_damage_of(error)}"
        ) from error


def _damage_of(error: Exception) -> str:
    """The reason why a file cannot be read further; raises errors of the system again."""
    # pyarrow raises OSError without an error number for damaged files; others come from the system.
    if getattr(error, "errno", None) is not None:
        raise error
    # The other lines are internals of Arrow's C++ code.
    return str(error).split("\n")[0]


def _parquet_batches(file_path: pathlib.Path, column: str | None) -> Iterator[Any]:
    """Yields the schema of a Parquet file, then batches of its rows: of one column, or of all if None."""
    parquet = find_package("pyarrow.parquet", str(file_path))
    # Without checksum verification, a page that was corrupted on disk would be read as different text.
    with parquet.ParquetFile(file_path, page_checksum_verification=True) as file:
        yield file.schema_arrow
        # A missing column is reported by the caller, which has the schema.
        if column is None or column in file.schema_arrow.names:
            yield from file.iter_batches(_ROWS, columns=None if column is None else [column])


def _arrow_batches(file_path: pathlib.Path, _: str | None) -> Iterator[Any]:
    """Yields the schema of an Arrow stream or file, then its batches."""
    pyarrow = find_package("pyarrow", str(file_path))
    with pyarrow.OSFile(str(file_path)) as file:
        if _head(file_path).startswith(_MARKS[ARROW]):
            with pyarrow.ipc.open_file(file) as reader:
                yield reader.schema
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            with pyarrow.ipc.open_stream(file) as stream:
                yield stream.schema
                yield from stream


_OPENERS = {PARQUET: _parquet_batches, ARROW: _arrow_batches}


def _head(file_path: pathlib.Path) -> bytes:
    with file_path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _wrong_format(file_path: pathlib.Path, kind: str) -> str | None:
    """What a file contains if it is recognizably not of the format that its name claims; else None."""
    head = _head(file_path)
    if head.startswith(_FEATHER_1):
        return "a Feather file of version 1, which is not supported; write it again as version 2"
    return None if head.startswith(_MARKS[kind]) else describe_content(head)


def _check_column(schema: Any, path: str, field: str) -> BrokenRecord | None:
    if field not in schema.names:
        return BrokenRecord(Skipped(path, f'no column "{field}"'), describe_fields(schema.names))
    kind = schema.field(schema.names.index(field)).type
    # Dictionary encoding stores repeated values once; what matters is the type of the values.
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
    if str(kind) not in ("string", "large_string", "string_view"):
        return BrokenRecord(Skipped(path, f'the column "{field}" is no text'), f"it is of the type {kind}")
    return None


def _texts(column: Any, pyarrow: Any) -> Iterator[bytes | None]:
    """Yields values as bytes: invalid UTF-8 in one value would otherwise fail the whole batch."""
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for value in column.cast(pyarrow.large_binary()):
        yield value.as_py()


def _document(raw: bytes | None, path: str, number: int, *, field: str, read: int) -> Document | BrokenRecord:
    if raw is None:
        return BrokenRecord(Skipped(path, f'the field "{field}" is no text', record=number), "it is null")
    if len(raw) > MAX_RECORD_BYTES:
        return BrokenRecord(Skipped(path, f"a text of more than {MAX_RECORD_BYTES:,} bytes", record=number))
    return Document(path=path, record=number, raw=raw, read=read)
