"""Tables of `zaya bench generation`."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from zaya_jax.text_tables import dense_table, name_column


def speeds(results: Sequence[Any]) -> Table:
    """Tokens per second and latencies by batch size and decoder."""
    columns = (
        "prefill,\ntokens/s",
        "of\nbound",
        "decode,\ntokens/s",
        "of\nbound",
        "ratio",
        "step, ms\np50",
        "p99",
    )
    rows = dense_table(name_column("batch, decoder"), *columns, title="prefill and decode")
    # Decoders are compared only at equal batch sizes, because speed grows with the batch.
    ours = {each.batch: each.written for each in results if each.side == "ours"}
    for each in results:
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
