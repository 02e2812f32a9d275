"""How far the arrays of two checkpoints are apart, part by part."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from zaya_jax.checkpoint.stored_arrays import StoredArrays

_AT_ONCE = 2**20
"""Values that are held in float64."""


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
    """An array that both checkpoints have, of one shape.

    Attributes:
      name: of the array.
      dtypes: on either side.
      num_values: whose bits differ; of two types, whose values do.
      absolute: the largest difference; infinite where one is no number and the other is.
      relative: the largest difference as a share of the larger of the two values.
    """

    name: str
    dtypes: tuple[str, str]
    num_values: int
    absolute: float
    relative: float

    @property
    def is_none(self) -> bool:
        """Whether both are equal bit for bit."""
        return self.num_values == 0 and self.dtypes[0] == self.dtypes[1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two items of checkpoints.

    Attributes:
      only_ours: names of arrays that the second has not.
      only_theirs: names of arrays that the first has not.
      shapes: of arrays that have two, by name.
      differences: of the others, the largest relative one first.
    """

    only_ours: tuple[str, ...]
    only_theirs: tuple[str, ...]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    differences: tuple[ArrayDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether all arrays are there twice, and equal bit for bit."""
        others = self.only_ours or self.only_theirs or self.shapes
        return not others and all(each.is_none for each in self.differences)


def compare(ours: StoredArrays, theirs: StoredArrays) -> Comparison:
    """Holds all arrays of two items against each other; of each side a chunk is in memory at once.

    Raises:
      ValueError: in TensorStore's words, if a part cannot be read.
    """
    both = [name for name in ours.shapes if name in theirs.shapes]
    shapes = {
        name: (ours.shapes[name], theirs.shapes[name])
        for name in both
        if ours.shapes[name] != theirs.shapes[name]
    }
    found = [_compare_array(name, ours, theirs) for name in both if name not in shapes]
    return Comparison(
        only_ours=tuple(sorted(ours.shapes.keys() - theirs.shapes.keys())),
        only_theirs=tuple(sorted(theirs.shapes.keys() - ours.shapes.keys())),
        shapes=shapes,
        differences=tuple(sorted(found, key=_rank)),
    )


def _rank(found: ArrayDifference) -> tuple[bool, float, float, str]:
    """What is equal comes last, behind zeros of other signs."""
    return found.is_none, -found.relative, -found.absolute, found.name


def _compare_array(name: str, ours: StoredArrays, theirs: StoredArrays) -> ArrayDifference:
    num_values, absolute, relative = 0, 0.0, 0.0
    for part in ours.parts(name):
        for x, y in _pieces(ours.read(name, part), theirs.read(name, part)):
            found = _differ(x, y)
            num_values += found[0]
            absolute, relative = max(absolute, found[1]), max(relative, found[2])
    dtypes = ours.dtype(name).name, theirs.dtype(name).name
    return ArrayDifference(name, dtypes, num_values, absolute, relative)


def _pieces(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both flat, and so short that each can be held in float64 too."""
    x, y = np.ravel(x), np.ravel(y)
    for first in range(0, len(x), _AT_ONCE):
        yield x[first : first + _AT_ONCE], y[first : first + _AT_ONCE]


def _differ(x: np.ndarray, y: np.ndarray) -> tuple[int, float, float]:
    """How many values differ, and the largest absolute and relative difference."""
    if x.dtype == y.dtype:
        # As bits: a zero is not a negative one, and what is no number is equal to itself.
        bits = np.dtype(f"u{x.dtype.itemsize}")
        differ = x.view(bits) != y.view(bits)
    else:
        x, y = x.astype(np.float64), y.astype(np.float64)
        differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
    x, y = x[differ].astype(np.float64), y[differ].astype(np.float64)
    with np.errstate(invalid="ignore"):
        absolute = np.where(x == y, 0.0, np.abs(x - y))
        relative = absolute / np.where(x == y, 1.0, np.maximum(np.abs(x), np.abs(y)))
    return len(x), _largest(absolute), _largest(relative)


def _largest(values: np.ndarray) -> float:
    """Of differences; infinite where there is none that is a number."""
    return float(np.nan_to_num(values, nan=math.inf, posinf=math.inf).max(initial=0.0))
