"""What a source gives, one after the other: documents, and records that are none."""

import dataclasses
import importlib
from typing import Any

from zaya_jax.data.left_out import LeftOut

LONGEST_RECORD = 2**30
"""Bytes of a line or a value; one that is longer would fill the memory of whoever reads it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A text, as the bytes that its source has.

    Attributes:
      path: of its file, relative to the source.
      record: its number in the file, from 1; None where the file is the text.
      raw: UTF-8, unless it is damaged.
      read: bytes of the file that reading it took, about.
    """

    path: str
    record: int | None = None
    raw: bytes
    read: int = 0


@dataclasses.dataclass(frozen=True)
class Broken:
    """A record that is no text, or a file from there on.

    Attributes:
      left_out: file, record and reason.
      hint: what is there instead; "" where there is nothing to say.
    """

    left_out: LeftOut
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.left_out.sentence()}{'; ' if self.hint else ''}{self.hint}"


def find_package(name: str, purpose: str) -> Any:
    """A module of a package that not everyone needs.

    Raises:
      ValueError: saying how to get it, if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ValueError(f"{purpose} needs {package}; get it by pip install 'zaya_jax[data]'") from None
