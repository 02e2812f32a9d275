"""Columns of the tables that verbs print, and sizes in bytes as people read them."""

from rich.table import Column


def name_column(header: str) -> Column:
    """A column of names, none of which is cut: on a narrow terminal a cell goes on in a further line."""
    return Column(header, overflow="fold")


def number_column(header: str) -> Column:
    """A column of figures, digit below digit; columns of names give way to it."""
    return Column(header, justify="right", no_wrap=True)


def format_bytes(num_bytes: int) -> str:
    """A size in the unit that fits it, "0 B", "1.50 KiB" or "178.81 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"
