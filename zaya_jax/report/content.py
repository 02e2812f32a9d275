"""The data of the page: what its script draws, few enough numbers to open at once."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zaya_jax.aegis.timeline import Mark
from zaya_jax.report.charts import TOKENS, Section
from zaya_jax.report.metrics_file import FEWEST_MOMENTS, MetricsTable, RouterHistory
from zaya_jax.report.run_record import RunRecord
from zaya_jax.report.thinning import ThinnedCurve, as_short_numbers, bins_of, thin

MOST_NUMBERS = 250_000
"""Of all curves of a page, each with a mean, a least and a largest value a bin: about two megabytes."""
MOST_BINS, FEWEST_BINS = 800, 50
"""Of a curve: a page is little wider, and has two of them beside each other."""
MOST_LOADS_OF_A_PAGE = 400_000
"""Of experts, of all runs of a page: another two megabytes."""
MOST_MARKS, LONGEST_MARK = 200, 160
"""Of a run, the last ones; of what is said of one."""
SHARES = 10_000
"""Loads of experts are whole numbers of ten-thousandths of a layer's tokens."""


def content_of(runs: Sequence[RunRecord], sections: Iterable[Section]) -> dict[str, Any]:
    """What the script needs of runs."""
    columns = [chart.column for section in sections for chart in section.charts]
    most = bins_that_fit(num_curves=len(columns) * len(runs))
    return {
        "shares": SHARES,
        "runs": [_run(run, columns, most, MOST_LOADS_OF_A_PAGE // len(runs)) for run in runs],
    }


def bins_that_fit(*, num_curves: int) -> int:
    """The most bins a curve with which a page stays small."""
    return min(max(MOST_NUMBERS // (3 * max(num_curves, 1)), FEWEST_BINS), MOST_BINS)


def _run(run: RunRecord, columns: Sequence[str], most: int, most_loads: int) -> dict[str, Any]:
    metrics = run.metrics
    return {
        "name": run.name,
        # Rows of the last two count no tokens, and are written beside a row that does.
        **{
            name: _curves(table, columns, most, tokens=tokens_at(metrics.train, table.steps))
            for name, table in (
                ("train", metrics.train),
                ("held_out", metrics.held_out),
                ("tasks", metrics.tasks),
            )
        },
        "phases": list(_phases(metrics.train)),
        "marks": [_mark(mark) for mark in run.marks[-MOST_MARKS:]],
        "router": None if metrics.router is None else _router(metrics.router, metrics.train, most_loads),
    }


def _curves(
    table: MetricsTable, columns: Iterable[str], most: int, *, tokens: np.ndarray | None
) -> dict[str, Any]:
    """Steps and tokens at the end of each bin, and by column its means, or its means and extremes."""
    if not len(table.steps):
        return {"steps": [], "tokens": None, "curves": {}}
    bins = bins_of(len(table.steps), most)
    curves = {name: thin(table.columns[name], bins) for name in columns if name in table.columns}
    return {
        "steps": table.steps[bins.ends].tolist(),
        # Not shortened: of a long run their first five digits are those of hundreds of steps.
        "tokens": None if tokens is None else _whole(tokens[bins.ends]),
        "curves": {name: _numbers(curve) for name, curve in curves.items()},
    }


def _numbers(curve: ThinnedCurve) -> list[list]:
    parts = (curve.mean,) if curve.is_exact else (curve.mean, curve.low, curve.high)
    return [as_short_numbers(part) for part in parts]


def tokens_at(train: MetricsTable, steps: np.ndarray) -> np.ndarray | None:
    """Tokens that a run had read behind steps; None of one that did not count them."""
    tokens = train.columns.get(TOKENS)
    if tokens is None or not np.isfinite(tokens).all():
        return None
    return np.interp(steps, train.steps, tokens)


def _whole(values: np.ndarray) -> list[int]:
    return [int(value) for value in values.tolist()]


def _phases(table: MetricsTable) -> Iterator[list]:
    """Name and last step of each stretch of rows of one phase; a phase's last step is always written."""
    if not any(table.phases):
        return
    borders = np.flatnonzero(np.diff(table.phase_of_row))
    for last in (*borders.tolist(), len(table.steps) - 1):
        yield [table.phases[table.phase_of_row[last]], int(table.steps[last])]


def _mark(mark: Mark) -> list:
    """Its step, and what is said of it."""
    return [mark.step, f"{mark.kind}: {mark.text}"[:LONGEST_MARK] if mark.text else mark.kind]


def _router(router: RouterHistory, train: MetricsTable, most_loads: int) -> dict[str, Any]:
    router = router.thinned(max(most_loads // router.counts_MLX[0].size, FEWEST_MOMENTS))
    tokens_ML1 = router.counts_MLX.sum(axis=2, keepdims=True)
    shares_MLX = np.rint(SHARES * router.counts_MLX / np.maximum(tokens_ML1, 1)).astype(int)
    tokens = tokens_at(train, router.steps_M)
    return {
        "steps": router.steps_M.tolist(),
        "tokens": None if tokens is None else _whole(tokens),
        "shares": shares_MLX.tolist(),
        "entropy": [as_short_numbers(entropy_L) for entropy_L in router.entropy_ML],
    }
