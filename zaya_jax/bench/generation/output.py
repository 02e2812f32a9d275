"""Tables of `zaya bench generation`."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from zaya_jax.text_tables import dense_table, name_column


def loads(results: Sequence[Any]) -> Table:
    """Table of tokens per second and of the waits for the first and the next token, by arrival rate."""
    columns = ("requests/s", "tokens/s", "first, ms\np50", "p99", "next, ms\np50", "p99")
    # Requests per second, because prompts and continuations differ in length.
    rows = dense_table(name_column("of capacity"), *columns, title="latency of random arrivals")
    for each in results:
        times = each.first_p50, each.first_p99, each.next_p50, each.next_p99
        rows.add_row(
            f"{each.share:.0%}",
            f"{each.rate:.2f}",
            f"{each.tokens_per_second:,.1f}",
            *(f"{1e3 * seconds:,.0f}" for seconds in times),
        )
    return rows


def short_prompts(results: Sequence[Any]) -> Table:
    """Table of prompts per second and of the wait for the first token, by round."""
    columns = ("prompts/s", "first, ms\np50", "p99")
    rows = dense_table(name_column("round"), *columns, title="short prompts at once")
    for number, each in enumerate(results, 1):
        times = (f"{1e3 * seconds:,.0f}" for seconds in (each.first_p50, each.first_p99))
        rows.add_row(str(number), f"{each.prompts_per_second:.2f}", *times)
    return rows
