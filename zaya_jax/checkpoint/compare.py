"""Differences between the arrays of two checkpoints, computed part by part."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from zaya_jax.checkpoint.stored_arrays import StoredArrays

_BLOCK_SIZE = 2**20
"""Number of values that are converted to float64 at a time."""


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
    """Difference of an array that both checkpoints have with the same shape.

    Attributes:
      name: name of the array.
      dtypes: its type in the first and in the second checkpoint.
      num_values: number of values whose bits differ; if the types differ, whose values differ.
      absolute: largest absolute difference; infinite if only one of two values is NaN or infinite.
      relative: largest difference divided by the larger magnitude of the two values.
    """

    name: str
    dtypes: tuple[str, str]
    num_values: int
    absolute: float
    relative: float

    @property
    def is_none(self) -> bool:
        """Whether both arrays are bitwise equal."""
        return self.num_values == 0 and self.dtypes[0] == self.dtypes[1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of one item of two checkpoints.

    Attributes:
      only_first: names of arrays that the second checkpoint does not have.
      only_second: names of arrays that the first checkpoint does not have.
      shapes: shapes in the first and second checkpoint, by name, of arrays whose shapes differ.
      differences: differences of all other arrays, sorted by descending relative difference.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    differences: tuple[ArrayDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both have the same arrays and all are bitwise equal."""
        others = self.only_first or self.only_second or self.shapes
        return not others and all(each.is_none for each in self.differences)


def compare(first: StoredArrays, second: StoredArrays) -> Comparison:
    """Compares all arrays of two items. One chunk of each is in memory at a time.

    Raises:
      UserError: with TensorStore's message, if a part cannot be read.
    """
    # In the order of the first item, which is that of its metadata.
    common = [name for name in first.shapes if name in second.shapes]
    shapes = {
        name: (first.shapes[name], second.shapes[name])
        for name in common
        if first.shapes[name] != second.shapes[name]
    }
    differences = [_compare_array(name, first, second) for name in common if name not in shapes]
    return Comparison(
        # Sorted, because set differences have no order.
        only_first=tuple(sorted(first.shapes.keys() - second.shapes.keys())),
        only_second=tuple(sorted(second.shapes.keys() - first.shapes.keys())),
        shapes=shapes,
        # Equal arrays come last, after those that differ only in the sign of a zero.
        differences=tuple(sorted(differences, key=lambda d: (d.is_none, -d.relative, -d.absolute, d.name))),
    )


def _compare_array(name: str, first: StoredArrays, second: StoredArrays) -> ArrayDifference:
    num_values, absolute, relative = 0, 0.0, 0.0
    for part in first.parts(name):
        for x, y in _blocks(first.read(name, part), second.read(name, part)):
            num_differing, largest_absolute, largest_relative = _differ(x, y)
            num_values += num_differing
            absolute, relative = max(absolute, largest_absolute), max(relative, largest_relative)
    # Types may differ, for example after `zaya ckpt reshape --dtype`.
    dtypes = first.dtype(name).name, second.dtype(name).name
    return ArrayDifference(name, dtypes, num_values, absolute, relative)


def _blocks(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields both arrays in flat blocks, small enough to convert to float64."""
    x, y = np.ravel(x), np.ravel(y)
    for start in range(0, len(x), _BLOCK_SIZE):
        yield x[start : start + _BLOCK_SIZE], y[start : start + _BLOCK_SIZE]


def _differ(x: np.ndarray, y: np.ndarray) -> tuple[int, float, float]:
    """Number of values that differ, and the largest absolute and relative difference."""
    if x.dtype == y.dtype:
        # Compared as bits, so that 0 differs from -0 and a NaN equals itself.
        # bfloat16 is a type of ml_dtypes, whose bits are viewed as uint16.
        bits = np.dtype(f"u{x.dtype.itemsize}")
        differ = x.view(bits) != y.view(bits)
    else:
        x, y = x.astype(np.float64), y.astype(np.float64)
        differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
    # Only differing values are converted: usually there are few.
    x, y = x[differ].astype(np.float64), y[differ].astype(np.float64)
    with np.errstate(invalid="ignore"):
        # Equal values, such as two infinities, have difference 0; inf - inf would be NaN.
        absolute = np.where(x == y, 0.0, np.abs(x - y))
        relative = absolute / np.where(x == y, 1.0, np.maximum(np.abs(x), np.abs(y)))
    return len(x), _largest(absolute), _largest(relative)


def _largest(values: np.ndarray) -> float:
    """The largest difference; infinite if one is NaN."""
    return float(np.nan_to_num(values, nan=math.inf, posinf=math.inf).max(initial=0.0))
