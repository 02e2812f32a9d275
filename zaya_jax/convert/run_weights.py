"""Weights of a run in slices: reading of its newest checkpoint, and planning of a new one.

If the run has adapters, slices are read with the adapters merged.

The chunks of a new checkpoint are the slices of a conversion, so that only a few are in memory at a time. The
file format is in `zaya_jax.checkpoint`.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from zaya_jax.checkpoint import (
    PlainArray,
    StoredWeights,
    WeightsKind,
    chunk_name,
    metadata_files,
    read_config,
)
from zaya_jax.config import CONFIG_FILE, Config, ModelConfig
from zaya_jax.convert.pytorch.layouts import (
    ROUTER_BIAS,
    OurWeight,
    WeightSlice,
    check_shapes,
    layer_slices,
    our_weights,
    rows_per_slice,
)
from zaya_jax.convert.quantized.codecs import CODECS, QuantizedValues
from zaya_jax.convert.stream import Block, PlannedFile
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.model.adapters import declare_run, factor_axes, factor_paths
from zaya_jax.model.frozen_base import SCALES, VALUES
from zaya_jax.model.weights import flatten_weights


class RunWeights:
    """The newest weights of a run as a `zaya_jax.convert.stream.Source`.

    Attributes:
      run: config of the run.
      step: step of the checkpoint.
      adapters: declarations of the adapters' factors, by path.
    """

    def __init__(self, run_folder: str | pathlib.Path, weights: WeightsKind = "raw"):
        """Opens the newest checkpoint of a run.

        Args:
          run_folder: folder of the run.
          weights: the weights to read, "raw" or their average, "ema".

        Raises:
          UserError: if the folder is not a run folder, or has no intact checkpoint or no average.
        """
        self.run = read_config(run_folder)
        self._stored = StoredWeights(run_folder, weights)
        self.step = self._stored.step
        # Declarations include adapters, which are merged by `read`.
        self._declared = flatten_weights(declare_run(self.run))
        self.adapters = {path: weight for path, weight in self._declared.items() if weight.adapts}
        ours = our_weights(self.run.model)
        # Quantized experts are two arrays each.
        arrays = self._declared | {ROUTER_BIAS: ours[ROUTER_BIAS]}
        expected = {_stored_name(path): weight.shape for path, weight in arrays.items()}
        try:
            # A config.json that was edited by hand would otherwise fail deep inside a conversion.
            check_shapes(self._stored.shapes, expected, "weight")
        except UserError as error:
            raise UserError(
                f"{self._stored.folder} does not match the run's {CONFIG_FILE}: {error}"
            ) from error

    @property
    def config(self) -> ModelConfig:
        """Architecture of the network whose weights these are."""
        return self.run.model

    def dtype(self, path: str) -> np.dtype:
        """Type of a weight in the checkpoint; of a quantized one, that of the other matrices."""
        if self._is_quantized(path):
            return np.dtype(self.run.execution.dtype)
        return self._stored.dtype(_stored_name(path))

    def _is_quantized(self, path: str) -> bool:
        return f"{path}/{VALUES}" in self._declared

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """Reads a slice, dequantized and with its adapter merged.

        Chunks of the checkpoint that are larger than the slice are cached for the following slices.
        """
        own = self._read_own(weight_slice)
        factors = factor_paths(weight_slice.path)
        # Most weights have no adapter.
        if factors[0] not in self.adapters:
            return own
        # The scale of the update is declared with factor B.
        change = self.adapters[factors[1]].adapts
        assert change is not None, "adapters are declared as such"
        weight = change.weight
        a, b = (self._read(path, weight_slice.start).astype(np.float32) for path in factors)
        # Letters of the slice and its factors, without the leading axes that index layers and experts.
        axes = [each[len(weight_slice.start) :] for each in (*factor_axes(weight), weight.axes)]
        product = np.einsum(f"{axes[0]},{axes[1]}->{axes[2]}", a, b * np.float32(change.scale), optimize=True)
        matrix = own.astype(np.float32) + product
        # Only adapters with DoRA have them.
        norms = factors[0].removesuffix("a") + "magnitude"
        if norms in self.adapters:
            assert weight.matrix is not None, "only matrices have adapters"
            inputs = tuple(map(axes[2].index, weight.matrix[0]))
            matrix *= _norm_factors(matrix, self._read(norms, weight_slice.start), inputs)
        # Computed in float32 and rounded once, like in training.
        return matrix.astype(own.dtype)

    def _read_own(self, weight_slice: WeightSlice) -> np.ndarray:
        """Reads a slice without its adapter."""
        path = weight_slice.path
        if not self._is_quantized(path):
            return self._read(path, weight_slice.index)
        values, scales = (self._read(f"{path}/{name}", weight_slice.index) for name in (VALUES, SCALES))
        codec = CODECS["mxfp4" if values.dtype == np.uint8 else "int8"]
        # Codecs have outputs first, as in PyTorch.
        matrix = codec.decode(QuantizedValues(values.T, scales.T)).T
        return matrix.reshape(weight_slice.shape).astype(self.dtype(path))

    def _read(self, path: str, index: tuple[int | slice, ...]) -> np.ndarray:
        try:
            return self._stored.read(_stored_name(path), index)
        except ValueError as error:
            # TensorStore's messages contain long addresses, so only the start is shown.
            raise DamagedError(f"{self._stored.folder}: {path} is damaged: {str(error)[:200]}") from error

    def identity(self) -> list[Any]:
        """JSON-compatible values that change when the checkpoint does."""
        return self._stored.identity()

    def chunk_bytes(self) -> int:
        """Host memory in bytes that the cache of chunks may use: one chunk of each weight."""
        return self._stored.chunk_bytes()


def _norm_factors(matrix: np.ndarray, magnitude: np.ndarray, inputs: tuple[int, ...]) -> np.ndarray:
    """Factors that give the columns of a matrix DoRA's norms ([DoRA] eq. 5)."""
    norms = np.sqrt(np.square(matrix).sum(axis=inputs, keepdims=True))
    return np.expand_dims(magnitude.astype(np.float32), inputs) / np.where(norms > 0, norms, np.float32(1))


def _stored_name(path: str) -> str:
    """Name of a weight in a checkpoint. Router biases are not parameters."""
    return path.replace("/", ".") if path == ROUTER_BIAS else "params." + path.replace("/", ".")


def run_files(
    config: Config, dtypes: Mapping[str, np.dtype], *, step: int, extra: Mapping[str, bytes]
) -> list[PlannedFile]:
    """Plans a run folder with one weights-only checkpoint.

    Args:
      config: config of the run.
      dtypes: type of each weight, by path.
      step: step of the checkpoint.
      extra: content of further files, by name.
    """
    weights, num_layers = our_weights(config.model), config.model.num_hidden_layers
    arrays = {
        path: PlainArray(_stored_name(path), weight.shape, _chunk_shape(weight), dtypes[path])
        for path, weight in weights.items()
    }
    # Files without slices.
    small = {**extra, CONFIG_FILE: config.to_text().encode(), **metadata_files(step, arrays.values())}
    files = [PlannedFile(name, content) for name, content in small.items()]
    # Layer by layer, like the other layouts, so that both sides are read and written sequentially.
    for layer in (None, *range(num_layers)):
        for path, weight in weights.items():
            if weight.is_stacked == (layer is not None):
                slices = layer_slices(path, weight, num_layers, layer)
                files += [_chunk_file(step, arrays[path], weight_slice) for weight_slice in slices]
    return files


def _chunk_shape(weight: OurWeight) -> tuple[int, ...]:
    """Shape of a weight's slices, so that each slice is one file."""
    if not weight.is_stacked:
        return (rows_per_slice(weight.shape), *weight.shape[1:])
    # One layer, and one expert if there are any, per chunk.
    counted = 2 if weight.has_experts else 1
    return (1,) * counted + weight.shape[counted:]


def _chunk_file(step: int, array: PlainArray, weight_slice: WeightSlice) -> PlannedFile:
    # Orbax expects all chunks of an array to have the same size.
    padding = array.chunk_bytes - weight_slice.size * array.dtype.itemsize
    block = Block(weight_slice, array.dtype, _identity, padding)
    return PlannedFile(chunk_name(step, array, weight_slice.start), b"", (block,))


def _identity(array: np.ndarray) -> np.ndarray:
    return array
