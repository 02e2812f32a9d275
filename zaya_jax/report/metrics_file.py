"""Rows of a run's metrics as arrays: hundreds of thousands of lines, read once and in chunks.

Letters at the end of names: M moments, L layers, X router classes.
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

from zaya_jax.run_folder.events import is_finite, parse_row, parse_rows
from zaya_jax.run_folder.names import METRICS_FILE, ROUTERS_FILE, TASKS, TRAIN, VALIDATION

CHUNK_ROWS = 4096
"""Rows that exist as Python objects before they become arrays: all rows of a long run would need
gigabytes."""
MAX_MOMENTS, MIN_MOMENTS = 200, 20
"""Number of steps at which the load of experts is shown: more would be narrower than a pixel."""
MAX_LOADS = 120_000
"""Maximum number of loads of a run over moments, layers and classes: deep networks show fewer moments."""
LARGEST_STEP = 2**31 - 1
"""A run counts its steps in int32."""
_WORDS = "step", "kind", "phase"
"""Fields of a row that are not metrics."""


@dataclasses.dataclass(frozen=True)
class MetricsTable:
    """Rows of one kind, one per step, in ascending order of steps.

    Attributes:
      steps: int64 steps, shape [rows].
      columns: float64 values by name, shape [rows]; NaN where a row has no such number.
      phases: names of phases in the order of their first rows.
      phase_of_row: index into `phases` of each row.
    """

    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    phases: tuple[str, ...]
    phase_of_row: np.ndarray


@dataclasses.dataclass(frozen=True)
class RouterHistory:
    """Routing in each layer at some moments of a run.

    Attributes:
      steps_M: step of each moment.
      counts_MLX: tokens of each class; the last class skips.
      entropy_ML: mean entropy of a token's probabilities, in nats.
    """

    steps_M: np.ndarray
    counts_MLX: np.ndarray
    entropy_ML: np.ndarray

    def thinned(self, most: int) -> "RouterHistory":
        """Returns at most the given number of moments, evenly spaced."""
        chosen = _spread(len(self.steps_M), most)
        return RouterHistory(self.steps_M[chosen], self.counts_MLX[chosen], self.entropy_ML[chosen])


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """All metrics of a run.

    Attributes:
      train: metrics of training steps.
      held_out: metrics on held-out text.
      tasks: metrics of tasks; each name begins with the kind's name.
      router: routing history; None for runs of versions that did not record it.
      num_damaged: number of lines that are not rows, without an incomplete last line.
    """

    train: MetricsTable
    held_out: MetricsTable
    tasks: MetricsTable
    router: RouterHistory | None
    num_damaged: int


def read_metrics(folder: pathlib.Path) -> RunMetrics:
    """Reads the valid rows of a run's metrics; empty if there is no file."""
    kinds = {kind: _Collector() for kind in (TRAIN, VALIDATION, TASKS)}
    num_damaged, path = 0, folder / METRICS_FILE
    if path.is_file():
        with path.open("rb") as file:
            while lines := list(itertools.islice(file, CHUNK_ROWS)):
                rows = list(map(_within_limits, parse_rows(lines)))
                for kind, collector in kinds.items():
                    collector.add([row for row in rows if row is not None and row["kind"] == kind])
                num_damaged += sum(map(_is_damaged, lines, rows))
    router = _read_routers(folder / ROUTERS_FILE)
    train, held_out, tasks = (collector.table() for collector in kinds.values())
    # The prefix separates tasks from training metrics of the same name.
    named = {f"{TASKS}/{name}": values for name, values in tasks.columns.items()}
    return RunMetrics(train, held_out, dataclasses.replace(tasks, columns=named), router, num_damaged)


def _is_damaged(line: bytes, row: dict[str, Any] | None) -> bool:
    # A line without its newline is still being written, or was cut short when the process was killed.
    return (row is None or b"\0" in line) and line.endswith(b"\n")


def _within_limits(row: dict[str, Any] | None) -> dict[str, Any] | None:
    return row if row is not None and 0 <= row["step"] <= LARGEST_STEP else None


class _Collector:
    """Collects rows of one kind as arrays."""

    def __init__(self):
        # An empty first part, because no parts at all cannot be concatenated.
        self._steps: list[np.ndarray] = [np.zeros(0, np.int64)]
        self._parts: list[dict[str, np.ndarray]] = [{}]
        self._phases: dict[str, int] = {}
        self._phase_of_row: list[int] = []

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows, all of one kind."""
        phases = (str(row.get("phase", "")) for row in rows)
        self._phase_of_row += [self._phases.setdefault(phase, len(self._phases)) for phase in phases]
        self._steps.append(np.array([row["step"] for row in rows], np.int64))
        self._parts.append(_columns_of(rows))

    def table(self) -> MetricsTable:
        """Returns the rows that no later row has replaced."""
        steps = np.concatenate(self._steps)
        # Columns may appear late: earlier chunks get NaN for them.
        names = dict.fromkeys(itertools.chain(*self._parts))
        kept = _kept(steps)
        columns = {name: self._column(name)[kept] for name in names}
        return MetricsTable(
            steps=steps[kept],
            # A column without any number, such as one of text, has no curve.
            columns={name: values for name, values in columns.items() if np.isfinite(values).any()},
            phases=tuple(self._phases),
            phase_of_row=np.array(self._phase_of_row, np.int64)[kept],
        )

    def _column(self, name: str) -> np.ndarray:
        pairs = zip(self._parts, self._steps, strict=True)
        # A chunk without the column has a NaN for each of its rows.
        return np.concatenate([part.get(name, np.full(len(steps), np.nan)) for part, steps in pairs])


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Numbers of the rows by name."""
    # The names of each row in their order, which nearly all rows of a run share.
    orders = dict.fromkeys(map(tuple, rows))
    names = [name for name in dict.fromkeys(itertools.chain(*orders)) if name not in _WORDS]
    # Rows with equal names are converted at once, because a long run has millions of values.
    if len(orders) == 1 and len(names) > 1:
        values = itertools.chain.from_iterable(map(operator.itemgetter(*names), rows))
        # `array` accepts only numbers; rows with other values fall back to the slow conversion below.
        with contextlib.suppress(TypeError, OverflowError):
            table = np.array(array.array("d", values)).reshape(len(rows), len(names))
            return dict(zip(names, table.T, strict=True))
    return {name: _values(rows, name) for name in names}


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    values = (row.get(name) for row in rows)
    return np.array([value if is_finite(value) else np.nan for value in values], np.float64)


def _kept(steps: np.ndarray) -> np.ndarray:
    """Whether a row is part of the run: after a rollback, rows of the same or later steps replace earlier
    ones.
    """
    # The smallest step of all later rows. A row that has a larger one was written before a rollback.
    min_after = np.minimum.accumulate(np.append(steps[1:], LARGEST_STEP + 1)[::-1])[::-1]
    return steps < min_after


def _read_routers(path: pathlib.Path) -> RouterHistory | None:
    """Reads the first, the last, and evenly spaced rows of the routers' file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        sizes = map(len, file)
        # Rows are long and few are needed: index their offsets instead of parsing all of them.
        # Byte offsets of the lines.
        places = [0, *itertools.accumulate(sizes)][:-1]
        return _some_moments(file, places)


def _some_moments(file: BinaryIO, places: Sequence[int]) -> RouterHistory | None:
    def row_at(place: int) -> dict[str, Any] | None:
        file.seek(place)
        return _within_limits(parse_row(file.readline()))

    # The first valid row determines the shape of the network.
    first = next(filter(None, map(_moment_of, map(row_at, places))), None)
    if first is None:
        return None
    most = min(max(MAX_LOADS // first[1].size, MIN_MOMENTS), MAX_MOMENTS)
    parsed = map(_moment_of, (row_at(places[n]) for n in _spread(len(places), most)))
    # Rows of another shape are from another network whose rows were appended to the same file.
    moments = [moment for moment in parsed if moment is not None and moment[1].shape == first[1].shape]
    if not moments:
        return None
    steps, counts, entropies = map(np.array, zip(*moments, strict=True))
    kept = _kept(steps)
    return RouterHistory(steps[kept], counts[kept], entropies[kept])


def _spread(count: int, most: int) -> np.ndarray:
    """At most `most` evenly spaced integers below `count`, including the first and the last."""
    # Unique, because rounding may give the same index twice.
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _moment_of(row: Mapping[str, Any] | None) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Step, counts by layer and class, and entropies by layer; None if the row does not contain them."""
    if row is None:
        return None
    counts_LX, entropy_L = _numbers(row.get("counts"), 2), _numbers(row.get("entropy"), 1)
    if counts_LX is None or entropy_L is None or len(counts_LX) != len(entropy_L):
        return None
    # There are at least one expert and the class that skips.
    return (row["step"], counts_LX, entropy_L) if counts_LX.shape[1] > 1 else None


def _numbers(values: Any, num_axes: int) -> np.ndarray | None:
    try:
        parsed = np.array(values)
    except ValueError:  # lists of different lengths
        return None
    # The kinds are signed and unsigned integers and floats: booleans and text are not numbers here.
    if parsed.ndim != num_axes or parsed.dtype.kind not in "iuf" or not np.isfinite(parsed).all():
        return None
    return parsed.astype(np.float64)
