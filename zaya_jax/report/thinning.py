"""Reduction of long curves to bins that keep their minima and maxima."""

import dataclasses

import numpy as np

_DIGITS = 5
"""Significant digits of numbers: more than a pixel can show."""


@dataclasses.dataclass(frozen=True)
class Bins:
    """Bins of consecutive rows.

    Attributes:
      starts: index of the first row of each bin.
      num_rows: total number of rows.
    """

    starts: np.ndarray
    num_rows: int

    @property
    def ends(self) -> np.ndarray:
        """Index of the last row of each bin."""
        return np.append(self.starts[1:], self.num_rows) - 1


@dataclasses.dataclass(frozen=True)
class ThinnedCurve:
    """Values of a column by bin; NaN for a bin without finite values.

    Attributes:
      low: minimum of the finite values.
      mean: mean of the finite values.
      high: maximum of the finite values.
    """

    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray

    @property
    def is_exact(self) -> bool:
        """Whether the means alone describe the curve."""
        # A bin without values has NaN in both.
        return np.array_equal(self.low, self.high, equal_nan=True)


def bins_of(num_rows: int, most: int) -> Bins:
    """Returns bins of equal size, except for a smaller last one; in short runs each row is a bin."""
    # Rounded up, so that there are at most `most` bins.
    size = max(-(-num_rows // most), 1)
    return Bins(np.arange(0, num_rows, size), num_rows)


def thin(values: np.ndarray, bins: Bins) -> ThinnedCurve:
    """Returns minima, means and maxima of a column by bin."""
    is_known = np.isfinite(values)
    # reduceat reduces each bin at once, without a Python loop over bins.
    count = np.add.reduceat(is_known, bins.starts, dtype=np.int64)
    total = np.add.reduceat(np.where(is_known, values, 0.0), bins.starts)
    low = np.minimum.reduceat(np.where(is_known, values, np.inf), bins.starts)
    high = np.maximum.reduceat(np.where(is_known, values, -np.inf), bins.starts)
    is_empty = count == 0
    return ThinnedCurve(
        low=np.where(is_empty, np.nan, low),
        # `where` computes both sides, and a division by zero would warn.
        mean=np.where(is_empty, np.nan, total / np.maximum(count, 1)),
        high=np.where(is_empty, np.nan, high),
    )


def as_short_numbers(values: np.ndarray) -> list[float | int | None]:
    """Returns numbers for JSON with five digits, integers without a point, and None for nonfinite values."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    # JSON would write a whole float with ".0", two characters more.
    return int(rounded) if rounded.is_integer() else rounded
