"""Where runs are, in a row each: what one asks first, before looking at a curve."""

import numpy as np

from zaya_jax.report.charts import TOKENS
from zaya_jax.report.config_fields import NOT_THERE
from zaya_jax.report.metrics_file import MetricsTable
from zaya_jax.report.run_record import RunRecord

HEADERS = (
    "steps",
    "tokens",
    "loss",
    "held-out loss",
    "held-out bits a byte",
    "least of these",
    "tokens a second",
    "MFU",
    "goodput",
    "end",
)
LAST_ROWS = 10
"""Whose mean a run's loss is: that of a single step says little."""


def summary_of(run: RunRecord) -> tuple[str, ...]:
    """A cell for each of `HEADERS`."""
    train, held_out = run.metrics.train, run.metrics.held_out
    bits = held_out.columns.get("bits_per_byte")
    return (
        f"{train.steps[-1]:,}" if len(train.steps) else "0",
        _last(train, TOKENS, ",.0f"),
        _last(train, "loss", ".4f", num_rows=LAST_ROWS),
        _last(held_out, "loss", ".4f"),
        _last(held_out, "bits_per_byte", ".4f"),
        NOT_THERE if bits is None else f"{np.nanmin(bits):.4f}",
        _median(train, "tokens_per_second", ",.0f"),
        _median(train, "model_flops_utilisation", ".1%"),
        NOT_THERE if run.goodput is None else f"{run.goodput.share:.1%}",
        run.end,
    )


def _last(table: MetricsTable, column: str, form: str, *, num_rows: int = 1) -> str:
    """The mean of the last rows that have a number."""
    values = _known(table, column)[-num_rows:]
    return f"{values.mean():{form}}" if len(values) else NOT_THERE


def _median(table: MetricsTable, column: str, form: str) -> str:
    # A mean would be that of the few rows that waited for something.
    values = _known(table, column)
    return f"{np.median(values):{form}}" if len(values) else NOT_THERE


def _known(table: MetricsTable, column: str) -> np.ndarray:
    values = table.columns.get(column, np.zeros(0))
    return values[np.isfinite(values)]
