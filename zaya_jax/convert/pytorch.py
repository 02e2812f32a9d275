"""`zaya_jax.load_pytorch` and `zaya_jax.save_pytorch`: weights in memory to and from a PyTorch folder."""

import dataclasses
import pathlib
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from zaya_jax.config import DataConfig, ExecutionConfig, ModelConfig
from zaya_jax.convert.companions import of_tokenizer
from zaya_jax.convert.huggingface import as_variables, by_path
from zaya_jax.convert.layouts import LAYOUTS, LayoutName, WeightSlice, our_weights, weight_slices
from zaya_jax.convert.plans import MAX_SHARD_BYTES, parse_dtype, pytorch_files
from zaya_jax.convert.pytorch_folder import PytorchWeights, open_folder
from zaya_jax.convert.stream import (
    WORKERS,
    Source,
    Unwatched,
    ahead,
    contiguous,
    execution_of,
    write_folder,
)
from zaya_jax.model.zaya import Zaya


def load_pytorch(
    folder: str | pathlib.Path, *, execution: ExecutionConfig | None = None
) -> tuple[Zaya, dict[str, Any]]:
    """Loads a network from a folder of PyTorch weights, in the native or the legacy layout.

    Args:
      folder: with config.json and safetensors files; which layout it is, they tell.
      execution: how the model is computed. None: activations are float32 where the file's weights are, else
        bfloat16.

    Returns:
      The model, and float32 variables that it runs and trains on: `{"params": ..., "router_bias":
      {"layers": [L, X]}}`.

    Raises:
      ValueError: for anything that is missing, contradictory, damaged, quantised or not modelled.
    """
    opened = open_folder(folder)
    with PytorchWeights(opened) as weights:
        return Zaya(opened.config, execution or execution_of(weights)), load_variables(weights)


def load_variables(source: Source) -> dict[str, Any]:
    """All weights of a source in memory, float32."""
    flat = {path: np.empty(weight.shape, np.float32) for path, weight in our_weights(source.config).items()}
    with ThreadPoolExecutor(WORKERS) as workers:
        slices = weight_slices(source.config)
        arrays = ahead(workers, lambda weight_slice: contiguous(source.read(weight_slice)), slices)
        for weight_slice, array in zip(slices, arrays, strict=True):
            flat[weight_slice.path][weight_slice.index] = array
    return jax.tree.map(jax.device_put, as_variables(flat))


def save_pytorch(
    folder: str | pathlib.Path,
    model: Zaya,
    variables: Mapping[str, Any],
    *,
    layout: LayoutName = "native",
    dtype: str = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer: str | None = None,
) -> None:
    """Saves a network as a folder that `transformers` loads.

    Args:
      folder: must not exist yet; it appears when it is whole.
      model: the network.
      variables: its weights, as `Zaya.init` returns them.
      layout: "native", of transformers 5.13 and later, or "legacy", of Zyphra's first releases.
      dtype: "bfloat16", "float32" or "float16"; the balancing biases are float32 always.
      max_shard_bytes: size of a safetensors file; a tensor that is larger has one of its own.
      tokenizer: as `DataConfig.tokenizer`: "byte", or the path of a tokenizer.json, which goes along.

    Raises:
      ValueError: if there is something at `folder`, or the layout does not model the network.
    """
    folder = pathlib.Path(folder)
    if layout not in LAYOUTS:
        raise ValueError(f'layout is "{layout}"; it must be "native" or "legacy"')
    if folder.exists():
        raise ValueError(f"{folder} is there already; choose another folder")
    source = VariableWeights(model.config, by_path(model.config, variables))
    data = None if tokenizer is None else DataConfig(tokenizer=tokenizer)
    companions = of_tokenizer(data, model.config, story=("Saved from zaya_jax.",))
    files = pytorch_files(
        source, layout, companions, dtype=parse_dtype(dtype), max_shard_bytes=max_shard_bytes
    )
    write_folder(source, files, folder, Unwatched())


@dataclasses.dataclass(frozen=True)
class VariableWeights:
    """Variables in memory as a `zaya_jax.convert.stream.Source`.

    Attributes:
      config: the network's.
      flat: its weights by path.
    """

    config: ModelConfig
    flat: Mapping[str, Any]

    def dtype(self, path: str) -> np.dtype:
        """The type of a weight."""
        return np.dtype(self.flat[path].dtype)

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """A slice; a view where the weight is in the host's memory, a copy where it is on a device."""
        weight = self.flat[weight_slice.path]
        # On a device an index cuts the slice out there, so that no whole weight comes to the host.
        is_away = isinstance(weight, jax.Array) and any(d.platform != "cpu" for d in weight.devices())
        return np.asarray(weight[weight_slice.index]) if is_away else np.asarray(weight)[weight_slice.index]

    def identity(self) -> list[Any]:
        """Nothing that another process could know again: an attempt that was killed starts anew."""
        return [secrets.token_hex()]
