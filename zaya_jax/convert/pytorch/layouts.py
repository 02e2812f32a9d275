"""Names and axes of each weight in the two layouts of PyTorch weights.

"native" is the layout of transformers (5.13 and later): a layer has one number, and its experts are stacked.
"legacy" is the layout of Zyphra's first releases: attention and experts of a layer are two stages with
separate numbers, each expert is a tensor, and residual scaling belongs to the following stage.

Weights are converted in slices: one layer, one expert, or some rows of the embedding. The slices of a model
are the same for all layouts, and in every layout a tensor is a sequence of whole slices, so a conversion
needs only a few of them in memory.

Letters: those of `zaya_jax.model.weights`. "NH D" is a matrix [N*H, D]: adjacent letters are one axis. If
input and output axes have the same letter, the output is lower case.
"""

import dataclasses
import functools
import math
from typing import Literal

import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.errors import UserError
from zaya_jax.model import weights as weight_declarations

LayoutName = Literal["native", "legacy"]
EMBEDDING = "model.embed_tokens.weight"
TIED_HEAD = "lm_head.weight"
ROUTER_BIAS = "router_bias/layers"
SLICE_BYTES = 64 * 2**20
"""Maximum size of a slice of the embedding in float32."""


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """Name and axes of a weight in a layout.

    Attributes:
      name: name of the tensor, with placeholders: "{layer}" for the number of the layer, "{attention}" and
        "{moe}" for those of its stages, "{after}" for the following stage, "{expert}" for the expert. Without
        the latter, experts are stacked.
      ours: axes of our weight, without those over layers and experts.
      theirs: the same letters in the order of the layout, axes separated by spaces; 1 is an axis of size 1.
    """

    name: str
    ours: str
    theirs: str

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the layout of our weight of `shape`, for one layer and one expert."""
        # Letters that are adjacent in `theirs` are joined into one axis.
        sizes = dict(zip(self.ours, shape, strict=True)) | {"1": 1}
        return tuple(math.prod(sizes[letter] for letter in axis) for axis in self.theirs.split())

    def to_ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Our weight of `shape`, as a view of a contiguous tensor of the layout."""
        sizes = dict(zip(self.ours, shape, strict=True))
        # Joined axes are split by the reshape, then all axes are permuted.
        order = self._their_letters
        return tensor.reshape([sizes[letter] for letter in order]).transpose(
            [order.index(letter) for letter in self.ours]
        )

    def to_theirs(self, weight: np.ndarray) -> np.ndarray:
        """A view of our weight with its axes in the order of the layout, not joined."""
        return weight.transpose([self.ours.index(letter) for letter in self._their_letters])

    @functools.cached_property
    def _their_letters(self) -> list[str]:
        return [letter for letter in self.theirs if letter not in " 1"]


_RESIDUAL = {"output": "hidden_states", "residual": "residual"}


def _residual(ours: str, theirs: str) -> dict[str, TensorLayout]:
    return {
        f"layers/{ours}/{our_name}_{part}": TensorLayout(f"{theirs}.{their_name}_{part}", "D", "D")
        for our_name, their_name in _RESIDUAL.items()
        for part in ("scale", "bias")
    }


def _attention(theirs: dict[str, str]) -> dict[str, TensorLayout]:
    """Attention weights, whose axes have the same order in both layouts."""
    axes = {
        "q_proj": ("DNH", "NH D"),
        "k_proj": ("DKH", "KH D"),
        "v_proj_current": ("DU", "U D"),
        "v_proj_delayed": ("DU", "U D"),
        # torch stores convolutions as [outputs, inputs per group, taps].
        "conv_depthwise/kernel": ("IC", "C 1 I"),
        "conv_depthwise/bias": ("C", "C"),
        # One group per head: A*h outputs, and H inputs per group.
        "conv_grouped/kernel": ("AJHh", "Ah H J"),
        "conv_grouped/bias": ("C", "C"),
        "temperature": ("K", "K"),
        "o_proj": ("NHD", "D NH"),
    }
    return {
        f"layers/attention/{name}": TensorLayout(theirs[name], ours, order)
        for name, (ours, order) in axes.items()
    }


def _router(theirs: dict[str, str]) -> dict[str, TensorLayout]:
    axes = {
        "down_proj/kernel": ("DR", "R D"),
        "down_proj/bias": ("R", "R"),
        "eda_scale": ("R", "R"),
        "norm/scale": ("R", "R"),
        "fc1/kernel": ("Rr", "r R"),
        "fc1/bias": ("R", "R"),
        "fc2/kernel": ("Rr", "r R"),
        "fc2/bias": ("R", "R"),
        # torch stores linear weights as [outputs, inputs].
        "out_proj": ("RX", "X R"),
    }
    table = {
        f"layers/router/{name}": TensorLayout(theirs[name], ours, order)
        for name, (ours, order) in axes.items()
    }
    return table | {ROUTER_BIAS: TensorLayout(theirs["balancing"], "X", "X")}


_QKV = "model.layers.{layer}.self_attn.qkv_proj."
_GATE = "model.layers.{layer}.mlp.gate."

NATIVE: dict[str, TensorLayout] = {
    "embedding/table": TensorLayout(EMBEDDING, "VD", "V D"),
    "embedding/scale": TensorLayout("model.input_hidden_states_scale", "D", "D"),
    "embedding/bias": TensorLayout("model.input_hidden_states_bias", "D", "D"),
    "layers/attention_norm/scale": TensorLayout("model.layers.{layer}.input_layernorm.weight", "D", "D"),
    **_attention(
        {
            "q_proj": _QKV + "q_proj.weight",
            "k_proj": _QKV + "k_proj.weight",
            "v_proj_current": _QKV + "v_proj_current.weight",
            "v_proj_delayed": _QKV + "v_proj_delayed.weight",
            "conv_depthwise/kernel": _QKV + "conv_qk_depthwise.weight",
            "conv_depthwise/bias": _QKV + "conv_qk_depthwise.bias",
            "conv_grouped/kernel": _QKV + "conv_qk_grouped.weight",
            "conv_grouped/bias": _QKV + "conv_qk_grouped.bias",
            "temperature": "model.layers.{layer}.self_attn.qk_norm.temp",
            "o_proj": "model.layers.{layer}.self_attn.o_proj.weight",
        }
    ),
    **_residual("attention_residual", "model.layers.{layer}.post_attention_residual_scale"),
    "layers/moe_norm/scale": TensorLayout("model.layers.{layer}.post_attention_layernorm.weight", "D", "D"),
    **_router(
        {
            "down_proj/kernel": _GATE + "down_proj.weight",
            "down_proj/bias": _GATE + "down_proj.bias",
            "eda_scale": _GATE + "router_states_scale",
            "norm/scale": _GATE + "router_mlp.norm.weight",
            "fc1/kernel": _GATE + "router_mlp.fc1.weight",
            "fc1/bias": _GATE + "router_mlp.fc1.bias",
            "fc2/kernel": _GATE + "router_mlp.fc2.weight",
            "fc2/bias": _GATE + "router_mlp.fc2.bias",
            "out_proj": _GATE + "router_mlp.out_proj.weight",
            "balancing": _GATE + "balancing_biases",
        }
    ),
    "layers/experts/gate_up_proj": TensorLayout(
        "model.layers.{layer}.mlp.experts.gate_up_proj", "DQF", "QF D"
    ),
    "layers/experts/down_proj": TensorLayout("model.layers.{layer}.mlp.experts.down_proj", "FD", "D F"),
    **_residual("moe_residual", "model.layers.{layer}.post_mlp_residual_scale"),
    "final_norm/scale": TensorLayout("model.norm.weight", "D", "D"),
    "head/bias": TensorLayout("lm_head.bias", "V", "V"),
}
"""Layout of transformers, by path of our weight."""

_STAGE_A = "model.layers.{attention}."
_STAGE_M = "model.layers.{moe}."
_LEGACY_QKV = _STAGE_A + "self_attn.qkv."
_LEGACY_ROUTER = _STAGE_M + "zaya_block.router."
_LEGACY_EXPERT = _STAGE_M + "zaya_block.experts.local_experts.{expert}."

LEGACY: dict[str, TensorLayout] = {
    "embedding/table": TensorLayout(EMBEDDING, "VD", "V D"),
    "embedding/scale": TensorLayout("model.layers.0.res_scale.hidden_states_scale", "D", "D"),
    "embedding/bias": TensorLayout("model.layers.0.res_scale.hidden_states_bias", "D", "D"),
    "layers/attention_norm/scale": TensorLayout(_STAGE_A + "input_norm.weight", "D", "D"),
    **_attention(
        {
            "q_proj": _LEGACY_QKV + "linear_q.weight",
            "k_proj": _LEGACY_QKV + "linear_k.weight",
            "v_proj_current": _LEGACY_QKV + "val_proj1.weight",
            "v_proj_delayed": _LEGACY_QKV + "val_proj2.weight",
            "conv_depthwise/kernel": _LEGACY_QKV + "conv_qk.0.weight",
            "conv_depthwise/bias": _LEGACY_QKV + "conv_qk.0.bias",
            "conv_grouped/kernel": _LEGACY_QKV + "conv_qk.1.weight",
            "conv_grouped/bias": _LEGACY_QKV + "conv_qk.1.bias",
            "temperature": _LEGACY_QKV + "temp",
            "o_proj": _STAGE_A + "self_attn.o_proj.weight",
        }
    ),
    **_residual("attention_residual", _STAGE_M + "res_scale"),
    "layers/moe_norm/scale": TensorLayout(_STAGE_M + "input_norm.weight", "D", "D"),
    **_router(
        {
            "down_proj/kernel": _LEGACY_ROUTER + "down_proj.weight",
            "down_proj/bias": _LEGACY_ROUTER + "down_proj.bias",
            "eda_scale": _LEGACY_ROUTER + "router_states_scale",
            "norm/scale": _LEGACY_ROUTER + "rmsnorm_eda.weight",
            "fc1/kernel": _LEGACY_ROUTER + "router_mlp.0.weight",  # 1 and 3 are the GELUs
            "fc1/bias": _LEGACY_ROUTER + "router_mlp.0.bias",
            "fc2/kernel": _LEGACY_ROUTER + "router_mlp.2.weight",
            "fc2/bias": _LEGACY_ROUTER + "router_mlp.2.bias",
            "out_proj": _LEGACY_ROUTER + "router_mlp.4.weight",
            "balancing": _LEGACY_ROUTER + "balancing_biases",
        }
    ),
    "layers/experts/gate_up_proj": TensorLayout(_LEGACY_EXPERT + "linear_fc1.weight", "DQF", "QF D"),
    "layers/experts/down_proj": TensorLayout(_LEGACY_EXPERT + "linear_fc2.weight", "FD", "D F"),
    # Residual scaling after the last stage belongs to the model itself.
    **_residual("moe_residual", "model.{after}res_scale"),
    "final_norm/scale": TensorLayout("model.final_norm.weight", "D", "D"),
    "head/bias": TensorLayout("lm_head.bias", "V", "V"),
}
"""Layout of Zyphra's first releases ([legacy]), by path of our weight."""

LAYOUTS: dict[LayoutName, dict[str, TensorLayout]] = {"native": NATIVE, "legacy": LEGACY}


@dataclasses.dataclass(frozen=True)
class WeightSlice:
    """A part of a weight, the unit of a conversion.

    Attributes:
      path: path of the weight.
      start: layer and expert; the first row if the weight has no layers.
      shape: shape in our order of axes, without those over layers and experts.
      is_stacked: whether the weight has an axis of layers.
    """

    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    is_stacked: bool

    @property
    def index(self) -> tuple[int | slice, ...]:
        """Index of the slice in the weight."""
        return self.start if self.is_stacked else (slice(self.start[0], self.start[0] + self.shape[0]),)

    @property
    def size(self) -> int:
        """Number of values of the slice."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a layout.

    Attributes:
      name: name of the tensor.
      shape: shape of the tensor.
      layout: layout of its axes.
      slices: slices that it consists of, in the order of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    layout: TensorLayout
    slices: tuple[WeightSlice, ...]

    @property
    def path(self) -> str:
        """Path of our weight that the tensor is a part of."""
        return self.slices[0].path


@dataclasses.dataclass(frozen=True)
class OurWeight:
    """Letters and sizes of the axes of one of our weights."""

    axes: str
    shape: tuple[int, ...]

    @property
    def is_stacked(self) -> bool:
        """Whether the first axis is that of layers."""
        return self.axes[0] in "LM"

    @property
    def has_experts(self) -> bool:
        """Whether the second axis is that of experts."""
        return self.axes[:2] == "LE"


def our_weights(config: ModelConfig) -> dict[str, OurWeight]:
    """All weights of a model by path: parameters and router biases.

    Raises:
      UserError: if the layouts do not support the router.
    """
    if config.router != "mlp":
        raise UserError(f'model.router is "{config.router}"; Hugging Face supports only "mlp"')
    declared = weight_declarations.flatten_weights(weight_declarations.declare(config))
    weights = {path: OurWeight(weight.axes, weight.shape) for path, weight in declared.items()}
    return weights | {ROUTER_BIAS: OurWeight("LX", (config.num_hidden_layers, config.num_router_classes))}


def tensors_of(layout: LayoutName, config: ModelConfig) -> list[Tensor]:
    """Tensors of a model in a layout, layer by layer and without the tied head."""
    weights = our_weights(config)
    unstacked = [path for path, weight in weights.items() if not weight.is_stacked]
    stacked = [path for path, weight in weights.items() if weight.is_stacked]
    tensors = [
        tensor
        for path in unstacked
        for tensor in _tensors(LAYOUTS[layout][path], config, path, weights[path], None)
    ]
    for layer in range(config.num_hidden_layers):
        for path in stacked:
            tensors += _tensors(LAYOUTS[layout][path], config, path, weights[path], layer)
    return tensors


def _tensors(
    layout: TensorLayout, config: ModelConfig, path: str, weight: OurWeight, layer: int | None
) -> list[Tensor]:
    """Tensors of a weight, or of one layer of it; empty if that layer does not have the weight."""
    slices = layer_slices(path, weight, config.num_hidden_layers, layer)
    if not slices:
        return []
    names = {"layer": layer} | _stages(layer, config.num_hidden_layers)
    if weight.has_experts and "{expert}" in layout.name:
        return [
            Tensor(
                layout.name.format(expert=expert, **names),
                layout.their_shape(weight_slice.shape),
                layout,
                (weight_slice,),
            )
            for expert, weight_slice in enumerate(slices)
        ]
    if weight.has_experts:
        shape = (len(slices), *layout.their_shape(slices[0].shape))
    else:
        shape = layout.their_shape(weight.shape[1:] if weight.is_stacked else weight.shape)
    return [Tensor(layout.name.format(**names), shape, layout, slices)]


def _stages(layer: int | None, num_layers: int) -> dict[str, int | str]:
    if layer is None:
        return {}
    # The stage after the experts of this layer; there is none after the last layer.
    after = "" if layer + 1 == num_layers else f"layers.{2 * layer + 2}."
    return {"attention": 2 * layer, "moe": 2 * layer + 1, "after": after}


def layer_slices(path: str, weight: OurWeight, num_layers: int, layer: int | None) -> tuple[WeightSlice, ...]:
    """Slices of a weight, or of one layer of it, in order."""
    if not weight.is_stacked:
        return _row_slices(path, weight.shape)
    assert layer is not None
    row = layer - (num_layers - weight.shape[0])  # the axis M has no entry for the first layer
    if row < 0:
        return ()
    if weight.has_experts:
        return tuple(
            WeightSlice(path, (row, expert), weight.shape[2:], True) for expert in range(weight.shape[1])
        )
    return (WeightSlice(path, (row,), weight.shape[1:], True),)


def _row_slices(path: str, shape: tuple[int, ...]) -> tuple[WeightSlice, ...]:
    rows = rows_per_slice(shape)
    return tuple(
        WeightSlice(path, (start,), (min(rows, shape[0] - start), *shape[1:]), False)
        for start in range(0, shape[0], rows)
    )


def rows_per_slice(shape: tuple[int, ...]) -> int:
    """Number of rows per slice of a weight without layers, for slices of about equal size."""
    # Rounded up, so that no slice exceeds the maximum.
    parts = -(-math.prod(shape) * 4 // SLICE_BYTES)
    return -(-shape[0] // max(parts, 1))


def weight_slices(config: ModelConfig) -> list[WeightSlice]:
    """All slices of a model."""
    weights = our_weights(config)
    # Weight by weight, then layer by layer: the order does not matter here.
    layers = range(config.num_hidden_layers)
    return [
        weight_slice
        for path, weight in weights.items()
        for layer in (layers if weight.is_stacked else (None,))
        for weight_slice in layer_slices(path, weight, config.num_hidden_layers, layer)
    ]


MAX_SHOWN = 5
"""Maximum number of tensors that an error lists."""


def check_shapes(actual: dict[str, tuple], expected: dict[str, tuple], what: str) -> None:
    """Compares names and shapes with the expected ones.

    Raises:
      UserError: listing those that are missing, unknown, or have the wrong shape.
    """
    missing = [f"{name} {list(expected[name])}" for name in expected if name not in actual]
    extra = [f"{name} {list(actual[name])}" for name in actual if name not in expected]
    wrong = [
        f"{name} is {list(actual[name])} and must be {list(expected[name])}"
        for name in expected
        if name in actual and actual[name] != expected[name]
    ]
    # All problems in one message, because a wrong config usually causes several.
    problems = {"missing": missing, "unknown": extra, "of a wrong shape": wrong}
    parts = [
        f"{len(names)} {what}{'s' if len(names) > 1 else ''} {problem}: {first_of(names)}"
        for problem, names in problems.items()
        if names
    ]
    if parts:
        raise UserError("; ".join(parts))


def first_of(names: list[str]) -> str:
    """The first few names, followed by "..." if there are more."""
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")
