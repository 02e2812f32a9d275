"""Verification of a conversion: both folders are read back and compared.

Letters: B batch, T time, D model width, V vocabulary.
"""

import dataclasses
import functools
import importlib.util
import math
import pathlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zaya_jax.config import ExecutionConfig, ModelConfig
from zaya_jax.convert.pytorch.folder import PytorchWeights
from zaya_jax.convert.pytorch.in_memory import load_variables
from zaya_jax.convert.pytorch.layouts import ROUTER_BIAS, WeightSlice, weight_slices
from zaya_jax.convert.stream import WORKERS, Progress, ahead, check_checksums
from zaya_jax.convert.weight_folder import WeightFolder
from zaya_jax.errors import UserError
from zaya_jax.files.durable import CHECKSUMS
from zaya_jax.model import zaya
from zaya_jax.model.weights import count_parameters

PROMPT_TOKENS = 16
EXECUTION = ExecutionConfig(dtype="float32")
"""Execution of both sides, regardless of their configs."""
TOLERANCE = 1e-4
"""Maximum difference of two implementations' float32 logits, relative to the largest (as in tests/parity)."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first slice, in network order, whose values differ.

    Attributes:
      weight_slice: part of a weight.
      count: number of values that differ.
      largest: largest absolute difference.
    """

    weight_slice: WeightSlice
    count: int
    largest: float

    def __str__(self) -> str:
        part = self.weight_slice
        where = f" of layer or row {part.start[0]}"
        expert = f", expert {part.start[1]}" if len(part.start) > 1 else ""
        return (
            f"{part.path}{where}{expert}: {self.count:,} of {part.size:,} values differ, by up to "
            f"{self.largest:.3g}"
        )


def compare_tensors(source: WeightFolder, converted: WeightFolder, progress: Progress) -> Difference | None:
    """Compares all values bitwise, with `source` cast to the types of `converted`.

    Returns:
      The first difference; None if there is none.

    Raises:
      UserError: if the two have different architectures.
    """
    if not same_network(source.source.config, converted.source.config):
        raise UserError("the two folders have different architectures: compare their configs")

    def compare(weight_slice: WeightSlice) -> Difference | None:
        dtype = converted.source.dtype(weight_slice.path)
        expected, actual = (
            source.source.read(weight_slice).astype(dtype),
            converted.source.read(weight_slice).astype(dtype),
        )
        # Compared as bits, so that a NaN equals itself and 0.0 differs from -0.0.
        unsigned = np.dtype(f"u{dtype.itemsize}")
        unequal = np.ascontiguousarray(expected).view(unsigned) != np.ascontiguousarray(actual).view(unsigned)
        if not unequal.any():
            return None
        largest = np.abs(expected.astype(np.float64) - actual.astype(np.float64)).max()
        return Difference(weight_slice, int(unequal.sum()), float(largest))

    # Sorted in network order, so that the first difference is close to the cause.
    slices = sorted(comparable_slices(source, converted), key=_depth)
    with ThreadPoolExecutor(WORKERS) as workers:
        for weight_slice, difference in zip(slices, ahead(workers, compare, slices), strict=True):
            progress.advance(weight_slice.size * converted.source.dtype(weight_slice.path).itemsize)
            if difference is not None:
                return difference
    return None


def comparable_slices(source: WeightFolder, converted: WeightFolder) -> list[WeightSlice]:
    """Slices whose values must be equal: all but those that only `converted` has quantized."""
    slices = weight_slices(source.source.config)
    if not is_quantized(converted) or is_quantized(source):
        return slices
    assert isinstance(converted.source, PytorchWeights), "a PyTorch folder is quantized"
    return [each for each in slices if converted.source.quantized(each) is None]


def is_quantized(opened: WeightFolder) -> bool:
    """Whether a folder has quantized weights."""
    return opened.pytorch is not None and bool(opened.pytorch.quantized)


def same_network(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configs compute the same function.

    The behavior of an unreachable skip class is ignored, because not all layouts record it.
    """
    # Patterns of different lengths may describe the same layers, which are compared below.
    free = ("skip_class", "layer_pattern")
    fields = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in free]
    if not any("sliding" in kind for kind in one.layer_types):
        fields.remove("sliding_window")  # the legacy layout omits a window that no layer uses
    # Fields that only affect training or files are compared too; converters preserve them.
    same = all(getattr(one, name) == getattr(other, name) for name in fields)
    return same and one.layer_types == other.layer_types


def _depth(weight_slice: WeightSlice) -> tuple[int, str, tuple[int, ...]]:
    """Sort key in network order, so that the first difference is the cause of later ones."""
    if weight_slice.is_stacked:
        return (1 + weight_slice.start[0], weight_slice.path, weight_slice.start)
    return (0 if weight_slice.path.startswith("embedding") else 2**31, weight_slice.path, weight_slice.start)


def logits_memory(config: ModelConfig) -> int:
    """Memory in bytes for comparing logits: both sides in float32, and a third copy for transformers."""
    # transformers loads its own copy of the weights.
    copies = 3 if has_transformers() else 2
    return copies * 4 * count_parameters(config) + 8 * PROMPT_TOKENS * config.vocab_size


def has_transformers() -> bool:
    """Whether torch and transformers are installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def compare_logits(source: WeightFolder, converted: WeightFolder, *, seed: int = 0) -> list[str]:
    """Compares float32 logits on a random prompt.

    Returns:
      Lines that describe the results.

    Raises:
      UserError: if logits differ although they must not; the message names the first layer that differs.
    """
    config = converted.source.config
    tokens_BT = (
        np.random.default_rng(seed).integers(1, config.vocab_size, (1, PROMPT_TOKENS)).astype(np.int32)
    )
    ours = load_variables(converted.source)
    logits_BTV = _logits(config, ours, tokens_BT)
    expected_BTV = _logits(config, load_variables(source.source), tokens_BT)
    error = _relative_error(logits_BTV, expected_BTV)
    # Rounding to a narrower type changes logits legitimately. Products of quantized values are float32.
    narrowed = is_quantized(source) or any(
        source.source.dtype(path) != converted.source.dtype(path) for path in ("embedding/table", ROUTER_BIAS)
    )
    if error and not narrowed:
        layer = first_different_layer(config, load_variables(source.source), ours, tokens_BT)
        raise UserError(
            f"logits differ by {error:.3g} of the largest; the first layer that differs is {layer}"
        )
    lines = [f"logits of {PROMPT_TOKENS} random tokens: {_describe_error(error)}"]
    for opened in (source, converted):
        if opened.layout != "native" or opened.pytorch is None:
            continue
        # transformers reads quantized weights only with packages of their formats.
        if not is_quantized(opened) and has_transformers():
            variables = load_variables(opened.source)
            lines.append(_compare_transformers(opened.pytorch.folder, config, variables, tokens_BT))
    return lines


def _describe_error(error: float) -> str:
    return "bitwise equal" if error == 0 else f"differ by {error:.3g} of the largest, by narrower weights"


@functools.partial(jax.jit, static_argnums=0)
def _logits(config: ModelConfig, variables: Mapping[str, Any], tokens_BT: jax.Array) -> Float[Array, "B T V"]:
    bias_LX = variables["router_bias"]["layers"]
    return zaya.forward(config, EXECUTION, variables["params"], bias_LX, tokens_BT).logits_BTV


def _relative_error(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual), np.asarray(expected)
    # NaN counts as equal: logits of weights that overflow are NaN on both sides.
    if np.array_equal(actual, expected, equal_nan=True):
        return 0.0
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny))


def first_different_layer(
    config: ModelConfig, one: Mapping[str, Any], other: Mapping[str, Any], tokens_BT: np.ndarray
) -> int | None:
    """Index of the first layer after which the residual streams differ; None if only the head does."""
    for number in range(config.num_hidden_layers):
        streams = [_stream_after(config, variables, tokens_BT, number + 1) for variables in (one, other)]
        if not np.array_equal(streams[0], streams[1], equal_nan=True):
            return number
    return None


def _stream_after(
    config: ModelConfig, variables: Mapping[str, Any], tokens_BT: np.ndarray, num_layers: int
) -> Float[Array, "B T D"]:
    """The residual stream after the first layers, computed with a model that has only those."""
    params = variables["params"]
    # Weights are stacked by layer, so a prefix of each is a model with fewer layers.
    stacked = jax.tree.map(lambda weight: weight[:num_layers], params["layers"])
    if num_layers == 1:
        stacked["router"].pop("eda_scale", None)
    elif "eda_scale" in stacked["router"]:
        stacked["router"]["eda_scale"] = params["layers"]["router"]["eda_scale"][: num_layers - 1]
    cut = dataclasses.replace(config, num_hidden_layers=num_layers)
    bias_LX = variables["router_bias"]["layers"][:num_layers]
    params = params | {"layers": stacked}
    return zaya.residual_stream(cut, EXECUTION, params, bias_LX, jnp.asarray(tokens_BT)).x_BTD


def _compare_transformers(
    folder: pathlib.Path, config: ModelConfig, variables: Mapping[str, Any], tokens_BT: np.ndarray
) -> str:
    """Compares our logits with those of transformers' `ZayaForCausalLM`, which reads the files itself.

    Raises:
      UserError: if they differ; the message names the first layer that differs.
    """
    import torch
    from transformers import ZayaForCausalLM

    # In float32, because the difference of bfloat16 logits would hide errors.
    model: Any = ZayaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    bias_LX = torch.from_numpy(np.array(variables["router_bias"]["layers"]))
    with torch.no_grad():
        for layer, bias_X in zip(model.model.layers, bias_LX, strict=True):
            # transformers 5.23 resets the bias of the skip class to -1 after loading.
            layer.mlp.gate.balancing_biases.copy_(bias_X)
        output = model(torch.from_numpy(tokens_BT).long(), output_hidden_states=True, use_cache=False)
    error = _relative_error(_logits(config, variables, tokens_BT), output.logits.numpy())
    if not error < TOLERANCE:
        errors = [
            _relative_error(_stream_after(config, variables, tokens_BT, number + 1), hidden.numpy())
            # The last hidden state of transformers is after the final norm, so it is skipped.
            for number, hidden in enumerate(output.hidden_states[1:-1])
        ]
        layer = next((number for number, each in enumerate(errors) if each >= TOLERANCE), "the last")
        raise UserError(
            f"transformers' logits of {folder} differ by {error:.3g} of the largest, more than {TOLERANCE}; "
            f"the first layer that differs is {layer}"
        )
    return (
        f"logits of transformers on {folder.name}: differ by {error:.3g} of the largest (limit {TOLERANCE})"
    )


def check_files(opened: WeightFolder, folder: pathlib.Path) -> str | None:
    """Verifies the checksums of a converted folder: a message about damage, or None if it is intact."""
    if not (folder / CHECKSUMS).is_file():
        return f"{folder} has no {CHECKSUMS}: {opened.layout} weights that zaya convert did not write"
    return check_checksums(folder)


def num_bytes(opened: WeightFolder) -> int:
    """Size of a folder's weights in bytes."""
    slices = weight_slices(opened.source.config)
    return sum(weight_slice.size * opened.source.dtype(weight_slice.path).itemsize for weight_slice in slices)


def num_values(slices: Iterable[WeightSlice]) -> int:
    """Number of values in slices, router biases included."""
    return sum(math.prod(weight_slice.shape) for weight_slice in slices)
