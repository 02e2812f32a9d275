"""What `zaya bench generation` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from zaya_jax.tables import format_bytes, name_column, number_column

CONTEXT = 131_072
"""Tokens of ZAYA1-8B's whole context."""


def _table(title: str, name: str, *columns: str) -> Table:
    return Table(name_column(name), *map(number_column, columns), title=title, box=box.SIMPLE_HEAD, padding=0)


def speeds(found: Sequence[Any]) -> Table:
    """Tokens a second and latencies, by batch and side."""
    columns = (
        "read,\ntokens/s",
        "of\nbound",
        "written,\ntokens/s",
        "of\nbound",
        "ratio",
        "step, ms\np50",
        "p99",
    )
    rows = _table("reading prompts and writing", "batch, side", *columns)
    ours = {each.batch: each.written for each in found if each.side == "ours"}
    for each in found:
        rows.add_row(
            f"{each.batch}, {each.side}",
            f"{each.read:,.0f}",
            f"{each.read / each.read_bound:.1%}",
            f"{each.written:,.1f}",
            f"{each.written / each.written_bound:.1%}",
            f"{ours[each.batch] / each.written:.2f}x",
            f"{each.step_p50 * 1e3:,.1f}",
            f"{each.step_p99 * 1e3:,.1f}",
        )
    return rows


def caches(found: Mapping[str, tuple[int, int]]) -> Table:
    """Bytes of a sequence by attention."""
    rows = _table(
        "what a sequence keeps, bfloat16", "attention", "a token", "once", "131,072 tokens", "ratio"
    )
    least = next(iter(found.values()))[0]
    for name, (token, once) in found.items():
        whole = format_bytes(token * CONTEXT + once)
        rows.add_row(name, f"{token:,} B", f"{once:,} B", whole, f"{token / least:g}x")
    return rows


def prompt_memories(found: Sequence[Any]) -> Table:
    """Peak of a process by the length of the prompt that it reads."""
    rows = _table("what reading a prompt adds at most", "tokens", "ours", "transformers")
    for each in found:
        rows.add_row(f"{each.length:,}", format_bytes(each.ours), format_bytes(each.theirs))
    return rows


def loads(found: Sequence[Any]) -> Table:
    """Waits by the rate at which requests come."""
    columns = ("requests/s", "tokens/s", "first, ms\np50", "p99", "next, ms\np50", "p99")
    rows = _table("when requests come at random", "of capacity", *columns)
    for each in found:
        times = each.first_p50, each.first_p99, each.next_p50, each.next_p99
        rows.add_row(
            f"{each.share:.0%}",
            f"{each.rate:.2f}",
            f"{each.tokens_per_second:,.1f}",
            *(f"{1e3 * seconds:,.0f}" for seconds in times),
        )
    return rows


TABLES = {"speed": speeds, "prompts": prompt_memories, "load": loads}
