"""Hundreds of thousands of values as some hundreds, of which none hides the largest or the least."""

import dataclasses

import numpy as np

_DIGITS = 5
"""That are kept of a number: more than a pixel shows, or a reader compares."""


@dataclasses.dataclass(frozen=True)
class Bins:
    """Rows that lie beside each other, by the numbers of the first ones.

    Attributes:
      starts: number of the first row of each bin.
      num_rows: of all of them.
    """

    starts: np.ndarray
    num_rows: int

    @property
    def ends(self) -> np.ndarray:
        """Number of the last row of each bin."""
        return np.append(self.starts[1:], self.num_rows) - 1


@dataclasses.dataclass(frozen=True)
class ThinnedCurve:
    """A column's values by bin; NaN where a bin has none that is finite.

    Attributes:
      low: the least one.
      mean: of those that are finite.
      high: the largest one.
    """

    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray

    @property
    def is_exact(self) -> bool:
        """Whether there is no more to be known of it than its means."""
        return np.array_equal(self.low, self.high, equal_nan=True)


def bins_of(num_rows: int, most: int) -> Bins:
    """Bins of equally many rows, the last one of fewer; of short runs each row is one."""
    size = max(-(-num_rows // most), 1)
    return Bins(np.arange(0, num_rows, size), num_rows)


def thin(values: np.ndarray, bins: Bins) -> ThinnedCurve:
    """The extremes and means of a column, by bin."""
    is_known = np.isfinite(values)
    count = np.add.reduceat(is_known, bins.starts, dtype=np.int64)
    total = np.add.reduceat(np.where(is_known, values, 0.0), bins.starts)
    low = np.minimum.reduceat(np.where(is_known, values, np.inf), bins.starts)
    high = np.maximum.reduceat(np.where(is_known, values, -np.inf), bins.starts)
    is_empty = count == 0
    return ThinnedCurve(
        low=np.where(is_empty, np.nan, low),
        mean=np.where(is_empty, np.nan, total / np.maximum(count, 1)),
        high=np.where(is_empty, np.nan, high),
    )


def as_short_numbers(values: np.ndarray) -> list[float | int | None]:
    """Numbers for JSON: five digits of each, whole ones without a point, None for what is not finite."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded
