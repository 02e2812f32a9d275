"""Rows of Parquet files and of Arrow streams as documents: the format of data sets on the Hub and on disk."""

import pathlib
from collections.abc import Iterator
from typing import Any

from zaya_jax.data.documents import LONGEST_RECORD, Broken, Document, find_package
from zaya_jax.data.json_lines import describe_fields
from zaya_jax.data.left_out import LeftOut

_ROWS = 256
"""Of Parquet at a time."""


def read_parquet(place: pathlib.Path, path: str, *, field: str) -> Iterator[Document | Broken]:
    """The texts in a column of a Parquet file, a row each, in bounded memory.

    Raises:
      ValueError: when pyarrow is missing.
      OSError: when the system cannot read the file.
    """
    parquet = find_package("pyarrow.parquet", str(place))

    def batches() -> Iterator[Any]:
        # Without this a page that a disk changed is read as other text.
        with parquet.ParquetFile(place, page_checksum_verification=True) as file:
            yield file.schema_arrow
            if field in file.schema_arrow.names:
                yield from file.iter_batches(_ROWS, columns=[field])

    yield from _read(batches(), place, path, field=field)


def read_arrow(place: pathlib.Path, path: str, *, field: str) -> Iterator[Document | Broken]:
    """The texts in a column of an Arrow stream, as `datasets` leaves them, a row each.

    Raises:
      ValueError: when pyarrow is missing.
      OSError: when the system cannot read the file.
    """
    pyarrow = find_package("pyarrow", str(place))

    def batches() -> Iterator[Any]:
        with pyarrow.OSFile(str(place)) as file, pyarrow.ipc.open_stream(file) as stream:
            yield stream.schema
            yield from stream

    yield from _read(batches(), place, path, field=field)


def _read(
    batches: Iterator[Any], place: pathlib.Path, path: str, *, field: str
) -> Iterator[Document | Broken]:
    """Texts of batches, before which their schema comes."""
    pyarrow = find_package("pyarrow", str(place))
    number, size, before = 0, place.stat().st_size, 0
    try:
        if (broken := _column_trouble(next(batches), path, field)) is not None:
            yield broken
            return
        for batch in batches:
            for raw in _texts(batch.column(batch.schema.names.index(field)), pyarrow):
                number += 1
                yield _document(raw, path, number, field=field, read=min(len(raw or b""), size - before))
                before += min(len(raw or b""), size - before)
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the system's, not the file's
            raise
        yield Broken(LeftOut(path, "the rest is damaged", record=number + 1), str(error).split("\n")[0])


def _column_trouble(schema: Any, path: str, field: str) -> Broken | None:
    if field not in schema.names:
        return Broken(LeftOut(path, f'no column "{field}"'), describe_fields(schema.names))
    kind = schema.field(schema.names.index(field)).type
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
    if str(kind) not in ("string", "large_string", "string_view"):
        return Broken(LeftOut(path, f'the column "{field}" is no text'), f"it is of the type {kind}")
    return None


def _texts(column: Any, pyarrow: Any) -> Iterator[bytes | None]:
    """Values as their bytes: a text that is no UTF-8 would be an error of the whole batch."""
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for value in column.cast(pyarrow.large_binary()):
        yield value.as_py()


def _document(raw: bytes | None, path: str, number: int, *, field: str, read: int) -> Document | Broken:
    if raw is None:
        return Broken(LeftOut(path, f'the field "{field}" is no text', record=number), "it is null")
    if len(raw) > LONGEST_RECORD:
        return Broken(LeftOut(path, f"a text of more than {LONGEST_RECORD:,} bytes", record=number))
    return Document(path=path, record=number, raw=raw, read=read)
