"""Both sides of a conversion, read back and compared.

Letters: B batch, T time, D model width, V vocabulary.
"""

import dataclasses
import functools
import importlib.util
import math
import pathlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zaya_jax.config import ExecutionConfig, ModelConfig
from zaya_jax.convert.layouts import ROUTER_BIAS, WeightSlice, weight_slices
from zaya_jax.convert.pytorch import load_variables
from zaya_jax.convert.stream import WORKERS, Watcher, ahead, check_checksums
from zaya_jax.convert.weight_folder import WeightFolder
from zaya_jax.durable import CHECKSUMS
from zaya_jax.model import zaya
from zaya_jax.model.weights import count_parameters

PROMPT_TOKENS = 16
EXECUTION = ExecutionConfig(dtype="float32")
"""Of both sides, however their runs compute."""
TOLERANCE = 1e-4
"""Of float32 logits of two implementations, relative to the largest (as in tests/parity)."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first slice, from the embedding upwards, whose values are not what they must be.

    Attributes:
      weight_slice: which part of which weight.
      count: values that differ.
      largest: difference.
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


def compare_tensors(before: WeightFolder, after: WeightFolder, watcher: Watcher) -> Difference | None:
    """Compares every value bit for bit, `before` cast to the type that it has `after`.

    Raises:
      ValueError: if the two describe different networks.
    """
    if not same_network(before.source.config, after.source.config):
        raise ValueError("the two sides describe different networks: their configs differ")

    def compare(weight_slice: WeightSlice) -> Difference | None:
        dtype = after.source.dtype(weight_slice.path)
        expected, found = (
            before.source.read(weight_slice).astype(dtype),
            after.source.read(weight_slice).astype(dtype),
        )
        # As bits: a NaN equals itself there, and 0.0 is not -0.0.
        unsigned = np.dtype(f"u{dtype.itemsize}")
        unequal = np.ascontiguousarray(expected).view(unsigned) != np.ascontiguousarray(found).view(unsigned)
        if not unequal.any():
            return None
        largest = np.abs(expected.astype(np.float64) - found.astype(np.float64)).max()
        return Difference(weight_slice, int(unequal.sum()), float(largest))

    slices = sorted(weight_slices(before.source.config), key=_depth)
    with ThreadPoolExecutor(WORKERS) as workers:
        for weight_slice, difference in zip(slices, ahead(workers, compare, slices), strict=True):
            watcher.advance(weight_slice.size * after.source.dtype(weight_slice.path).itemsize)
            if difference is not None:
                return difference
    return None


def same_network(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configs are of one function, as far as files can tell.

    What an unreachable skip class would do is not written in them.
    """
    free = ("skip_class", "layer_pattern")
    fields = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in free]
    if not any("sliding" in kind for kind in one.layer_types):
        fields.remove("sliding_window")  # the legacy layout does not keep one that nothing uses
    same = all(getattr(one, name) == getattr(other, name) for name in fields)
    return same and one.layer_types == other.layer_types


def _depth(weight_slice: WeightSlice) -> tuple[int, str, tuple[int, ...]]:
    """Network order: what every token meets first comes first, so that the first difference is the cause."""
    if weight_slice.is_stacked:
        return (1 + weight_slice.start[0], weight_slice.path, weight_slice.start)
    return (0 if weight_slice.path.startswith("embedding") else 2**31, weight_slice.path, weight_slice.start)


def logits_memory(config: ModelConfig) -> int:
    """Bytes that comparing logits takes: both sides in float32, and a third where transformers joins."""
    copies = 3 if has_transformers() else 2
    return copies * 4 * count_parameters(config) + 8 * PROMPT_TOKENS * config.vocab_size


def has_transformers() -> bool:
    """Whether there is a second implementation to ask."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def compare_logits(before: WeightFolder, after: WeightFolder, *, seed: int = 0) -> list[str]:
    """Compares logits on a random prompt, all in float32.

    Returns:
      Lines about what was found.

    Raises:
      ValueError: if logits differ that must not, naming the first layer whose output does.
    """
    config = after.source.config
    tokens_BT = (
        np.random.default_rng(seed).integers(1, config.vocab_size, (1, PROMPT_TOKENS)).astype(np.int32)
    )
    ours = load_variables(after.source)
    logits_BTV = _logits(config, ours, tokens_BT)
    expected_BTV = _logits(config, load_variables(before.source), tokens_BT)
    error = _relative_error(logits_BTV, expected_BTV)
    narrowed = any(
        before.source.dtype(path) != after.source.dtype(path) for path in ("embedding/table", ROUTER_BIAS)
    )
    if error and not narrowed:
        layer = first_different_layer(config, load_variables(before.source), ours, tokens_BT)
        raise ValueError(
            f"logits differ by {error:.3g} of the largest; the first layer to differ is number {layer}"
        )
    lines = [f"logits of {PROMPT_TOKENS} random tokens: {_in_words(error)}"]
    for opened in (before, after):
        if opened.layout == "native" and opened.pytorch is not None and has_transformers():
            theirs = after.source if opened is after else before.source
            lines.append(_ask_transformers(opened.pytorch.folder, config, load_variables(theirs), tokens_BT))
    return lines


def _in_words(error: float) -> str:
    return "equal bit for bit" if error == 0 else f"differ by {error:.3g} of the largest, by narrower weights"


@functools.partial(jax.jit, static_argnums=0)
def _logits(config: ModelConfig, variables: Mapping[str, Any], tokens_BT: jax.Array) -> Float[Array, "B T V"]:
    bias_LX = variables["router_bias"]["layers"]
    return zaya.forward(config, EXECUTION, variables["params"], bias_LX, tokens_BT).logits_BTV


def _relative_error(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if np.array_equal(ours, theirs, equal_nan=True):  # weights that overflow do so on both sides
        return 0.0
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), np.finfo(np.float32).tiny))


def first_different_layer(
    config: ModelConfig, one: Mapping[str, Any], other: Mapping[str, Any], tokens_BT: np.ndarray
) -> int | None:
    """The first layer, from 0, behind which the streams of two sets of weights differ; None for the head."""
    for number in range(config.num_hidden_layers):
        streams = [_stream_after(config, variables, tokens_BT, number + 1) for variables in (one, other)]
        if not np.array_equal(streams[0], streams[1], equal_nan=True):
            return number
    return None


def _stream_after(
    config: ModelConfig, variables: Mapping[str, Any], tokens_BT: np.ndarray, num_layers: int
) -> Float[Array, "B T D"]:
    """The stream behind the first layers: those of a network that has no more."""
    params = variables["params"]
    stacked = jax.tree.map(lambda weight: weight[:num_layers], params["layers"])
    if num_layers == 1:
        stacked["router"].pop("eda_scale", None)
    elif "eda_scale" in stacked["router"]:
        stacked["router"]["eda_scale"] = params["layers"]["router"]["eda_scale"][: num_layers - 1]
    cut = dataclasses.replace(config, num_hidden_layers=num_layers)
    bias_LX = variables["router_bias"]["layers"][:num_layers]
    params = params | {"layers": stacked}
    return zaya.residual_stream(cut, EXECUTION, params, bias_LX, jnp.asarray(tokens_BT)).x_BTD


def _ask_transformers(
    folder: pathlib.Path, config: ModelConfig, variables: Mapping[str, Any], tokens_BT: np.ndarray
) -> str:
    """Logits of `ZayaForCausalLM`, which reads the files by itself.

    Raises:
      ValueError: if they are not ours, naming the layer whose output is the first to be off.
    """
    import torch
    from transformers import ZayaForCausalLM

    model: Any = ZayaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    bias_LX = torch.from_numpy(np.array(variables["router_bias"]["layers"]))
    with torch.no_grad():
        for layer, bias_X in zip(model.model.layers, bias_LX, strict=True):
            # transformers 5.23 makes the skip class's bias -1 again after it has read another.
            layer.mlp.gate.balancing_biases.copy_(bias_X)
        answer = model(torch.from_numpy(tokens_BT).long(), output_hidden_states=True, use_cache=False)
    error = _relative_error(_logits(config, variables, tokens_BT), answer.logits.numpy())
    if not error < TOLERANCE:
        errors = [
            _relative_error(_stream_after(config, variables, tokens_BT, number + 1), hidden.numpy())
            # The last one that transformers gives is behind its final norm.
            for number, hidden in enumerate(answer.hidden_states[1:-1])
        ]
        layer = next((number for number, found in enumerate(errors) if found >= TOLERANCE), "the last")
        raise ValueError(
            f"transformers' logits of {folder} differ by {error:.3g} of the largest, more than {TOLERANCE}; "
            f"the first layer to differ is {layer}"
        )
    return (
        f"logits of transformers on {folder.name}: differ by {error:.3g} of the largest (limit {TOLERANCE})"
    )


def check_files(opened: WeightFolder, folder: pathlib.Path) -> str | None:
    """Holds what was written against its checksums: None, or what is wrong, as a sentence."""
    if not (folder / CHECKSUMS).is_file():
        return f"{folder} has no {CHECKSUMS}: {opened.layout} weights that were not written here"
    return check_checksums(folder)


def num_bytes(opened: WeightFolder) -> int:
    """Bytes of a folder's weights."""
    slices = weight_slices(opened.source.config)
    return sum(weight_slice.size * opened.source.dtype(weight_slice.path).itemsize for weight_slice in slices)


def num_values(opened: WeightFolder) -> int:
    """Numbers in a folder's weights, balancing biases included."""
    return sum(math.prod(weight_slice.shape) for weight_slice in weight_slices(opened.source.config))
