"""Streams a data set of the Hugging Face hub through `datasets`, without storing its files."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

from zaya_jax.data.sources.documents import BrokenRecord, Document, find_package
from zaya_jax.data.sources.json_lines import describe_fields
from zaya_jax.data.sources.skipped import Skipped
from zaya_jax.data.sources.text_sources import FIELD, TextSource
from zaya_jax.errors import UserError
from zaya_jax.files.hub import is_hub_id, pinned_revision


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubStream:
    """A split of a data set on the hub.

    Attributes:
      source: ORGANIZATION/NAME, optionally followed by "@" and a branch, tag or commit.
      subset: name of a subset, which the hub's pages call a config; None for the only one.
      split: name of the split.
      field: column with the text.
      max_documents: number of rows to read; None for all.
    """

    source: str
    subset: str | None = None
    split: str = "train"
    field: str = FIELD
    max_documents: int | None = None

    def open(self) -> TextSource:
        """Opens the split at a fixed commit, so that every pass over it reads the same rows.

        Raises:
          UserError: if `datasets` is not installed, or the data set, subset, split or column does not exist.
        """
        if not is_hub_id(self.source):
            raise UserError(
                f'--stream reads a data set of the Hugging Face hub, and --source is "{self.source}"; name '
                "one as ORGANIZATION/NAME, or omit --stream for files of this machine"
            )
        find_package("datasets", "--stream", extra="stream")
        name, revision = pinned_revision(self.source, "dataset")
        rows = self._load(name, revision)
        # Known for most data sets: the command shows progress by it, and decides about worker processes.
        size = getattr(rows.info.splits or {}, "get", lambda _: None)(self.split)
        extent = "" if self.max_documents is None else f", first {self.max_documents:,} documents"
        subset = "" if self.subset is None else f", subset {self.subset}"
        description = f"data set {name} at revision {revision}{subset}, split {self.split}{extent}"
        return TextSource(
            root=pathlib.Path(name),
            description=f'{description}, field "{self.field}"',
            named=f"rows of {self.source}",
            files=(self.split,),
            size=0 if size is None else size.num_bytes,
            # The loaded rows know their revision, and each pass over them starts a new stream.
            read=lambda _, path: self._documents(rows, path),
        )

    def _load(self, name: str, revision: str) -> Any:
        datasets = find_package("datasets", "--stream", extra="stream")
        try:
            rows = datasets.load_dataset(
                name, self.subset, split=self.split, streaming=True, revision=revision
            )
        except Exception as error:  # datasets raises many classes, also those of other libraries
            raise UserError(f"the data set {self.source} cannot be streamed: {_reason(error)}") from error
        columns = rows.column_names
        # Unknown for some formats until the first row is read.
        if columns is not None and self.field not in columns:
            raise UserError(f'{self.source} has no column "{self.field}"; {describe_fields(columns)}')
        return rows

    def _documents(self, rows: Any, path: str) -> Iterator[Document | BrokenRecord]:
        # Rows of a stream have no numbers of their files, and a pass over it has one order.
        number = 0
        try:
            for number, row in enumerate(itertools.islice(rows, self.max_documents), 1):
                yield self._document(row, path, number)
        except OSError:
            # A lost connection. The command adds that it can be repeated.
            raise
        except ValueError as error:
            yield BrokenRecord(Skipped(path, "the rest is damaged", record=number + 1), _reason(error))

    def _document(self, row: dict[str, Any], path: str, number: int) -> Document | BrokenRecord:
        # Columns of lists or numbers are possible, and a row of JSON lines may lack the field.
        text = row.get(self.field)
        if not isinstance(text, str):
            reason = f'the field "{self.field}" is no text'
            return BrokenRecord(Skipped(path, reason, record=number), describe_fields(row))
        # Half a surrogate pair, which JSON can spell, is kept for the check of UTF-8 that follows.
        raw = text.encode("utf-8", errors="surrogatepass")
        return Document(path=path, record=number, raw=raw, read=len(raw))


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
