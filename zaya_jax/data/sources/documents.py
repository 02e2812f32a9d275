"""What a source yields: documents, and records that are not valid text."""

import dataclasses
import importlib
from typing import Any

from zaya_jax.data.sources.skipped import Skipped
from zaya_jax.errors import UserError
from zaya_jax.platform.shell import install_command

MAX_RECORD_BYTES = 2**30
"""Maximum size of a line or value in bytes; a longer one would exhaust the memory of the reader."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A text, as the bytes that its source contains.

    Attributes:
      path: path of its file, relative to the source.
      record: number of the record in the file, from 1; None if the whole file is the text.
      raw: the text in UTF-8; not yet validated.
      read: approximate number of bytes of the file that were read for this document, for progress reports.
    """

    path: str
    record: int | None = None
    raw: bytes
    read: int = 0


@dataclasses.dataclass(frozen=True)
class BrokenRecord:
    """A record that is not valid text; or the rest of a file after damage.

    Attributes:
      skipped: file, record and reason.
      hint: what the record contains instead, and how to fix it; "" if unknown.
    """

    skipped: Skipped
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.skipped.sentence()}{'; ' if self.hint else ''}{self.hint}"


def find_package(name: str, purpose: str, *, extra: str = "data") -> Any:
    """Imports a module of an optional package.

    Args:
      name: module to import.
      purpose: what needs the module, for the error message.
      extra: extra of pyproject.toml that has the package.

    Raises:
      UserError: if the package is not installed; the message has the command that installs it.
    """
    try:
        # Imported on demand: these packages are large, and most sources do not need them.
        return importlib.import_module(name)
    except ImportError:
        # The installable package, for a module such as pyarrow.parquet.
        package = name.partition(".")[0]
        raise UserError(
            f"{purpose} needs {package}, which is not installed: {install_command(extra)}"
        ) from None
