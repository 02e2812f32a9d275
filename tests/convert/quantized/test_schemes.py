"""Quantization configs: what is supported is read, and everything else is refused by its name."""

import pytest
from quantized_folders import section

from zaya_jax.convert.quantized.codecs import CODECS
from zaya_jax.convert.quantized.schemes import compressed_tensors_config, read_schemes
from zaya_jax.errors import UserError

BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
READ = {
    "fp8 by channel": (section(), "fp8 by channel"),
    "fp8 by tensor": (section(strategy="tensor"), "fp8 by tensor"),
    "fp8 without a strategy": (section(strategy=None), "fp8 by tensor"),
    "fp8 by block": (section(**BLOCKS), "fp8 by block of 128 x 128"),
    "fp8 by block, as text": (section(**BLOCKS | {"block_structure": "64x32"}), "fp8 by block of 64 x 32"),
    "int8": (section("int-quantized", type="int"), "int8 by channel"),
    "naive": (section("naive-quantized", type="int"), "int8 by channel"),
    "mxfp4": (
        section("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32),
        "mxfp4 by group of 1 x 32",
    ),
    "earlier name": ({"compression_config": section()["quantization_config"]}, "fp8 by channel"),
    "transformers' fp8": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}},
        "fp8 by block of 128 x 64",
    ),
    "transformers' mxfp4": ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4 by group of 1 x 32"),
}
REFUSED = {
    "another method": (
        {"quantization_config": {"quant_method": "gptq"}},
        "quantized by 'gptq', which is not",
    ),
    "no method": ({"quantization_config": {"bits": 4}}, "quantized by None, which is not"),
    "a list of methods": (
        {"quantization_config": {"quant_method": ["fp8"]}},
        r"quantized by \['fp8'\], which is",
    ),
    "a list of types": (section(type=["float"]), r"\['float'\] of 8 bits by 'channel'"),
    "no section": ({"quantization_config": "fp8"}, "quantized by 'fp8', which is not"),
    "NVFP4": (
        section("nvfp4-pack-quantized", num_bits=4, group_size=16),
        "'nvfp4-pack-quantized', which is not",
    ),
    "packed integers": (section("pack-quantized", num_bits=4, type="int"), "'pack-quantized', which is not"),
    "groups of 16": (
        section("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=16),
        "float of 4 bits by 'group', groups of 16, which is not supported",
    ),
    "6 bits": (section(num_bits=6), "float of 6 bits by 'channel'"),
    "asymmetric": (
        section("int-quantized", type="int", symmetric=False),
        "groups of None, asymmetric, which",
    ),
    "activation order": (section(actorder="group"), "actorder 'group', which is not supported"),
    "blocks of zero": (
        section(**BLOCKS | {"block_structure": [0, 128]}),
        r"blocks .* are \[0, 128\]; they must",
    ),
    "blocks of one size": (section(**BLOCKS | {"block_structure": 128}), "are 128; they must be two sizes"),
    "a quantized cache": (
        {"quantization_config": section()["quantization_config"] | {"kv_cache_scheme": {"num_bits": 8}}},
        "kv_cache_scheme of the quantization config is",
    ),
    "a rotation": (
        {"quantization_config": section()["quantization_config"] | {"transform_config": {"u": 1}}},
        "transform_config of the quantization config is",
    ),
    "groups as a list": (
        {"quantization_config": section()["quantization_config"] | {"config_groups": [1]}},
        r"config_groups of the quantization config is \[1\]",
    ),
    "no groups": (
        {"quantization_config": section()["quantization_config"] | {"config_groups": {}}},
        "has no group with quantized weights",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_known_schemes_are_read(name):
    config, described = READ[name]
    assert str(read_schemes(config)[0]) == described


def test_no_section_is_no_scheme():
    assert read_schemes({"model_type": "zaya", "quantization_config": None}) == ()


@pytest.mark.parametrize("name", REFUSED)
def test_other_schemes_are_refused_by_name(name):
    config, sentence = REFUSED[name]
    with pytest.raises(UserError, match=sentence):
        read_schemes(config)


@pytest.mark.parametrize("with_embedding", [False, True])
@pytest.mark.parametrize("name", CODECS)
def test_our_configs_are_read_again(name, with_embedding):
    config = compressed_tensors_config(CODECS[name], with_embedding=with_embedding)
    schemes = read_schemes({"quantization_config": config})
    expected = {"fp8": "fp8 by channel", "int8": "int8 by channel", "mxfp4": "mxfp4 by group of 1 x 32"}[name]
    assert [str(scheme) for scheme in schemes] == [expected, "int8 by channel"][: 1 + with_embedding]
