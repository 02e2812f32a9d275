"""The weights of a run as slices: read out of its newest checkpoint, and written as one.

Of a run with adapters the slices are the sums that its network multiplies with.

What is written is a checkpoint whose chunks are the slices that a conversion moves, which is all that
it ever holds. How a checkpoint lies on the disk, `zaya_jax.checkpoint` knows.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from zaya_jax.checkpoint import PlainArray, StoredWeights, chunk_name, metadata_files, read_config
from zaya_jax.config import CONFIG_FILE, Config, ModelConfig
from zaya_jax.convert.layouts import (
    ROUTER_BIAS,
    OurWeight,
    WeightSlice,
    check_shapes,
    layer_slices,
    our_weights,
    rows_per_slice,
)
from zaya_jax.convert.stream import Block, PlannedFile
from zaya_jax.durable import Damaged
from zaya_jax.model.adapters import declare_run, factor_axes, factor_paths
from zaya_jax.model.weights import flatten_weights


class RunWeights:
    """The newest weights of a run as a `zaya_jax.convert.stream.Source`.

    Attributes:
      run: its config.
      step: of the checkpoint.
      adapters: declarations of its adapters' factors, by path.
    """

    def __init__(self, run_folder: str | pathlib.Path):
        """Opens the newest checkpoint of a run.

        Raises:
          ValueError: if the folder is no run, has no checkpoint, or one that is damaged.
        """
        self.run = read_config(run_folder)
        self._stored = StoredWeights(run_folder)
        self.step = self._stored.step
        self._declared = flatten_weights(declare_run(self.run))
        self.adapters = {path: weight for path, weight in self._declared.items() if weight.adapts}
        ours = our_weights(self.run.model) | self.adapters
        expected = {_stored_name(path): weight.shape for path, weight in ours.items()}
        try:
            check_shapes(self._stored.shapes, expected, "weight")
        except ValueError as error:
            raise ValueError(
                f"{self._stored.folder} does not hold what the run's {CONFIG_FILE} describes: {error}"
            ) from error

    @property
    def config(self) -> ModelConfig:
        """The config of the network alone."""
        return self.run.model

    def dtype(self, path: str) -> np.dtype:
        """The type of a weight in the checkpoint."""
        return self._stored.dtype(_stored_name(path))

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """A slice. Where the checkpoint's chunks are larger, they are kept for the slices that follow.

        One of a weight with an adapter has its change.
        """
        own = self._read(weight_slice.path, weight_slice.index)
        factors = factor_paths(weight_slice.path)
        if factors[0] not in self.adapters:
            return own
        weight, change = self._declared[weight_slice.path], self.adapters[factors[1]].adapts
        assert change is not None, "adapters are declared as such"
        a, b = (self._read(path, weight_slice.start).astype(np.float32) for path in factors)
        # The slice and its factors are without their first axes, those that count layers and experts.
        axes = [each[len(weight_slice.start) :] for each in (*factor_axes(weight), weight.axes)]
        product = np.einsum(f"{axes[0]},{axes[1]}->{axes[2]}", a, b * np.float32(change.scale), optimize=True)
        return (own.astype(np.float32) + product).astype(own.dtype)

    def _read(self, path: str, index: tuple[int | slice, ...]) -> np.ndarray:
        try:
            return self._stored.read(_stored_name(path), index)
        except ValueError as error:
            raise Damaged(f"{self._stored.folder}: {path} is damaged: {str(error)[:200]}") from error

    def identity(self) -> list[Any]:
        """What changes when the checkpoint does, as JSON has it."""
        return self._stored.identity()

    def chunk_bytes(self) -> int:
        """Host memory that one chunk of each weight takes: what reading may hold at once."""
        return self._stored.chunk_bytes()


def _stored_name(path: str) -> str:
    """What a checkpoint calls a weight: the biases lie beside the parameters, not among them."""
    return path.replace("/", ".") if path == ROUTER_BIAS else "params." + path.replace("/", ".")


def run_files(
    config: Config, dtypes: Mapping[str, np.dtype], *, step: int, extra: Mapping[str, bytes]
) -> list[PlannedFile]:
    """A run folder with one checkpoint, of weights only.

    Args:
      config: of the run.
      dtypes: of the weights, by path.
      step: of the checkpoint.
      extra: further files by name.
    """
    weights, num_layers = our_weights(config.model), config.model.num_hidden_layers
    arrays = {
        path: PlainArray(_stored_name(path), weight.shape, _chunk_shape(weight), dtypes[path])
        for path, weight in weights.items()
    }
    small = {**extra, CONFIG_FILE: config.to_text().encode(), **metadata_files(step, arrays.values())}
    files = [PlannedFile(name, content) for name, content in small.items()]
    # Layer by layer, as the other layouts have them: both sides are then read and written in order.
    for layer in (None, *range(num_layers)):
        for path, weight in weights.items():
            if weight.is_stacked == (layer is not None):
                slices = layer_slices(path, weight, num_layers, layer)
                files += [_chunk_file(step, arrays[path], weight_slice) for weight_slice in slices]
    return files


def _chunk_shape(weight: OurWeight) -> tuple[int, ...]:
    """That of a weight's slices, which then are whole files."""
    if not weight.is_stacked:
        return (rows_per_slice(weight.shape), *weight.shape[1:])
    counted = 2 if weight.has_experts else 1
    return (1,) * counted + weight.shape[counted:]


def _chunk_file(step: int, array: PlainArray, weight_slice: WeightSlice) -> PlannedFile:
    padding = array.chunk_bytes - weight_slice.size * array.dtype.itemsize
    block = Block(weight_slice, array.dtype, _as_it_is, padding)
    return PlannedFile(chunk_name(step, array, weight_slice.start), b"", (block,))


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array
