"""Weights and configs to and from Hugging Face's layout: exact in both directions, and errors with
reasons.
"""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from huggingface_reference import DEFAULTS, build, rope, tensors_of, variables_to_huggingface
from transformers import ZayaConfig

from zaya_jax.config import ModelConfig
from zaya_jax.convert.pytorch.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    variables_from_huggingface,
)
from zaya_jax.convert.pytorch.network_fields import unread_fields
from zaya_jax.model.zaya import Zaya

FULL, SLIDING = "hybrid", "hybrid_sliding"
FIELDS = [
    {},
    {"num_hidden_layers": 1, "cca_time0": 1, "cca_time1": 3},
    {"lm_head_bias": True, "cca_time0": 3, "num_attention_heads": 6, "num_key_value_heads": 3},
    {"num_experts": 1, "layer_types": [FULL, SLIDING, FULL], "sliding_window": 7},
]


def small_config(**fields) -> ModelConfig:
    return config_from_huggingface(DEFAULTS | fields)


@pytest.mark.parametrize("fields", FIELDS)
def test_tensors_return_unchanged(fields):
    pair = build(0, **fields)
    theirs = tensors_of(pair.reference)
    del theirs["lm_head.weight"]
    returned = variables_to_huggingface(pair.config, pair.variables)
    assert returned.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(returned[name], tensor, strict=True)
        assert returned[name].flags.c_contiguous


@pytest.mark.parametrize("fields", FIELDS)
def test_variables_return_unchanged(fields):
    config = small_config(**fields)
    tokens_BT = np.ones((1, 2), np.int32)
    shapes = jax.eval_shape(Zaya(config).init, jax.random.key(0), tokens_BT)
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), shapes)
    returned = variables_from_huggingface(config, variables_to_huggingface(config, variables))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), returned, variables)


def test_bfloat16_tensors_become_float32():
    config = small_config()
    pair = build(0)
    theirs = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors_of(pair.reference).items()}
    variables = variables_from_huggingface(config, theirs)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype(np.float32)}
    returned = variables_to_huggingface(config, variables)
    for name, tensor in returned.items():
        np.testing.assert_array_equal(tensor, theirs[name].astype(np.float32))


def test_wrong_tensors_are_named():
    config = small_config()
    tensors = variables_to_huggingface(config, build(0).variables)
    for layer in range(3):
        for name in ("down_proj", "gate_up_proj"):
            del tensors[f"model.layers.{layer}.mlp.experts.{name}"]
    tensors["model.layers.7.input_layernorm.weight"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = np.zeros((4, 1), np.float32)
    with pytest.raises(ValueError, match="6 tensors missing") as error:
        variables_from_huggingface(config, tensors)
    message = str(error.value)
    assert "model.layers.0.mlp.experts.gate_up_proj [4, 64, 48]" in message
    assert ", ...; 1 tensor unknown: model.layers.7.input_layernorm.weight [3];" in message
    assert message.endswith("1 tensor of a wrong shape: model.norm.weight is [4, 1] and must be [48]")


def test_wrong_weights_are_named():
    pair = build(0)
    params = pair.variables["params"] | {"embedding": {"table": np.zeros((2, 48)), "bais": np.zeros(48)}}
    with pytest.raises(ValueError, match="2 weights missing: embedding/scale") as error:
        variables_to_huggingface(pair.config, pair.variables | {"params": params})
    assert "1 weight unknown: embedding/bais [48]" in str(error.value)
    assert "embedding/table is [2, 48] and must be [96, 48]" in str(error.value)


def test_an_untied_head_is_rejected():
    config = small_config()
    tensors = tensors_of(build(0).reference)
    variables_from_huggingface(config, tensors)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="only a tied head is supported"):
        variables_from_huggingface(config, tensors)


def test_absent_fields_have_their_defaults():
    assert config_from_huggingface({}) == config_from_huggingface(ZayaConfig().to_dict())
    assert config_from_huggingface({}) == ModelConfig()
    assert unread_fields(ZayaConfig().to_dict(), "native") == ()


@pytest.mark.parametrize(
    ("layer_types", "pattern"),
    [
        ([FULL] * 5, (FULL,)),
        ([FULL, SLIDING, FULL, SLIDING], (FULL, SLIDING)),
        ([SLIDING, FULL, SLIDING], (SLIDING, FULL)),
        ([SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING], (SLIDING, SLIDING, FULL)),
        ([FULL, FULL, FULL, SLIDING], (FULL, FULL, FULL, SLIDING)),
    ],
)
def test_layer_types_become_their_shortest_pattern(layer_types, pattern):
    config = small_config(num_hidden_layers=len(layer_types), layer_types=layer_types, sliding_window=3)
    assert config.layer_pattern == pattern
    assert list(config.layer_types) == layer_types


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 9, "rope_theta": 10.0, "sliding_rope_theta": 20.0, "partial_rotary_factor": 0.25},
        {"num_hidden_layers": 5, "layer_pattern": (SLIDING, FULL), "sliding_window": 9},
        {"lm_head_bias": True, "rms_norm_eps": 1e-3, "initializer_range": 0.5, "max_position_embeddings": 64},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "cca_time0": 5, "cca_time1": 1},
        {"vocab_size": 11, "hidden_size": 12, "moe_intermediate_size": 13, "num_experts": 14},
        {"router_hidden_size": 15, "num_hidden_layers": 16},
    ],
)
def test_configs_return_unchanged(fields):
    config = ModelConfig(**fields)
    theirs = ZayaConfig(**config_to_huggingface(config), eos_token_id=None)
    assert config_from_huggingface(theirs.to_dict()) == config
    assert config_from_huggingface(config_to_huggingface(config)) == config


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ({"attention_bias": True}, "attention_bias is True; only False is supported"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; only 0.0 is supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False; only True is supported"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2; only 1 is supported"),
        ({"layer_types": [FULL]}, "layer_types has 1 entries; it must have num_hidden_layers, 40"),
        ({"rope_parameters": {"rope_theta": 1.0}}, 'rope_parameters has no rope_theta for "hybrid" layers'),
        (
            {"rope_parameters": {FULL: {"rope_theta": 1.0, "rope_type": "yarn"}}},
            'rope_type of "hybrid" layers is \'yarn\'; only "default" is supported',
        ),
        (
            {
                "num_hidden_layers": 2,
                "layer_types": [FULL, SLIDING],
                "sliding_window": 4,
                "rope_parameters": rope() | {SLIDING: {"rope_theta": 1e4}},
            },
            "partial_rotary_factor differs between types of layers",
        ),
    ],
)
def test_unsupported_fields_are_rejected(values, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        config_from_huggingface(values)
    assert sentence in str(error.value)


def test_a_rope_type_of_no_layer_does_not_matter():
    unused = {SLIDING: {"rope_theta": 3.0, "rope_type": "yarn", "partial_rotary_factor": 1.0}}
    config = config_from_huggingface({"rope_parameters": rope() | unused})
    assert (config.sliding_rope_theta, config.partial_rotary_factor) == (3.0, 0.5)


def test_fields_that_hugging_face_does_not_support_are_rejected():
    pair = build(0)
    for fields, sentence in (
        ({"skip_class": "identity"}, 'model.skip_class is "identity"; Hugging Face supports only "zero"'),
        ({"router": "linear"}, 'model.router is "linear"; Hugging Face supports only "mlp"'),
    ):
        config = dataclasses.replace(pair.config, **fields)
        with pytest.raises(ValueError, match=sentence):
            config_to_huggingface(config)
    with pytest.raises(ValueError, match="Hugging Face supports only"):
        variables_from_huggingface(dataclasses.replace(pair.config, router="linear"), {})
