"""Fields of a config.json that are rejected, reported, or ignored, in both layouts."""

import time

import pytest

from zaya_jax.config import ModelConfig
from zaya_jax.convert.pytorch.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    shortest_pattern,
)
from zaya_jax.convert.pytorch.legacy import config_from_legacy, config_to_legacy
from zaya_jax.convert.pytorch.network_fields import unread_fields

NATIVE, LEGACY = config_to_huggingface(ModelConfig()), config_to_legacy(ModelConfig())
READ = {"native": config_from_huggingface, "legacy": config_from_legacy}
VALUES = {"native": NATIVE, "legacy": LEGACY}
RELEASED_LEGACY = {  # fields of Zyphra/ZAYA1-8B in May 2026 other than its sizes
    "activation_func_fp8_input_store": False, "architectures": ["ZayaForCausalLM"], "cca": True,
    "bias_activation_fusion": True,
    "dtype": "bfloat16", "kv_channels": 128, "mamba_cache_dtype": "float32", "residual_in_fp32": True,
    "rope_scaling": False, "sliding_window": None, "transformers_version": "4.57.1", "use_cache": True,
    "apply_rope_fusion": True, "fused_add_norm": False,
}  # fmt: skip


def read(layout, **fields):
    values = VALUES[layout] | fields
    READ[layout](values)
    return unread_fields(values, layout)


@pytest.mark.parametrize("layout", VALUES)
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "dynamic"}},
        {"rope_scaling": {"factor": 4.0}},
        {"rope_scaling": True},
        {"rope_scaling": "yarn"},
        {"rope_scaling": {"hybrid": {"rope_type": "yarn", "factor": 4.0}}},
        {"rope_parameters": {**NATIVE["rope_parameters"], "rope_type": "yarn", "factor": 4.0}},
        {"use_rope_scaling": True},
        {"attn_logit_softcapping": 30.0},
        {"final_logit_softcapping": 50.0},
        {"logits_scaling": 8.0},
        {"residual_multiplier": 0.22},
        {"num_nextn_predict_layers": 1},
        {"use_qk_norm": True},
        {"attention_sink": True},
        {"n_shared_experts": 1},
        {"num_experts_per_tok": 2},
        {"clamp_temp": True},
        {"lora_rank": 8},
        {"normalization": "LayerNorm"},
    ],
    ids=str,
)
def test_fields_that_change_the_model_are_rejected(layout, fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"^{name} is "):
        read(layout, **fields)


@pytest.mark.parametrize("kind", ["hybrid", "hybrid_sliding"])
@pytest.mark.parametrize(
    "more", [{"type": "yarn"}, {"factor": 4.0}, {"mrope_section": [1, 2]}, {"rope_type": "yarn"}]
)
def test_scaled_positions_of_used_layer_types_are_rejected(kind, more):
    rope = {**NATIVE["rope_parameters"]}
    rope[kind] = {**rope[kind], **more}
    fields = {"layer_types": ["hybrid", "hybrid_sliding"] * 20, "sliding_window": 8, "rope_parameters": rope}
    with pytest.raises(ValueError, match=f'of "{kind}" layers'):
        read("native", **fields)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("native", {}),
        ("legacy", {}),
        ("legacy", RELEASED_LEGACY),
        ("native", {"rope_scaling": None}),
        (
            "native",
            {"rope_scaling": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}},
        ),
        ("native", {"rope_scaling": {"type": "default", "factor": 1.0}}),
        # As on the hub: https://huggingface.co/Zyphra/ZAYA1-8B/discussions/19
        ("native", {"rope_parameters": {**NATIVE["rope_parameters"], "rope_type": "default"}}),
        (
            "native",
            {"attn_logit_softcapping": None, "logits_scaling": 1.0, "use_qk_norm": False, "lora_rank": 0},
        ),
        ("native", {"cca": True, "zaya_use_mod": True, "clamp_temp": False, "moe_router_topk": 1}),
        (
            "native",
            {"id2label": {"0": "LABEL_0"}, "temperature": 0.6, "top_p": 0.95, "_attn_implementation": "sdpa"},
        ),
        ("legacy", {"smoe_mod_per": 0.0, "smoe_inhibitory": False, "smoe_use_mod": True, "ar_threshold": 1}),
    ],
)
def test_fields_without_effect_are_ignored(layout, fields):
    assert read(layout, **fields) == ()


def test_other_fields_are_reported():
    assert read("native", trained_by="x", chat_template_version=2) == (
        "trained_by = 'x'",
        "chat_template_version = 2",
    )
    assert read("native", rope_theta=1e6) == ("rope_theta = 1000000.0",)


def test_a_legacy_spelling_of_the_rotated_share():
    values = {name: value for name, value in LEGACY.items() if name != "partial_rotary_factor"}
    assert config_from_legacy(values | {"rope_pct": 0.25}).partial_rotary_factor == 0.25


def slow_pattern(kinds):
    """The reference: tries each length."""
    lengths = range(1, len(kinds) + 1)
    return tuple(kinds[: next(p for p in lengths if all(k == kinds[i % p] for i, k in enumerate(kinds)))])


def test_the_shortest_pattern_of_all_short_lists():
    for length in range(1, 11):
        for number in range(2**length):
            kinds = [("hybrid", "hybrid_sliding")[number >> i & 1] for i in range(length)]
            assert shortest_pattern(kinds) == slow_pattern(kinds)


def test_the_shortest_pattern_of_long_lists_takes_no_time():
    begin = time.perf_counter()
    assert len(shortest_pattern(["a"] * 9_999 + ["b"])) == 10_000
    assert len(shortest_pattern((["a"] * 99 + ["b"]) * 99 + ["a"] * 50)) == 100
    assert time.perf_counter() - begin < 3  # by trying, twenty seconds
