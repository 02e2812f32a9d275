"""The config.json of Zyphra's first layout, in both its forms ([legacy]).

The form of November 2025 has a list of one entry a stage for whatever differs between attention and
experts, and a layer count that nothing reads. The form of May 2026 has plain numbers. Stages alternate:
attention, experts, attention, ...; a layer of ours is two of them.
"""

from collections.abc import Mapping
from typing import Any

from zaya_jax.config import HYBRID, HYBRID_SLIDING, ModelConfig
from zaya_jax.convert.huggingface import MAX_COUNT, check_count, check_fixed, shortest_pattern

ATTENTION_STAGE = "a"
SKIP_CLASS_FIELD = "zaya_skip_class"
"""Ours: the legacy code always gives a token that skips its own input back."""

_FIXED_FIELDS = {
    "cca": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "activation_func": "swiglu",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "scale_residual_merge": True,
    "moe_router_topk": 1,
    "zaya_use_mod": True,
    "zaya_use_eda": True,
    "clamp_temp": False,  # True keeps the logarithm of the temperature
}
"""What a legacy config could vary and this network does not."""

_SAME_FIELDS = (
    "vocab_size", "hidden_size", "num_key_value_heads", "cca_time0", "cca_time1", "initializer_range",
    "lm_head_bias", "max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
"""Fields with the same name and meaning on both sides; absent ones have our defaults."""

_LIST_FIELDS = ("zaya_layers", "cca_num_q_heads", "num_query_groups_list", "ffn_hidden_size_list")
_SPELLINGS = {"zaya_layers": "smoe_layers", "zaya_mlp_expansion": "smoe_mlp_expansion",
              "rope_theta": "rotary_base"}  # fmt: skip
"""What some files of the 74B model call a field."""


def is_legacy_config(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this layout: it has fields that the native one has not."""
    own = ("zaya_mlp_expansion", "norm_epsilon", "ffn_hidden_size", *_LIST_FIELDS, *_SPELLINGS.values())
    return any(name in values for name in own)


def config_from_legacy(values: Mapping[str, Any]) -> ModelConfig:
    """The network that a legacy config.json describes.

    Args:
      values: its fields.

    Raises:
      ValueError: for what this network does not model, and for fields that contradict each other.
    """
    values = dict(values)
    for name, other in _SPELLINGS.items():
        values.setdefault(name, values.get(other))
    check_fixed(values, _FIXED_FIELDS)
    num_stages = _num_stages(values)
    layer_types, window = _layer_types(values, num_stages)
    fields = {name: values[name] for name in _SAME_FIELDS if name in values}
    fields |= {
        "num_hidden_layers": num_stages // 2,
        "num_attention_heads": _number(values, "num_attention_heads", "cca_num_q_heads", num_stages),
        "num_key_value_heads": _key_value_heads(values, num_stages),
        "head_dim": _head_dim(values),
        "moe_intermediate_size": _expert_width(values, num_stages),
        "num_experts": _num_experts(values),
        "router_hidden_size": _number(values, "zaya_mlp_expansion", "zaya_mlp_expansion", num_stages),
        "rms_norm_eps": _required(values, "norm_epsilon"),
        "rope_theta": _required(values, "rope_theta"),
        "sliding_window": window,
        "skip_class": values.get(SKIP_CLASS_FIELD, "identity"),
        "layer_pattern": shortest_pattern(layer_types),
    }
    if values.get("swa_rotary_base") is not None:
        fields["sliding_rope_theta"] = values["swa_rotary_base"]
    return ModelConfig.from_dict(fields)


def config_to_legacy(config: ModelConfig) -> dict[str, Any]:
    """The fields of a legacy config.json, in the form of plain numbers."""
    same = {name: getattr(config, name) for name in _SAME_FIELDS}
    sliding = [kind == HYBRID_SLIDING for kind in config.layer_types]
    # The legacy window counts earlier tokens only; ours counts the current one too.
    window = (config.sliding_window or 0) - 1
    stages = [entry for slides in sliding for entry in (window if slides else 0, 0)]
    if any(sliding) and window == 0:
        raise ValueError(
            "model.sliding_window is 1; the legacy layout counts earlier tokens, and 0 of them means all"
        )
    return same | _FIXED_FIELDS | {
        "num_hidden_layers": 2 * config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "ffn_hidden_size": 2 * config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "zaya_mlp_expansion": config.router_hidden_size,
        "zaya_high_prec": True,
        "residual_in_fp32": True,
        "norm_epsilon": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "swa_layers": stages if any(sliding) else None,
        "swa_rotary_base": config.sliding_rope_theta,
        SKIP_CLASS_FIELD: config.skip_class,
    }  # fmt: skip


def _num_stages(values: Mapping[str, Any]) -> int:
    """From the list of stages where there is one: beside it, num_hidden_layers is stale (120 for 80)."""
    stages = values.get("zaya_layers")
    if not stages:
        count = _required(values, "num_hidden_layers")
        check_count("num_hidden_layers", count)
        if count % 2:
            raise ValueError(f"num_hidden_layers is {count}; it counts stages, two for each layer")
        return count
    experts = stages[1::2] if isinstance(stages, list) else []
    kinds_are_right = (
        isinstance(stages, list)
        and len(stages) % 2 == 0
        and all(stage == ATTENTION_STAGE for stage in stages[::2])
        and all(type(count) is int and count == experts[0] for count in experts)
    )
    if not kinds_are_right or len(stages) > 2 * MAX_COUNT:
        raise ValueError(
            f'zaya_layers is {_short(stages)}; it must alternate between "a" and one number of experts'
        )
    return len(stages)


def _num_experts(values: Mapping[str, Any]) -> int:
    stages = values.get("zaya_layers")
    count = stages[1] if stages else _required(values, "num_experts")
    check_count("num_experts", count)
    return count


def _number(values: Mapping[str, Any], scalar: str, listed: str, num_stages: int) -> Any:
    """A number, or what all entries of its list of stages say that are not 0."""
    value = values.get(listed)
    if not isinstance(value, list):
        return _required(values, scalar)
    entries = {entry for entry in value[:num_stages] if type(entry) is int and entry != 0}
    strange = [entry for entry in value[:num_stages] if type(entry) is not int]
    # One released file has more entries than stages.
    if len(entries) != 1 or strange or len(value) < num_stages:
        raise ValueError(
            f"{listed} is {_short(value)}; its first {num_stages} entries must be 0 or one number"
        )
    return entries.pop()


def _key_value_heads(values: Mapping[str, Any], num_stages: int) -> Any:
    heads = _required(values, "num_key_value_heads")
    listed = "num_query_groups_list"
    groups = values.get("num_query_groups", heads)
    if listed in values:
        groups = _number(values, listed, listed, num_stages)
    if groups != heads:
        raise ValueError(f"num_query_groups is {groups!r} and num_key_value_heads {heads!r}; they must agree")
    return heads


def _head_dim(values: Mapping[str, Any]) -> Any:
    for name in ("head_dim", "kv_channels"):
        if values.get(name) is not None:
            return values[name]
    # The first form has no field for it; its num_attention_heads serves no other purpose.
    width, heads = _required(values, "hidden_size"), _required(values, "num_attention_heads")
    if type(width) is not int or type(heads) is not int or heads < 1 or width % heads:
        raise ValueError(f"hidden_size is {width!r}; it must be a multiple of num_attention_heads, {heads!r}")
    return width // heads


def _expert_width(values: Mapping[str, Any], num_stages: int) -> int:
    both = _number(values, "ffn_hidden_size", "ffn_hidden_size_list", num_stages)
    if type(both) is not int or both % 2:
        raise ValueError(f"ffn_hidden_size is {both!r}; it must be even: gate and up together")
    return both // 2


def _layer_types(values: Mapping[str, Any], num_stages: int) -> tuple[list[str], int | None]:
    """The kind of each layer, and the window in our counting."""
    windows = values.get("swa_layers")
    if windows is None:
        if values.get("sliding_window") is not None:
            raise ValueError(
                f"sliding_window is {values['sliding_window']!r} without swa_layers to say where"
            )
        return [HYBRID] * (num_stages // 2), None
    if not isinstance(windows, list) or len(windows) < num_stages or any(type(w) is not int for w in windows):
        raise ValueError(f"swa_layers is {_short(windows)}; it must be a list of {num_stages} whole numbers")
    sizes = {window for window in windows[:num_stages:2] if window}
    if len(sizes) > 1:
        raise ValueError(f"swa_layers has windows of {sorted(sizes)}; one size is modelled")
    layer_types = [HYBRID_SLIDING if window else HYBRID for window in windows[:num_stages:2]]
    return layer_types, sizes.pop() + 1 if sizes else None


def _required(values: Mapping[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise ValueError(f"{name} is missing; a legacy config.json must have it")
    return values[name]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
