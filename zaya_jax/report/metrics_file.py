"""Rows of a run's metrics as arrays: hundreds of thousands of lines, read once and in pieces.

The last letters of a name are its axes: M moments, L layers, X router classes.
"""

import array
import contextlib
import dataclasses
import itertools
import operator
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from zaya_jax.aegis.journal import (
    METRICS_FILE,
    ROUTERS_FILE,
    TASKS,
    TRAIN,
    VALIDATION,
    is_finite,
    parse_row,
    parse_rows,
)

ROWS_AT_ONCE = 4096
"""As objects of Python, before they become arrays: of a long run they would take gigabytes."""
MOST_MOMENTS, FEWEST_MOMENTS = 200, 20
"""At which the load of experts is shown: more are narrower than a pixel of a small picture."""
MOST_LOADS = 120_000
"""Of a run, over moments, layers and classes: of deep networks fewer moments are shown."""
LARGEST_STEP = 2**31 - 1
"""A run counts its steps in int32."""
_WORDS = "step", "kind", "phase"
"""What is no value of a row."""


@dataclasses.dataclass(frozen=True)
class MetricsTable:
    """Rows of one kind, each step once, in the order of steps.

    Attributes:
      steps: int64.
      columns: float64 by name; NaN where a row has no such number.
      phases: names, in the order of their first rows.
      phase_of_row: number of a row's phase.
    """

    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    phases: tuple[str, ...]
    phase_of_row: np.ndarray


@dataclasses.dataclass(frozen=True)
class RouterHistory:
    """What each layer's router did at some moments of a run.

    Attributes:
      steps_M: of the moments.
      counts_MLX: tokens of each class; the last one skips.
      entropy_ML: mean entropy of a token's probabilities, in nats.
    """

    steps_M: np.ndarray
    counts_MLX: np.ndarray
    entropy_ML: np.ndarray

    def thinned(self, most: int) -> "RouterHistory":
        """So many of the moments at most, as far apart from each other as they may be."""
        chosen = _spread(len(self.steps_M), most)
        return RouterHistory(self.steps_M[chosen], self.counts_MLX[chosen], self.entropy_ML[chosen])


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """All that the metrics of a run tell.

    Attributes:
      train: values of steps.
      held_out: values on text that the run does not learn from.
      tasks: figures of tasks; each name begins with that of its kind.
      router: None of a run that was begun before its routers were written down.
      num_damaged: lines that are no rows; a last one that is half written is none of them.
    """

    train: MetricsTable
    held_out: MetricsTable
    tasks: MetricsTable
    router: RouterHistory | None
    num_damaged: int


def read_metrics(folder: pathlib.Path) -> RunMetrics:
    """Reads the metrics of a run, as far as they are rows; none where there is no file."""
    kinds = {kind: _Collector() for kind in (TRAIN, VALIDATION, TASKS)}
    num_damaged, path = 0, folder / METRICS_FILE
    if path.is_file():
        with path.open("rb") as file:
            while lines := list(itertools.islice(file, ROWS_AT_ONCE)):
                rows = list(map(_within_limits, parse_rows(lines)))
                for kind, collector in kinds.items():
                    collector.take([row for row in rows if row is not None and row["kind"] == kind])
                # Without its end a line is still being written, or a kill cut it short.
                num_damaged += sum(
                    row is None and line.endswith(b"\n") for line, row in zip(lines, rows, strict=True)
                )
    router = _read_routers(folder / ROUTERS_FILE)
    train, held_out, tasks = (collector.table() for collector in kinds.values())
    # A task may have the name of anything that a run tells of its steps.
    named = {f"{TASKS}/{name}": values for name, values in tasks.columns.items()}
    return RunMetrics(train, held_out, dataclasses.replace(tasks, columns=named), router, num_damaged)


def _within_limits(row: dict[str, Any] | None) -> dict[str, Any] | None:
    return row if row is not None and 0 <= row["step"] <= LARGEST_STEP else None


class _Collector:
    """Takes rows of one kind, and keeps them as arrays."""

    def __init__(self):
        self._steps: list[np.ndarray] = [np.zeros(0, np.int64)]
        self._parts: list[dict[str, np.ndarray]] = [{}]
        self._phases: dict[str, int] = {}
        self._phase_of_row: list[int] = []

    def take(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the rows that come next, all of one kind."""
        phases = (str(row.get("phase", "")) for row in rows)
        self._phase_of_row += [self._phases.setdefault(phase, len(self._phases)) for phase in phases]
        self._steps.append(np.array([row["step"] for row in rows], np.int64))
        self._parts.append(_columns_of(rows))

    def table(self) -> MetricsTable:
        """What was taken, without what a later row has made again."""
        steps = np.concatenate(self._steps)
        names = dict.fromkeys(itertools.chain(*self._parts))
        kept = _kept(steps)
        columns = {name: self._column(name)[kept] for name in names}
        return MetricsTable(
            steps=steps[kept],
            columns={name: values for name, values in columns.items() if np.isfinite(values).any()},
            phases=tuple(self._phases),
            phase_of_row=np.array(self._phase_of_row, np.int64)[kept],
        )

    def _column(self, name: str) -> np.ndarray:
        pairs = zip(self._parts, self._steps, strict=True)
        return np.concatenate([part.get(name, np.full(len(steps), np.nan)) for part, steps in pairs])


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The numbers of rows by their names."""
    orders = dict.fromkeys(map(tuple, rows))
    names = [name for name in dict.fromkeys(itertools.chain(*orders)) if name not in _WORDS]
    # Of rows of the same names all values at once: a long run has millions.
    if len(orders) == 1 and len(names) > 1:
        values = itertools.chain.from_iterable(map(operator.itemgetter(*names), rows))
        # It takes numbers alone, as floats; what no run writes is looked at one by one.
        with contextlib.suppress(TypeError, OverflowError):
            table = np.array(array.array("d", values)).reshape(len(rows), len(names))
            return dict(zip(names, table.T, strict=True))
    return {name: _values(rows, name) for name in names}


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    values = (row.get(name) for row in rows)
    return np.array([value if is_finite(value) else np.nan for value in values], np.float64)


def _kept(steps: np.ndarray) -> np.ndarray:
    """Whether a row is part of the run: one behind it, of its step or an earlier one, has made it again."""
    least_behind = np.minimum.accumulate(np.append(steps[1:], LARGEST_STEP + 1)[::-1])[::-1]
    return steps < least_behind


def _read_routers(path: pathlib.Path) -> RouterHistory | None:
    """Some of the rows of routers: the first, the last, and those between as far apart."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        sizes = map(len, file)
        # They are long, and few of them are looked at.
        places = [0, *itertools.accumulate(sizes)][:-1]
        return _some_moments(file, places)


def _some_moments(file: BinaryIO, places: Sequence[int]) -> RouterHistory | None:
    def row_at(place: int) -> dict[str, Any] | None:
        file.seek(place)
        return _within_limits(parse_row(file.readline()))

    first = next(filter(None, map(_moment_of, map(row_at, places))), None)
    if first is None:
        return None
    most = min(max(MOST_LOADS // first[1].size, FEWEST_MOMENTS), MOST_MOMENTS)
    found = map(_moment_of, (row_at(places[n]) for n in _spread(len(places), most)))
    # Of another shape are rows of another network, which somebody has put into the same file.
    moments = [moment for moment in found if moment is not None and moment[1].shape == first[1].shape]
    if not moments:
        return None
    steps, counts, entropies = map(np.array, zip(*moments, strict=True))
    kept = _kept(steps)
    return RouterHistory(steps[kept], counts[kept], entropies[kept])


def _spread(count: int, most: int) -> np.ndarray:
    """Numbers below `count`, the first and the last among them, as far apart as so many may be."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _moment_of(row: Mapping[str, Any] | None) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Step, counts by layer and class, and entropies by layer; None of a row that does not hold them."""
    if row is None:
        return None
    counts_LX, entropy_L = _numbers(row.get("counts"), 2), _numbers(row.get("entropy"), 1)
    if counts_LX is None or entropy_L is None or len(counts_LX) != len(entropy_L):
        return None
    return (row["step"], counts_LX, entropy_L) if counts_LX.shape[1] > 1 else None


def _numbers(values: Any, num_axes: int) -> np.ndarray | None:
    try:
        found = np.array(values)
    except ValueError:  # lists of different lengths
        return None
    if found.ndim != num_axes or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        return None
    return found.astype(np.float64)
