"""`zaya_jax.load_pytorch` and `zaya_jax.save_pytorch`: a PyTorch folder to and from variables in memory."""

import dataclasses
import pathlib
import secrets
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from zaya_jax.config import DataConfig, ExecutionConfig, ModelConfig, require_local
from zaya_jax.convert.companion_files import of_tokenizer
from zaya_jax.convert.output_files import MAX_SHARD_BYTES, parse_dtype, pytorch_files
from zaya_jax.convert.pytorch.folder import PytorchWeights, open_folder
from zaya_jax.convert.pytorch.huggingface import as_variables, by_path
from zaya_jax.convert.pytorch.layouts import LAYOUTS, LayoutName, WeightSlice, our_weights, weight_slices
from zaya_jax.convert.stream import (
    WORKERS,
    NoProgress,
    Source,
    ahead,
    contiguous,
    execution_of,
    write_folder,
)
from zaya_jax.errors import UserError
from zaya_jax.model.zaya import Zaya


def load_pytorch(
    folder: str | pathlib.Path, *, execution: ExecutionConfig | None = None
) -> tuple[Zaya, dict[str, Any]]:
    """Loads a model from a folder of PyTorch weights, in the native or the legacy layout.

    Args:
      folder: folder with config.json and safetensors files, or the id of a model on the Hugging Face hub,
        which is downloaded if huggingface_hub is installed.
      execution: how to compute the model. None: float32 activations if the stored weights are float32, else
        bfloat16.

    Returns:
      The model and its float32 variables: `{"params": ..., "router_bias": {"layers": [L, X]}}`. Quantized
      weights are values times scales.

    Raises:
      UserError: if the folder is incomplete, inconsistent, damaged or not supported.
    """
    opened = open_folder(folder)
    # A warning and not an error, because fields that may change the model were rejected before.
    if opened.unread:
        warnings.warn(f"{opened.folder}: ignored fields: {', '.join(opened.unread)}", stacklevel=2)
    with PytorchWeights(opened) as weights:
        return Zaya(opened.config, execution or execution_of(weights)), load_variables(weights)


def load_variables(source: Source) -> dict[str, Any]:
    """Loads all weights of a source into memory, as float32."""
    flat = {path: np.empty(weight.shape, np.float32) for path, weight in our_weights(source.config).items()}
    # Reading and transposing in threads overlaps with copying into the result.
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
    """Saves a model as a folder that `transformers` can load.

    Args:
      folder: path of the new folder; it must not exist, and appears when it is complete.
      model: the model.
      variables: variables of the model, as `Zaya.init` returns them.
      layout: "native" (transformers 5.13 and later) or "legacy" (Zyphra's first releases).
      dtype: type of the weights: "bfloat16", "float32" or "float16"; router biases are always float32.
      max_shard_bytes: maximum size of a safetensors file; a larger tensor has its own file.
      tokenizer: "byte" or the path of a tokenizer.json to copy, as `DataConfig.tokenizer`; None for none.

    Raises:
      UserError: if `folder` exists, or the layout does not support the architecture.
    """
    require_local("folder", str(folder))
    folder = pathlib.Path(folder)
    # The type is only checked statically.
    if layout not in LAYOUTS:
        raise UserError(f'layout is "{layout}"; it must be "native" or "legacy"')
    if folder.exists():
        raise UserError(f"{folder} already exists; choose another folder")
    source = VariableWeights(model.config, by_path(model.config, variables))
    # The same validation as for a run's tokenizer.
    data = None if tokenizer is None else DataConfig(tokenizer=tokenizer)
    companions = of_tokenizer(data, model.config, story=("Saved from zaya_jax.",))
    files = pytorch_files(
        source, layout, companions, dtype=parse_dtype(dtype), max_shard_bytes=max_shard_bytes
    )
    write_folder(source, files, folder, NoProgress())


@dataclasses.dataclass(frozen=True)
class VariableWeights:
    """Variables in memory as a `zaya_jax.convert.stream.Source`.

    Attributes:
      config: architecture of the weights.
      flat: weights by path.
    """

    config: ModelConfig
    flat: Mapping[str, Any]

    def dtype(self, path: str) -> np.dtype:
        """Type in which the weight with this path is stored."""
        return np.dtype(self.flat[path].dtype)

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """Reads a slice: a view if the weight is in host memory, a copy if it is on a device."""
        weight = self.flat[weight_slice.path]
        # Index on the device, so that only the slice is copied to the host.
        is_on_device = isinstance(weight, jax.Array) and any(d.platform != "cpu" for d in weight.devices())
        return (
            np.asarray(weight[weight_slice.index]) if is_on_device else np.asarray(weight)[weight_slice.index]
        )

    def identity(self) -> list[Any]:
        """A random value, because variables have no identity that a later process could compare."""
        return [secrets.token_hex()]
