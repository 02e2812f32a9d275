"""Printed tables and their columns, and sizes in bytes with a unit."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Column, Table


def name_column(header: str) -> Column:
    """Returns a column of names. On a narrow terminal, cells wrap instead of being cut."""
    return Column(header, overflow="fold")


def number_column(header: str) -> Column:
    """Returns a right-aligned column of numbers, which never wrap."""
    return Column(header, justify="right", no_wrap=True)


def dense_table(name: str | Column, *columns: str | Column, **options: Any) -> Table:
    """Returns a table for many columns of numbers, without lines between them.

    Args:
      name: first column, or the header of a column of names.
      *columns: other columns, or headers of columns of numbers.
      **options: options of `rich.table.Table`.
    """
    first = name_column(name) if isinstance(name, str) else name
    others = (number_column(each) if isinstance(each, str) else each for each in columns)
    # Without padding, eight columns fit a terminal of 80 characters.
    return Table(first, *others, box=box.SIMPLE_HEAD, padding=0, **options)


def memory_table(header: str, sizes: Mapping[str, int], limit: int, *, title: str) -> Table:
    """Returns a table of sizes in bytes by kind, with their sum and its limit."""
    table = Table(name_column(header), number_column("size"), title=title)
    for name, size in sizes.items():
        table.add_row(name, format_bytes(size))
    total = f"{format_bytes(sum(sizes.values()))} of {format_bytes(limit)}"
    table.add_row("sum", total, style="bold")
    return table


def format_bytes(num_bytes: int) -> str:
    """Formats a size with a suitable unit: "0 B", "1.50 KiB" or "178.81 GiB"."""
    # Binary units, as in tools that report memory.
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"
