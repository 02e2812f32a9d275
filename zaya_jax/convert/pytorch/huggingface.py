"""The native ZAYA layout of transformers (5.13 and later): config.json, and tensors in memory.

It uses NumPy only, neither torch nor transformers. Names and axes of tensors are in
`zaya_jax.convert.pytorch.layouts`.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from zaya_jax.config import HYBRID, HYBRID_SLIDING, ModelConfig
from zaya_jax.convert.pytorch.layouts import (
    EMBEDDING,
    ROUTER_BIAS,
    TIED_HEAD,
    check_shapes,
    our_weights,
    tensors_of,
)
from zaya_jax.errors import UserError


def variables_from_huggingface(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Converts Hugging Face's tensors to variables.

    Args:
      config: architecture.
      tensors: tensors by native name, of any floating-point type. `lm_head.weight` may be included if it
        equals the embedding.

    Returns:
      `{"params": ..., "router_bias": {"layers": [L, X]}}`, float32.

    Raises:
      UserError: if tensors are missing, unknown, or have the wrong shape.
    """
    # Same slices as in a conversion, so there is one definition of the layout.
    layout = tensors_of("native", config)
    expected = {tensor.name: tensor.shape for tensor in layout}
    if TIED_HEAD in tensors:
        expected[TIED_HEAD] = expected[EMBEDDING]
    check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected, "tensor")
    if TIED_HEAD in tensors and not np.array_equal(tensors[TIED_HEAD], tensors[EMBEDDING]):
        raise UserError(f"{TIED_HEAD} differs from {EMBEDDING}; only a tied head is supported")
    flat = {path: np.empty(weight.shape, np.float32) for path, weight in our_weights(config).items()}
    for tensor in layout:
        ends = list(itertools.accumulate(weight_slice.size for weight_slice in tensor.slices))
        parts = np.split(tensors[tensor.name].reshape(-1), ends[:-1])
        for weight_slice, part in zip(tensor.slices, parts, strict=True):
            flat[weight_slice.path][weight_slice.index] = tensor.layout.to_ours(part, weight_slice.shape)
    return as_variables(flat)


def as_variables(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of `Zaya.apply` from weights by path."""
    # Router biases are a separate variable collection, without gradients.
    params = {path: weight for path, weight in flat.items() if path != ROUTER_BIAS}
    return {
        "params": traverse_util.unflatten_dict(params, sep="/"),
        "router_bias": {"layers": flat[ROUTER_BIAS]},
    }


def by_path(config: ModelConfig, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by path, from variables of `Zaya.init`.

    Raises:
      UserError: if weights are missing, unknown, or have the wrong shape.
    """
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(dict(variables["params"]), sep="/"))
    flat[ROUTER_BIAS] = variables["router_bias"]["layers"]
    shapes = {path: tuple(weight.shape) for path, weight in flat.items()}
    check_shapes(shapes, {path: weight.shape for path, weight in our_weights(config).items()}, "weight")
    return flat


_SAME_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "cca_time0", "cca_time1", "sliding_window", "moe_intermediate_size", "num_experts",
    "router_hidden_size", "rms_norm_eps", "initializer_range", "lm_head_bias", "max_position_embeddings",
)  # fmt: skip
"""Fields with the same name, meaning and default on both sides."""

_FIXED_FIELDS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "num_experts_per_tok": 1,
}
"""Fields of Hugging Face's config for which only one value is supported."""

_NEUTRAL = re.compile("scal|factor|multiplier")
"""Part of the names of fields that have no effect if they are 1."""
NATIVE_FIELDS = frozenset((*_SAME_FIELDS, *_FIXED_FIELDS, "layer_types", "rope_parameters"))
"""All fields of a native config.json that are read."""
_ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_THETA_FIELDS = {HYBRID: "rope_theta", HYBRID_SLIDING: "sliding_rope_theta"}


def config_from_huggingface(values: Mapping[str, Any]) -> ModelConfig:
    """The architecture of a native config.json or of `ZayaConfig.to_dict()`.

    Args:
      values: fields of the config; missing ones have Hugging Face's defaults.

    Raises:
      UserError: if the architecture is not supported.
    """
    check_fixed(values, _FIXED_FIELDS)
    # Checked before lists of tensors are built from it.
    check_count("num_experts", values.get("num_experts", ModelConfig.num_experts))
    layer_types = _layer_types(values)
    fields: dict[str, Any] = {name: values[name] for name in _SAME_FIELDS if name in values}
    fields |= _rope_from_huggingface(values, set(layer_types))
    # Hugging Face lists the type of each layer; our config has a repeated pattern.
    pattern = shortest_pattern(layer_types)
    return ModelConfig.from_dict(fields | {"layer_pattern": pattern})


def check_fixed(values: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Checks fields for which only one value is supported; missing fields are valid.

    Raises:
      UserError: for another value; the message names the field.
    """
    for name, only in fixed.items():
        value = values.get(name, only)
        # In Python, True == 1 and False == 0.
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            raise UserError(f"{name} is {value!r}; only {only!r} is supported")


def is_off(name: str, value: Any) -> bool:
    """Whether the value of a field disables its feature."""
    # In Python, bool is a subclass of int.
    # A scale of 1 has no effect, and neither has one of 0, which means "off" in some configs.
    if isinstance(value, int | float) and not isinstance(value, bool) and _NEUTRAL.search(name.lower()):
        return value in (0, 1)
    return value is None or value is False or value in (0, "", "default") or value in ([], {})


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """Fields of the `ZayaConfig` of an architecture.

    Raises:
      UserError: if Hugging Face does not support the architecture.
    """
    _require_exportable(config)
    # transformers requires parameters for both types of layers, even if one is not used.
    rope = {
        kind: {
            "rope_type": "default",
            "rope_theta": getattr(config, field),
            "partial_rotary_factor": config.partial_rotary_factor,
        }
        for kind, field in _THETA_FIELDS.items()
    }
    same = {name: getattr(config, name) for name in _SAME_FIELDS}
    return same | _FIXED_FIELDS | {"layer_types": list(config.layer_types), "rope_parameters": rope}


def _require_exportable(config: ModelConfig) -> None:
    """Checks that Hugging Face supports an architecture.

    Raises:
      UserError: if it does not; the message names the field.
    """
    if config.router != "mlp":
        raise UserError(f'model.router is "{config.router}"; Hugging Face supports only "mlp"')
    if config.skip_class != "zero":
        raise UserError(f'model.skip_class is "{config.skip_class}"; Hugging Face supports only "zero"')


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    num_layers = values.get("num_hidden_layers", ModelConfig.num_hidden_layers)
    check_count("num_hidden_layers", num_layers)
    layer_types = values.get("layer_types")
    # Older configs have no layer types; all layers then attend to everything.
    if layer_types is None:
        return [HYBRID] * num_layers
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise UserError(f"layer_types is {layer_types!r}; it must be a list of names, one for each layer")
    if len(layer_types) != num_layers:
        raise UserError(
            f"layer_types has {len(layer_types)} entries; it must have num_hidden_layers, {num_layers}"
        )
    return layer_types


def shortest_pattern(layer_types: list[str]) -> tuple[str, ...]:
    """The shortest prefix that yields all layers when repeated; the last repetition may be incomplete."""
    # border[i] is the length of the longest proper prefix of the first i + 1 entries that is also a suffix of
    # them (Knuth, Morris and Pratt). Trying each length would take quadratic time.
    border, length = [0] * len(layer_types), 0
    for i in range(1, len(layer_types)):
        while length and layer_types[i] != layer_types[length]:
            length = border[length - 1]
        length += layer_types[i] == layer_types[length]
        border[i] = length
    return tuple(layer_types[: len(layer_types) - border[-1]])


MAX_COUNT = 10_000
"""Maximum number of layers or experts; a hostile config must not create huge lists of names."""


def check_count(name: str, value: Any) -> None:
    """Checks a number of layers or experts.

    Raises:
      UserError: if it is invalid; the message names the field.
    """
    if type(value) is not int or not 0 < value <= MAX_COUNT:
        raise UserError(f"{name} is {value!r}; it must be an integer from 1 to {MAX_COUNT:,}")


def _rope_from_huggingface(values: Mapping[str, Any], kinds: set[str]) -> dict[str, Any]:
    nested = values.get("rope_parameters")
    if nested is None:
        return {}
    # Parameters of unused layer types may be missing.
    given = {kind: _section("rope_parameters", nested).get(kind) or {} for kind in _THETA_FIELDS}
    for kind in sorted(kinds):
        _check_rope(kind, _section(f'"{kind}" in rope_parameters', given[kind]))
    # Without the factor, Hugging Face rotates all channels.
    factors = {kind: given[kind].get("partial_rotary_factor", 1.0) for kind in sorted(kinds)}
    if any(factor != factors[min(factors)] for factor in factors.values()):
        raise UserError(
            f"partial_rotary_factor differs between types of layers, {factors}; they must be equal"
        )
    # Absent values keep our defaults.
    thetas = {
        field: given[kind]["rope_theta"]
        for kind, field in _THETA_FIELDS.items()
        if "rope_theta" in given[kind]
    }
    return thetas | {"partial_rotary_factor": factors[min(factors)]}


def _section(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}; it must be a section of fields")
    return value


def _check_rope(kind: str, given: Mapping[str, Any]) -> None:
    if "rope_theta" not in given:
        raise UserError(f'rope_parameters has no rope_theta for "{kind}" layers, which the model has')
    for field in ("rope_type", "type"):  # the latter is an older spelling
        if (rope_type := given.get(field) or "default") != "default":
            raise UserError(f'{field} of "{kind}" layers is {rope_type!r}; only "default" is supported')
    for name, value in given.items():
        if name not in _ROPE_FIELDS and not is_off(name, value):
            raise UserError(
                f'{name} of "{kind}" layers in rope_parameters is {value!r:.80}; only unscaled rotary '
                "positions are supported"
            )
