"""Errors of a quantized export by layer, measured by reading the written files again."""

import collections
import dataclasses
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from zaya_jax.convert.pytorch.folder import PytorchWeights
from zaya_jax.convert.pytorch.layouts import WeightSlice, weight_slices
from zaya_jax.convert.stream import WORKERS, Progress, Source, ahead


@dataclasses.dataclass(frozen=True)
class LayerError:
    """Error of a quantized weight in a layer.

    Attributes:
      path: path of the weight.
      layer: number of the layer; None for a weight without layers.
      relative: root of the mean squared error, relative to that of the weights.
      largest: largest absolute error, relative to the largest absolute weight.
    """

    path: str
    layer: int | None
    relative: float
    largest: float


@dataclasses.dataclass
class _Sums:
    squared_error: float = 0.0
    squared: float = 0.0
    largest_error: float = 0.0
    largest: float = 0.0

    def add(self, other: "_Sums") -> None:
        self.squared_error += other.squared_error
        self.squared += other.squared
        self.largest_error = max(self.largest_error, other.largest_error)
        self.largest = max(self.largest, other.largest)


def measure_errors(source: Source, quantized: PytorchWeights, progress: Progress) -> list[LayerError]:
    """Compares the quantized weights of a folder with those that they were made from.

    Args:
      source: the weights before.
      quantized: the weights after, open for reading.
      progress: receiver of the number of weights that are compared.

    Returns:
      Errors of all quantized weights, layer by layer.
    """
    # The files are read, and not what was computed for them: an error of writing would show.
    slices = _quantized_slices(quantized)
    sums: dict[tuple[int, str], _Sums] = collections.defaultdict(_Sums)

    def compare(weight_slice: WeightSlice) -> _Sums:
        return _compare(source.read(weight_slice), quantized.read(weight_slice))

    # As many slices are in memory as in a conversion.
    with ThreadPoolExecutor(WORKERS) as workers:
        for weight_slice, each in zip(slices, ahead(workers, compare, slices), strict=True):
            # Weights without layers come first in the table.
            layer = weight_slice.start[0] if weight_slice.is_stacked else -1
            sums[layer, weight_slice.path].add(each)
            progress.advance(weight_slice.size)
    return [_error(layer, path, total) for (layer, path), total in sorted(sums.items())]


def num_quantized(weights: PytorchWeights) -> int:
    """Number of values in the weights that the export quantizes."""
    return sum(weight_slice.size for weight_slice in _quantized_slices(weights))


def _quantized_slices(weights: PytorchWeights) -> list[WeightSlice]:
    return [each for each in weight_slices(weights.config) if weights.quantized(each) is not None]


def _compare(expected: np.ndarray, actual: np.ndarray) -> _Sums:
    expected = expected.astype(np.float32)
    error = actual - expected
    # In float64: a slice has millions of squares.
    squared_error, squared = (float(np.square(each).sum(dtype=np.float64)) for each in (error, expected))
    return _Sums(squared_error, squared, float(np.abs(error).max()), float(np.abs(expected).max()))


def _error(layer: int, path: str, sums: _Sums) -> LayerError:
    # A matrix of zeros has no error, and no size to divide by.
    relative = math.sqrt(sums.squared_error / sums.squared) if sums.squared else 0.0
    largest = sums.largest_error / sums.largest if sums.largest else 0.0
    return LayerError(path, None if layer < 0 else layer, relative, largest)


def error_rows(errors: list[LayerError]) -> Iterator[tuple[str, ...]]:
    """Yields rows of a table: layer, weight, relative error in percent, largest error in percent."""
    for each in errors:
        layer = "" if each.layer is None else str(each.layer)
        yield layer, each.path.rpartition("/")[2], f"{each.relative:.3%}", f"{each.largest:.3%}"
