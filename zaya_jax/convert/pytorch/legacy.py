"""config.json of Zyphra's first layout, in both of its versions ([legacy]).

The version of November 2025 has lists with one entry per stage for everything that differs between attention
and experts, and a number of layers that no code reads. The version of May 2026 has plain numbers. Stages
alternate between attention and experts; one of our layers is two stages.
"""

from collections.abc import Mapping
from typing import Any

from zaya_jax.config import HYBRID, HYBRID_SLIDING, ModelConfig
from zaya_jax.convert.pytorch.huggingface import MAX_COUNT, check_count, check_fixed, shortest_pattern
from zaya_jax.errors import UserError

ATTENTION_STAGE = "a"
SKIP_CLASS_FIELD = "zaya_skip_class"
"""Our own field: the legacy code always returns the input of a token that skips."""

FIXED_FIELDS = {
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
"""Fields of a legacy config for which only one value is supported."""

_SAME_FIELDS = (
    "vocab_size", "hidden_size", "num_key_value_heads", "cca_time0", "cca_time1", "initializer_range",
    "lm_head_bias", "max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
"""Fields with the same name and meaning on both sides; absent ones have our defaults."""

_LIST_FIELDS = ("zaya_layers", "cca_num_q_heads", "num_query_groups_list", "ffn_hidden_size_list")
_SPELLINGS = {"zaya_layers": "smoe_layers", "zaya_mlp_expansion": "smoe_mlp_expansion",
              "zaya_use_mod": "smoe_use_mod", "zaya_use_eda": "smoe_use_eda",
              "rope_theta": "rotary_base", "partial_rotary_factor": "rope_pct"}  # fmt: skip
"""Other names of fields, in some files of the 74B model."""
LEGACY_FIELDS = frozenset((
    *FIXED_FIELDS, *_SAME_FIELDS, *_LIST_FIELDS, *_SPELLINGS, *_SPELLINGS.values(), SKIP_CLASS_FIELD,
    "num_hidden_layers", "num_attention_heads", "num_attention_heads_list", "num_query_groups", "head_dim",
    "kv_channels", "ffn_hidden_size", "num_experts", "norm_epsilon", "swa_layers", "swa_rotary_base",
    "sliding_window",
))  # fmt: skip
"""All fields of a legacy config.json that are read."""


def is_legacy_config(values: Mapping[str, Any]) -> bool:
    """Whether a config.json has this layout: it has fields that the native one does not have."""
    own = ("zaya_mlp_expansion", "norm_epsilon", "ffn_hidden_size", *_LIST_FIELDS, *_SPELLINGS.values())
    return any(name in values for name in own)


def config_from_legacy(values: Mapping[str, Any]) -> ModelConfig:
    """The architecture of a legacy config.json.

    Args:
      values: fields of the config.

    Raises:
      UserError: if the architecture is not supported, or fields are inconsistent.
    """
    values = dict(values)
    # Normalizes names, so that the rest of this module knows only one of them.
    for name, other in _SPELLINGS.items():
        if other in values:
            values.setdefault(name, values[other])
    check_fixed(values, FIXED_FIELDS)
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
        # Legacy code has no field for it, and always implements "identity".
        "skip_class": values.get(SKIP_CLASS_FIELD, "identity"),
        "layer_pattern": shortest_pattern(layer_types),
    }
    # Only models with sliding layers have this field.
    if values.get("swa_rotary_base") is not None:
        fields["sliding_rope_theta"] = values["swa_rotary_base"]
    return ModelConfig.from_dict(fields)


def config_to_legacy(config: ModelConfig) -> dict[str, Any]:
    """Fields of a legacy config.json, in the version with plain numbers."""
    same = {name: getattr(config, name) for name in _SAME_FIELDS}
    sliding = [kind == HYBRID_SLIDING for kind in config.layer_types]
    # The legacy window counts only earlier tokens; ours also counts the current one.
    window = (config.sliding_window or 0) - 1
    # One entry per stage; those of experts are 0.
    stages = [entry for slides in sliding for entry in (window if slides else 0, 0)]
    if any(sliding) and window == 0:
        raise UserError(
            "model.sliding_window is 1; the legacy layout cannot express it, because its window counts "
            "earlier tokens and 0 means no window"
        )
    return same | FIXED_FIELDS | {
        # The legacy code counts stages as layers.
        "num_hidden_layers": 2 * config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "head_dim": config.head_dim,
        # The legacy width covers gate and up together.
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
    """Number of stages: the length of the list if there is one, because num_hidden_layers is then stale."""
    stages = values.get("zaya_layers")
    if not stages:
        count = _required(values, "num_hidden_layers")
        check_count("num_hidden_layers", count)
        if count % 2:
            raise UserError(
                f"num_hidden_layers is {count}; it must be even, because it counts two stages per layer"
            )
        return count
    experts = stages[1::2] if isinstance(stages, list) else []
    # Attention at even positions, and the same number of experts at all odd ones.
    kinds_are_right = (
        isinstance(stages, list)
        and len(stages) % 2 == 0
        and all(stage == ATTENTION_STAGE for stage in stages[::2])
        and all(type(count) is int and count == experts[0] for count in experts)
    )
    if not kinds_are_right or len(stages) > 2 * MAX_COUNT:
        raise UserError(
            f'zaya_layers is {_short(stages)}; it must alternate between "a" and a number of experts'
        )
    return len(stages)


def _num_experts(values: Mapping[str, Any]) -> int:
    stages = values.get("zaya_layers")
    # The second stage is the first one with experts.
    count = stages[1] if stages else _required(values, "num_experts")
    check_count("num_experts", count)
    return count


def _number(values: Mapping[str, Any], scalar: str, listed: str, num_stages: int) -> Any:
    """A number: the field itself, or the common value of the nonzero entries of its list of stages."""
    value = values.get(listed)
    if not isinstance(value, list):
        return _required(values, scalar)
    # 0 marks stages that the number does not apply to.
    entries = {entry for entry in value[:num_stages] if type(entry) is int and entry != 0}
    invalid = [entry for entry in value[:num_stages] if type(entry) is not int]
    # One released file has more entries than stages, so a longer list is valid.
    if len(entries) != 1 or invalid or len(value) < num_stages:
        raise UserError(
            f"{listed} is {_short(value)}; its first {num_stages} entries must be 0 or the same number"
        )
    return entries.pop()


def _key_value_heads(values: Mapping[str, Any], num_stages: int) -> Any:
    heads = _required(values, "num_key_value_heads")
    listed = "num_query_groups_list"
    # Two names for the same number; both versions have at least one.
    groups = values.get("num_query_groups", heads)
    if listed in values:
        groups = _number(values, listed, listed, num_stages)
    if groups != heads:
        raise UserError(
            f"num_query_groups is {groups!r} and num_key_value_heads {heads!r}; they must be equal"
        )
    return heads


def _head_dim(values: Mapping[str, Any]) -> Any:
    for name in ("head_dim", "kv_channels"):
        if values.get(name) is not None:
            return values[name]
    # The first version has no field for it, and uses num_attention_heads for nothing else.
    width, heads = _required(values, "hidden_size"), _required(values, "num_attention_heads")
    if type(width) is not int or type(heads) is not int or heads < 1 or width % heads:
        raise UserError(f"hidden_size is {width!r}; it must be a multiple of num_attention_heads, {heads!r}")
    return width // heads


def _expert_width(values: Mapping[str, Any], num_stages: int) -> int:
    both = _number(values, "ffn_hidden_size", "ffn_hidden_size_list", num_stages)
    if type(both) is not int or both % 2:
        raise UserError(f"ffn_hidden_size is {both!r}; it must be even, because it is the sum of gate and up")
    return both // 2


def _layer_types(values: Mapping[str, Any], num_stages: int) -> tuple[list[str], int | None]:
    """Type of each layer, and the window including the current token."""
    windows = values.get("swa_layers")
    if windows is None:
        if values.get("sliding_window") is not None:
            raise UserError(
                f"sliding_window is {values['sliding_window']!r} without swa_layers; add swa_layers"
            )
        return [HYBRID] * (num_stages // 2), None
    if not isinstance(windows, list) or len(windows) < num_stages or any(type(w) is not int for w in windows):
        raise UserError(f"swa_layers is {_short(windows)}; it must be a list of {num_stages} integers")
    # Even positions are attention stages.
    sizes = {window for window in windows[:num_stages:2] if window}
    if len(sizes) > 1:
        raise UserError(f"swa_layers has windows of {sorted(sizes)}; they must be equal")
    layer_types = [HYBRID_SLIDING if window else HYBRID for window in windows[:num_stages:2]]
    return layer_types, sizes.pop() + 1 if sizes else None


def _required(values: Mapping[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise UserError(f"{name} is missing; a legacy config.json must have it")
    return values[name]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
