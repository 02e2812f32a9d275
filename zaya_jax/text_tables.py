"""Columns of printed tables, and sizes in bytes with a unit."""

from rich.table import Column


def name_column(header: str) -> Column:
    """Returns a column of names. On a narrow terminal, cells wrap instead of being cut."""
    return Column(header, overflow="fold")


def number_column(header: str) -> Column:
    """Returns a right-aligned column of numbers, which never wrap."""
    return Column(header, justify="right", no_wrap=True)


def format_bytes(num_bytes: int) -> str:
    """Formats a size with a suitable unit: "0 B", "1.50 KiB" or "178.81 GiB"."""
    # Binary units, as in tools that report memory.
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"
