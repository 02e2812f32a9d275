"""Table of `zaya bench torch`."""

from collections.abc import Sequence

from rich.table import Table

from zaya_jax.bench.torch_comparison.speeds import OURS, PairedSpeed
from zaya_jax.text_tables import dense_table, name_column


def table(speeds: Sequence[PairedSpeed]) -> Table:
    """Tokens per second by work and program, and how much faster ours is, with the range of all rounds."""
    settings = {f"{each.work}, {each.side}: {each.setting}" for each in speeds if each.setting}
    columns = ("tokens/s", "of\nbound", "ours is\nfaster by", "in all\nrounds")
    rows = dense_table(name_column("work"), *columns, caption="\n".join(sorted(settings)) or None)
    # The range shows whether the median of the ratios hides a noisy machine.
    for each in speeds:
        ratios = "" if each.side == OURS else f"{min(each.ratios):.2f} to {max(each.ratios):.2f}"
        rows.add_row(
            f"{each.work}: {each.side}",
            f"{each.tokens_per_second:,.0f}",
            f"{each.tokens_per_second / each.bound:.1%}",
            f"{each.ratio:.2f}x",
            ratios,
        )
    return rows
