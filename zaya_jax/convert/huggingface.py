"""Hugging Face's native ZAYA layout (transformers >= 5.23): its config.json and its tensors.

Everything is NumPy; neither torch nor transformers is needed. `TENSORS` says of every weight what
Hugging Face calls it and how its axes lie there.

Letters: those of `zaya_jax.model.weights`. "NH D" is a matrix [N*H, D]: letters that stand together
are one axis there. Of two equal axes, input and output, the output is the small letter.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from flax import traverse_util

from zaya_jax.config import HYBRID, HYBRID_SLIDING, ModelConfig
from zaya_jax.model import weights as weight_declarations

EMBEDDING = "model.embed_tokens.weight"
TIED_HEAD = "lm_head.weight"
ROUTER_BIAS = "router_bias/layers"
SHOWN = 5
"""How many wrong tensors an error names."""


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """Where a weight of ours lies in Hugging Face's layout.

    Attributes:
      name: of the tensor there; "{layer}" stands for its number if there is one for each layer.
      ours: the axes of our weight, without the one over layers.
      theirs: the same letters in Hugging Face's order. Its axes are separated by spaces; 1 is an
        axis of size one.
    """

    name: str
    ours: str
    theirs: str

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape there of our weight of `shape`, one layer's."""
        sizes = dict(zip(self.ours, shape, strict=True)) | {"1": 1}
        return tuple(int(np.prod([sizes[letter] for letter in axis])) for axis in self.theirs.split())

    def to_ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """One layer's tensor as ours of `shape`; a view."""
        sizes = dict(zip(self.ours, shape, strict=True))
        order = self._their_letters()
        return tensor.reshape([sizes[letter] for letter in order]).transpose(
            [order.index(letter) for letter in self.ours]
        )

    def to_theirs(self, weight: np.ndarray) -> np.ndarray:
        """One layer's weight as their tensor, contiguous: safetensors writes memory as it lies."""
        swapped = weight.transpose([self.ours.index(letter) for letter in self._their_letters()])
        return np.ascontiguousarray(swapped.reshape(self.their_shape(weight.shape)))

    def _their_letters(self) -> list[str]:
        return [letter for letter in self.theirs if letter not in " 1"]


def _residual(ours: str, theirs: str) -> dict[str, TensorLayout]:
    names = {"output": "hidden_states", "residual": "residual"}
    return {
        f"layers/{ours}/{our_name}_{part}": TensorLayout(
            f"model.layers.{{layer}}.{theirs}.{their_name}_{part}", "D", "D"
        )
        for our_name, their_name in names.items()
        for part in ("scale", "bias")
    }


_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."

TENSORS: dict[str, TensorLayout] = {
    "embedding/table": TensorLayout(EMBEDDING, "VD", "V D"),
    "embedding/scale": TensorLayout("model.input_hidden_states_scale", "D", "D"),
    "embedding/bias": TensorLayout("model.input_hidden_states_bias", "D", "D"),
    "layers/attention_norm/scale": TensorLayout("model.layers.{layer}.input_layernorm.weight", "D", "D"),
    "layers/attention/q_proj": TensorLayout(_ATTENTION + "qkv_proj.q_proj.weight", "DNH", "NH D"),
    "layers/attention/k_proj": TensorLayout(_ATTENTION + "qkv_proj.k_proj.weight", "DKH", "KH D"),
    "layers/attention/v_proj_current": TensorLayout(
        _ATTENTION + "qkv_proj.v_proj_current.weight", "DU", "U D"
    ),
    "layers/attention/v_proj_delayed": TensorLayout(
        _ATTENTION + "qkv_proj.v_proj_delayed.weight", "DU", "U D"
    ),
    "layers/attention/conv_depthwise/kernel": TensorLayout(
        _ATTENTION + "qkv_proj.conv_qk_depthwise.weight", "IC", "C 1 I"
    ),
    "layers/attention/conv_depthwise/bias": TensorLayout(
        _ATTENTION + "qkv_proj.conv_qk_depthwise.bias", "C", "C"
    ),
    "layers/attention/conv_grouped/kernel": TensorLayout(
        _ATTENTION + "qkv_proj.conv_qk_grouped.weight", "AJHh", "Ah H J"
    ),
    "layers/attention/conv_grouped/bias": TensorLayout(
        _ATTENTION + "qkv_proj.conv_qk_grouped.bias", "C", "C"
    ),
    "layers/attention/temperature": TensorLayout(_ATTENTION + "qk_norm.temp", "K", "K"),
    "layers/attention/o_proj": TensorLayout(_ATTENTION + "o_proj.weight", "NHD", "D NH"),
    **_residual("attention_residual", "post_attention_residual_scale"),
    "layers/moe_norm/scale": TensorLayout("model.layers.{layer}.post_attention_layernorm.weight", "D", "D"),
    "layers/router/down_proj/kernel": TensorLayout(_MLP + "gate.down_proj.weight", "DR", "R D"),
    "layers/router/down_proj/bias": TensorLayout(_MLP + "gate.down_proj.bias", "R", "R"),
    "layers/router/eda_scale": TensorLayout(_MLP + "gate.router_states_scale", "R", "R"),
    "layers/router/norm/scale": TensorLayout(_MLP + "gate.router_mlp.norm.weight", "R", "R"),
    "layers/router/fc1/kernel": TensorLayout(_MLP + "gate.router_mlp.fc1.weight", "Rr", "r R"),
    "layers/router/fc1/bias": TensorLayout(_MLP + "gate.router_mlp.fc1.bias", "R", "R"),
    "layers/router/fc2/kernel": TensorLayout(_MLP + "gate.router_mlp.fc2.weight", "Rr", "r R"),
    "layers/router/fc2/bias": TensorLayout(_MLP + "gate.router_mlp.fc2.bias", "R", "R"),
    "layers/router/out_proj": TensorLayout(_MLP + "gate.router_mlp.out_proj.weight", "RX", "X R"),
    ROUTER_BIAS: TensorLayout(_MLP + "gate.balancing_biases", "X", "X"),
    "layers/experts/gate_up_proj": TensorLayout(_MLP + "experts.gate_up_proj", "EDQF", "E QF D"),
    "layers/experts/down_proj": TensorLayout(_MLP + "experts.down_proj", "EFD", "E D F"),
    **_residual("moe_residual", "post_mlp_residual_scale"),
    "final_norm/scale": TensorLayout("model.norm.weight", "D", "D"),
    "head/bias": TensorLayout("lm_head.bias", "V", "V"),
}
"""Our path to their layout."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A weight of a given config: the table's row, its shape, and the names of its tensors."""

    layout: TensorLayout
    shape: tuple[int, ...]
    names: tuple[str, ...]
    """One for each index of the leading axis, or the only one."""
    stacked: bool

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape


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
    entries = _entries(config)
    expected = _their_shapes(entries)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if TIED_HEAD in found:
        expected[TIED_HEAD] = expected[EMBEDDING]
    _check_shapes(found, expected, "tensor")
    if TIED_HEAD in found and not np.array_equal(tensors[TIED_HEAD], tensors[EMBEDDING]):
        raise ValueError(f"{TIED_HEAD} differs from {EMBEDDING}; only a tied head is modelled")
    flat = {path: _stack(entry, tensors) for path, entry in entries.items()}
    router_bias = {"layers": flat.pop(ROUTER_BIAS)}
    return {"params": traverse_util.unflatten_dict(flat, sep="/"), "router_bias": router_bias}


def variables_to_huggingface(config: ModelConfig, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Hugging Face's tensors from our variables, without the tied `lm_head.weight`.

    Args:
      config: the network's.
      variables: as `Zaya.init` returns them, JAX or NumPy arrays.

    Returns:
      Contiguous arrays of the type that they have here, by their native names.

    Raises:
      ValueError: if Hugging Face does not model the config, or naming the weights that are missing,
        unknown or of another shape than the config says.
    """
    _require_exportable(config)
    entries = _entries(config)
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(dict(variables["params"]), sep="/"))
    flat[ROUTER_BIAS] = variables["router_bias"]["layers"]
    found = {path: tuple(weight.shape) for path, weight in flat.items()}
    _check_shapes(found, {path: entry.shape for path, entry in entries.items()}, "weight")
    tensors = {}
    for path, entry in entries.items():
        weight = np.asarray(flat[path])
        layers = weight if entry.stacked else weight[None]
        tensors |= {
            name: entry.layout.to_theirs(layer) for name, layer in zip(entry.names, layers, strict=True)
        }
    return tensors


def _entries(config: ModelConfig) -> dict[str, _Entry]:
    """The rows of the table that a network has, by our path."""
    if config.router != "mlp":
        raise ValueError(f'model.router is "{config.router}"; Hugging Face\'s layout knows "mlp" only')
    declared = weight_declarations.flatten(weight_declarations.declare(config))
    axes_and_shapes = {path: (weight.axes, weight.shape) for path, weight in declared.items()}
    axes_and_shapes[ROUTER_BIAS] = ("LX", (config.num_hidden_layers, config.num_router_classes))
    return {
        path: _entry(config, TENSORS[path], axes, shape) for path, (axes, shape) in axes_and_shapes.items()
    }


def _entry(config: ModelConfig, layout: TensorLayout, axes: str, shape: tuple[int, ...]) -> _Entry:
    if axes[0] not in "LM":
        return _Entry(layout, shape, (layout.name,), stacked=False)
    num_layers = config.num_hidden_layers
    layers = range(num_layers - shape[0], num_layers)  # M counts the layers behind the first
    return _Entry(layout, shape, tuple(layout.name.format(layer=layer) for layer in layers), stacked=True)


def _stack(entry: _Entry, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    layers = [entry.layout.to_ours(tensors[name], entry.layer_shape) for name in entry.names]
    return np.stack(layers, dtype=np.float32) if entry.stacked else np.array(layers[0], np.float32, order="C")


def _their_shapes(entries: Mapping[str, _Entry]) -> dict[str, tuple[int, ...]]:
    return {
        name: entry.layout.their_shape(entry.layer_shape)
        for entry in entries.values()
        for name in entry.names
    }


def _check_shapes(found: Mapping[str, tuple], expected: Mapping[str, tuple], what: str) -> None:
    missing = [f"{name} {list(expected[name])}" for name in expected if name not in found]
    extra = [f"{name} {list(found[name])}" for name in found if name not in expected]
    wrong = [
        f"{name} is {list(found[name])} and must be {list(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    problems = {"missing": missing, "unknown": extra, "of a wrong shape": wrong}
    parts = [
        f"{len(names)} {what}{'s' if len(names) > 1 else ''} {problem}: {_first(names)}"
        for problem, names in problems.items()
        if names
    ]
    if parts:
        raise ValueError("; ".join(parts))


def _first(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


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


def config_from_huggingface(
    values: Mapping[str, Any], *, dtype: Literal["float32", "bfloat16"] = "float32"
) -> ModelConfig:
    """The network that a native config.json, or `ZayaConfig.to_dict()`, describes.

    Args:
      values: fields that are absent have Hugging Face's defaults.
      dtype: of the activations; the weights' own type in the file does not matter.

    Raises:
      ValueError: for what this network does not model.
    """
    for name, only in _FIXED_FIELDS.items():
        if values.get(name, only) != only:
            raise ValueError(f"{name} is {values[name]!r}; only {only!r} is modelled")
    layer_types = _layer_types(values)
    fields: dict[str, Any] = {name: values[name] for name in _SAME_FIELDS if name in values}
    fields |= _rope_from_huggingface(values, set(layer_types))
    return ModelConfig(**fields, layer_pattern=_shortest_pattern(layer_types), dtype=dtype)


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
    if config.router != "mlp":
        raise ValueError(f'model.router is "{config.router}"; Hugging Face models "mlp" only')
    if config.skip_class != "zero":
        raise ValueError(f'model.skip_class is "{config.skip_class}"; Hugging Face models "zero" only')


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    num_layers = values.get("num_hidden_layers", ModelConfig.num_hidden_layers)
    layer_types = values.get("layer_types")
    layer_types = [HYBRID] * num_layers if layer_types is None else list(layer_types)
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries; num_hidden_layers is {num_layers}")
    return layer_types


def _shortest_pattern(layer_types: list[str]) -> tuple[str, ...]:
    """The shortest beginning that gives all layers when repeated; the last repetition may be cut."""

    def repeats(period: int) -> bool:
        return all(kind == layer_types[i % period] for i, kind in enumerate(layer_types))

    return tuple(layer_types[: next(p for p in range(1, len(layer_types) + 1) if repeats(p))])


def _rope_from_huggingface(values: Mapping[str, Any], kinds: set[str]) -> dict[str, Any]:
    nested = values.get("rope_parameters")
    if nested is None:
        return {}
    given = {kind: nested.get(kind) or {} for kind in _THETA_FIELDS}
    for kind in sorted(kinds):
        _check_rope(kind, given[kind])
    # Hugging Face rotates all channels where the factor is absent.
    factors = {kind: given[kind].get("partial_rotary_factor", 1.0) for kind in sorted(kinds)}
    if len(set(factors.values())) > 1:
        raise ValueError(f"partial_rotary_factor differs between kinds of layers, {factors}; one is modelled")
    thetas = {
        field: float(given[kind]["rope_theta"])
        for kind, field in _THETA_FIELDS.items()
        if "rope_theta" in given[kind]
    }
    return thetas | {"partial_rotary_factor": factors[min(factors)]}


def _check_rope(kind: str, given: Mapping[str, Any]) -> None:
    if "rope_theta" not in given:
        raise ValueError(f'rope_parameters has no rope_theta for "{kind}" layers, of which there are some')
    rope_type = given.get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f'rope_type of "{kind}" layers is {rope_type!r}; only "default" is modelled')
