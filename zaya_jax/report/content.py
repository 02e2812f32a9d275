"""Data of the page's scripts, limited to a size that opens quickly."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zaya_jax.aegis.views.timeline import Mark
from zaya_jax.report.charts import TOKENS, Section
from zaya_jax.report.metrics_file import MIN_MOMENTS, MetricsTable, RouterHistory
from zaya_jax.report.run_record import RunRecord
from zaya_jax.report.thinning import ThinnedCurve, as_short_numbers, bins_of, thin

MAX_NUMBERS = 250_000
"""Maximum number of values of all curves of a page, with a mean, minimum and maximum per bin: about two
megabytes."""
MAX_BINS, MIN_BINS = 800, 50
"""Bins per curve: a page shows two charts side by side and is not much wider than this."""
MAX_PAGE_LOADS = 400_000
"""Maximum number of expert loads of all runs of a page: another two megabytes."""
MAX_MARKS, MAX_MARK_LENGTH = 200, 160
"""Maximum number of events per run, of which the last are shown, and of characters of an event's text."""
SHARES = 10_000
"""Loads of experts are integers in units of 1/10,000 of a layer's tokens."""


def content_of(runs: Sequence[RunRecord], sections: Iterable[Section]) -> dict[str, Any]:
    """Returns the data of runs that the scripts need."""
    columns = [chart.column for section in sections for chart in section.charts]
    most = bins_that_fit(num_curves=len(columns) * len(runs))
    return {
        "shares": SHARES,
        "runs": [_run(run, columns, most, MAX_PAGE_LOADS // len(runs)) for run in runs],
    }


def bins_that_fit(*, num_curves: int) -> int:
    """Returns the maximum number of bins per curve for a small page."""
    # Each bin has three numbers: mean, minimum and maximum.
    return min(max(MAX_NUMBERS // (3 * max(num_curves, 1)), MIN_BINS), MAX_BINS)


def _run(run: RunRecord, columns: Sequence[str], most: int, most_loads: int) -> dict[str, Any]:
    metrics = run.metrics
    return {
        "name": run.name,
        # Held-out and task rows have no token counts: interpolate them from the training rows.
        **{
            name: _curves(table, columns, most, tokens=tokens_at(metrics.train, table.steps))
            for name, table in (
                ("train", metrics.train),
                ("held_out", metrics.held_out),
                ("tasks", metrics.tasks),
            )
        },
        "phases": list(_phases(metrics.train)),
        "marks": [_mark(mark) for mark in run.marks[-MAX_MARKS:]],
        "router": None if metrics.router is None else _router(metrics.router, metrics.train, most_loads),
    }


def _curves(
    table: MetricsTable, columns: Iterable[str], most: int, *, tokens: np.ndarray | None
) -> dict[str, Any]:
    """Steps and tokens at the end of each bin, and each column's means, with minima and maxima if they
    differ.
    """
    if not len(table.steps):
        return {"steps": [], "tokens": None, "curves": {}}
    bins = bins_of(len(table.steps), most)
    curves = {name: thin(table.columns[name], bins) for name in columns if name in table.columns}
    return {
        "steps": table.steps[bins.ends].tolist(),
        # Not rounded: in a long run hundreds of steps share the first five digits.
        "tokens": None if tokens is None else _whole(tokens[bins.ends]),
        "curves": {name: _numbers(curve) for name, curve in curves.items()},
    }


def _numbers(curve: ThinnedCurve) -> list[list]:
    # Where every bin has a single row, minimum and maximum would only triple the size.
    parts = (curve.mean,) if curve.is_exact else (curve.mean, curve.low, curve.high)
    return [as_short_numbers(part) for part in parts]


def tokens_at(train: MetricsTable, steps: np.ndarray) -> np.ndarray | None:
    """Tokens that a run had read after the given steps; None if it did not count them."""
    tokens = train.columns.get(TOKENS)
    # One NaN would become a gap of the axis, wherever it is interpolated.
    if tokens is None or not np.isfinite(tokens).all():
        return None
    return np.interp(steps, train.steps, tokens)


def _whole(values: np.ndarray) -> list[int]:
    # Interpolation makes floats of numbers of tokens, which are whole.
    return [int(value) for value in values.tolist()]


def _phases(table: MetricsTable) -> Iterator[list]:
    """Name and last step of each phase; a phase's last step always has a row."""
    if not any(table.phases):
        return
    # Rows where the phase changes.
    borders = np.flatnonzero(np.diff(table.phase_of_row))
    for last in (*borders.tolist(), len(table.steps) - 1):
        yield [table.phases[table.phase_of_row[last]], int(table.steps[last])]


def _mark(mark: Mark) -> list:
    """Step and text of an event."""
    # Lists instead of objects, whose keys would be repeated for each event.
    return [mark.step, f"{mark.kind}: {mark.text}"[:MAX_MARK_LENGTH] if mark.text else mark.kind]


def _router(router: RouterHistory, train: MetricsTable, most_loads: int) -> dict[str, Any]:
    # Deep networks with many experts show fewer moments, so that the page stays small.
    router = router.thinned(max(most_loads // router.counts_MLX[0].size, MIN_MOMENTS))
    tokens_ML1 = router.counts_MLX.sum(axis=2, keepdims=True)
    # A layer without any token has shares of 0 and not NaN, which JSON cannot express.
    shares_MLX = np.rint(SHARES * router.counts_MLX / np.maximum(tokens_ML1, 1)).astype(int)
    tokens = tokens_at(train, router.steps_M)
    return {
        "steps": router.steps_M.tolist(),
        "tokens": None if tokens is None else _whole(tokens),
        "shares": shares_MLX.tolist(),
        "entropy": [as_short_numbers(entropy_L) for entropy_L in router.entropy_ML],
    }
