"""Summary of runs, one row each."""

import numpy as np

from zaya_jax.report.charts import TOKENS
from zaya_jax.report.config_fields import MISSING
from zaya_jax.report.metrics_file import MetricsTable
from zaya_jax.report.run_record import RunRecord

HEADERS = (
    "steps",
    "tokens",
    "loss",
    "held-out loss",
    "held-out bits per byte",
    "minimum of these",
    "tokens/s",
    "MFU",
    "goodput",
    "end",
)
LAST_ROWS = 10
"""Number of last rows whose mean is a run's loss: a single step is too noisy."""


def summary_of(run: RunRecord) -> tuple[str, ...]:
    """Returns a cell for each of `HEADERS`."""
    train, held_out = run.metrics.train, run.metrics.held_out
    bits = held_out.columns.get("bits_per_byte")
    return (
        f"{train.steps[-1]:,}" if len(train.steps) else "0",
        _last(train, TOKENS, ",.0f"),
        _last(train, "loss", ".4f", num_rows=LAST_ROWS),
        _last(held_out, "loss", ".4f"),
        _last(held_out, "bits_per_byte", ".4f"),
        # A table has no column without finite numbers, so that there is a minimum.
        MISSING if bits is None else f"{np.nanmin(bits):.4f}",
        _median(train, "tokens_per_second", ",.0f"),
        _median(train, "model_flops_utilisation", ".1%"),
        MISSING if run.goodput is None else f"{run.goodput.share:.1%}",
        run.end,
    )


def _last(table: MetricsTable, column: str, form: str, *, num_rows: int = 1) -> str:
    """Mean of the last rows with a number."""
    # Rows without the number are excluded first, so that the mean is of as many rows as it should be.
    values = _known(table, column)[-num_rows:]
    return f"{values.mean():{form}}" if len(values) else MISSING


def _median(table: MetricsTable, column: str, form: str) -> str:
    # The median, because a few slow rows would dominate the mean.
    values = _known(table, column)
    return f"{np.median(values):{form}}" if len(values) else MISSING


def _known(table: MetricsTable, column: str) -> np.ndarray:
    # A missing column is the same as one without values.
    values = table.columns.get(column, np.zeros(0))
    return values[np.isfinite(values)]
