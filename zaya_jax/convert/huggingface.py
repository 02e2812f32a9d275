"""transformers' native ZAYA layout (5.13 and later): its config.json, and its tensors held in memory.

Everything is NumPy; neither torch nor transformers is needed. What each weight is called there, and
how its axes lie, is in `zaya_jax.convert.layouts`.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from zaya_jax.config import HYBRID, HYBRID_SLIDING, ModelConfig
from zaya_jax.convert.layouts import (
    EMBEDDING,
    ROUTER_BIAS,
    TIED_HEAD,
    check_shapes,
    our_weights,
    tensors_of,
)


def variables_from_huggingface(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Our variables from Hugging Face's tensors.

    Args:
      config: the network's.
      tensors: by their native names; of any floating type. `lm_head.weight` may be there if it
        equals the embedding.

    Returns:
      `{"params": ..., "router_bias": {"layers": [L, X]}}`, float32.

    Raises:
      ValueError: naming what is missing, unknown or of another shape than the config says.
    """
    layout = tensors_of("native", config)
    expected = {tensor.name: tensor.shape for tensor in layout}
    if TIED_HEAD in tensors:
        expected[TIED_HEAD] = expected[EMBEDDING]
    check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected, "tensor")
    if TIED_HEAD in tensors and not np.array_equal(tensors[TIED_HEAD], tensors[EMBEDDING]):
        raise ValueError(f"{TIED_HEAD} differs from {EMBEDDING}; only a tied head is modelled")
    flat = {path: np.empty(weight.shape, np.float32) for path, weight in our_weights(config).items()}
    for tensor in layout:
        ends = list(itertools.accumulate(weight_slice.size for weight_slice in tensor.slices))
        parts = np.split(tensors[tensor.name].reshape(-1), ends[:-1])
        for weight_slice, part in zip(tensor.slices, parts, strict=True):
            flat[weight_slice.path][weight_slice.index] = tensor.layout.to_ours(part, weight_slice.shape)
    return as_variables(flat)


def as_variables(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What `Zaya.apply` takes, from weights by their path."""
    params = {path: weight for path, weight in flat.items() if path != ROUTER_BIAS}
    return {
        "params": traverse_util.unflatten_dict(params, sep="/"),
        "router_bias": {"layers": flat[ROUTER_BIAS]},
    }


def by_path(config: ModelConfig, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of `Zaya.init`'s variables by their path.

    Raises:
      ValueError: naming the weights that are missing, unknown or of another shape than the config says.
    """
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(dict(variables["params"]), sep="/"))
    flat[ROUTER_BIAS] = variables["router_bias"]["layers"]
    found = {path: tuple(weight.shape) for path, weight in flat.items()}
    check_shapes(found, {path: weight.shape for path, weight in our_weights(config).items()}, "weight")
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
"""What Hugging Face's config could vary and this network does not."""

_THETA_FIELDS = {HYBRID: "rope_theta", HYBRID_SLIDING: "sliding_rope_theta"}


def config_from_huggingface(values: Mapping[str, Any]) -> ModelConfig:
    """The network that a native config.json, or `ZayaConfig.to_dict()`, describes.

    Args:
      values: fields that are absent have Hugging Face's defaults.

    Raises:
      ValueError: for what this network does not model.
    """
    check_fixed(values, _FIXED_FIELDS)
    check_count("num_experts", values.get("num_experts", ModelConfig.num_experts))
    layer_types = _layer_types(values)
    fields: dict[str, Any] = {name: values[name] for name in _SAME_FIELDS if name in values}
    fields |= _rope_from_huggingface(values, set(layer_types))
    pattern = shortest_pattern(layer_types)
    return ModelConfig.from_dict(fields | {"layer_pattern": pattern})


def check_fixed(values: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Refuses fields that are there with another value than the one that is modelled.

    Raises:
      ValueError: with the field's name.
    """
    for name, only in fixed.items():
        value = values.get(name, only)
        # To Python True is 1, and 0 is False.
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            raise ValueError(f"{name} is {value!r}; only {only!r} is modelled")


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of the `ZayaConfig` that describes the network.

    Raises:
      ValueError: if Hugging Face does not model the config.
    """
    _require_exportable(config)
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
    """Refuses what Hugging Face does not model.

    Raises:
      ValueError: naming the field.
    """
    if config.router != "mlp":
        raise ValueError(f'model.router is "{config.router}"; Hugging Face models "mlp" only')
    if config.skip_class != "zero":
        raise ValueError(f'model.skip_class is "{config.skip_class}"; Hugging Face models "zero" only')


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    num_layers = values.get("num_hidden_layers", ModelConfig.num_hidden_layers)
    check_count("num_hidden_layers", num_layers)
    layer_types = values.get("layer_types")
    if layer_types is None:
        return [HYBRID] * num_layers
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise ValueError(f"layer_types is {layer_types!r}; it must be a list of names, one for each layer")
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries; num_hidden_layers is {num_layers}")
    return layer_types


def shortest_pattern(layer_types: list[str]) -> tuple[str, ...]:
    """The shortest beginning that gives all layers when repeated; the last repetition may be cut."""

    def repeats(period: int) -> bool:
        return all(kind == layer_types[i % period] for i, kind in enumerate(layer_types))

    return tuple(layer_types[: next(p for p in range(1, len(layer_types) + 1) if repeats(p))])


MAX_COUNT = 10_000
"""Layers or experts; a broken config shall not make lists of a million million names."""


def check_count(name: str, value: Any) -> None:
    """Refuses what cannot be a number of layers or experts.

    Raises:
      ValueError: with the field's name.
    """
    if type(value) is not int or not 0 < value <= MAX_COUNT:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 to {MAX_COUNT:,}")


def _rope_from_huggingface(values: Mapping[str, Any], kinds: set[str]) -> dict[str, Any]:
    nested = values.get("rope_parameters")
    if nested is None:
        return {}
    given = {kind: _section("rope_parameters", nested).get(kind) or {} for kind in _THETA_FIELDS}
    for kind in sorted(kinds):
        _check_rope(kind, _section(f'"{kind}" in rope_parameters', given[kind]))
    # Hugging Face rotates all channels where the factor is absent.
    factors = {kind: given[kind].get("partial_rotary_factor", 1.0) for kind in sorted(kinds)}
    if any(factor != factors[min(factors)] for factor in factors.values()):
        raise ValueError(f"partial_rotary_factor differs between kinds of layers, {factors}; one is modelled")
    thetas = {
        field: given[kind]["rope_theta"]
        for kind, field in _THETA_FIELDS.items()
        if "rope_theta" in given[kind]
    }
    return thetas | {"partial_rotary_factor": factors[min(factors)]}


def _section(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; it must be a section of fields")
    return value


def _check_rope(kind: str, given: Mapping[str, Any]) -> None:
    if "rope_theta" not in given:
        raise ValueError(f'rope_parameters has no rope_theta for "{kind}" layers, of which there are some')
    rope_type = given.get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f'rope_type of "{kind}" layers is {rope_type!r}; only "default" is modelled')
