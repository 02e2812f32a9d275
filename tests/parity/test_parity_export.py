"""Exports load in transformers without warnings, and compute the same there.

The legacy layout has no installable reference. The expected names are those in [legacy]'s code, written out
below a second time, on the reference's own tensors.
"""

import dataclasses
import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from huggingface_reference import (
    TOLERANCE,
    ask_ours,
    build,
    build_released,
    random_tokens,
    relative_error,
    tensors_of,
)
from transformers import AutoConfig, AutoTokenizer, ZayaForCausalLM

import zaya_jax
from zaya_jax import cli
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer

FULL, SLIDING = "hybrid", "hybrid_sliding"
FIELDS = [
    {},
    {"num_hidden_layers": 1, "cca_time0": 1, "cca_time1": 3, "num_experts": 1},
    {"lm_head_bias": True, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "sliding_window": 5},
]


@pytest.mark.parametrize("fields", FIELDS)
def test_transformers_loads_exports(fields, tmp_path):
    pair = build_released(0, **fields)
    # As in transformers: with products in bfloat16 the most likely token may be another.
    model = zaya_jax.Zaya(pair.config, zaya_jax.ExecutionConfig(dtype="float32"))
    zaya_jax.save_pytorch(
        tmp_path / "out", model, pair.variables, dtype="float32", max_shard_bytes=50_000, tokenizer="byte"
    )
    loaded, info = ZayaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.float32
    tokens_BT = random_tokens(pair, 1, 2, 20)
    with torch.no_grad():
        theirs = loaded(torch.from_numpy(tokens_BT).long(), use_cache=False).logits.numpy()
    assert relative_error(ask_ours(pair, tokens_BT, None).logits_BTV, theirs) < TOLERANCE

    prompt = [2, *ByteTokenizer().encode("def main(")]
    ours = zaya_jax.generate(model, pair.variables, prompt, max_new_tokens=12, temperature=0.0, eos_id=1)
    answer = loaded.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("def main(", add_special_tokens=False) == prompt[1:]
    ours = [token for token in ours if token != 1]
    text = tokenizer.decode([token for token in answer.tolist() if token != 1])
    assert text == ByteTokenizer().decode(ours)


def test_bfloat16_loads_bit_for_bit(tmp_path):
    pair = build_released(1)
    zaya_jax.save_pytorch(tmp_path / "out", zaya_jax.Zaya(pair.config), pair.variables)
    loaded, info = ZayaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.bfloat16
    expected = tensors_of(pair.reference)
    for name, tensor in loaded.state_dict().items():
        narrow = expected[name].astype(ml_dtypes.bfloat16).astype(np.float32)
        wanted = expected[name] if "balancing" in name and tensor.dtype == torch.float32 else narrow
        np.testing.assert_array_equal(tensor.float().numpy(), wanted)


def test_weights_saved_by_transformers_are_loaded(tmp_path):
    pair = build_released(2, **FIELDS[2])
    pair.reference.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    model, variables = zaya_jax.load_pytorch(tmp_path / "theirs")
    assert model == zaya_jax.Zaya(pair.config, zaya_jax.ExecutionConfig(dtype="float32"))
    jax.tree.map(np.testing.assert_array_equal, variables, pair.variables)


ATTENTION = {
    "input_layernorm.weight": "input_norm.weight",
    "self_attn.qkv_proj.q_proj.weight": "self_attn.qkv.linear_q.weight",
    "self_attn.qkv_proj.k_proj.weight": "self_attn.qkv.linear_k.weight",
    "self_attn.qkv_proj.v_proj_current.weight": "self_attn.qkv.val_proj1.weight",
    "self_attn.qkv_proj.v_proj_delayed.weight": "self_attn.qkv.val_proj2.weight",
    "self_attn.qkv_proj.conv_qk_depthwise.weight": "self_attn.qkv.conv_qk.0.weight",
    "self_attn.qkv_proj.conv_qk_depthwise.bias": "self_attn.qkv.conv_qk.0.bias",
    "self_attn.qkv_proj.conv_qk_grouped.weight": "self_attn.qkv.conv_qk.1.weight",
    "self_attn.qkv_proj.conv_qk_grouped.bias": "self_attn.qkv.conv_qk.1.bias",
    "self_attn.qk_norm.temp": "self_attn.qkv.temp",
    "self_attn.o_proj.weight": "self_attn.o_proj.weight",
}
MOE = {
    "post_attention_layernorm.weight": "input_norm.weight",
    "mlp.gate.down_proj.weight": "zaya_block.router.down_proj.weight",
    "mlp.gate.down_proj.bias": "zaya_block.router.down_proj.bias",
    "mlp.gate.router_states_scale": "zaya_block.router.router_states_scale",
    "mlp.gate.router_mlp.norm.weight": "zaya_block.router.rmsnorm_eda.weight",
    "mlp.gate.router_mlp.fc1.weight": "zaya_block.router.router_mlp.0.weight",
    "mlp.gate.router_mlp.fc1.bias": "zaya_block.router.router_mlp.0.bias",
    "mlp.gate.router_mlp.fc2.weight": "zaya_block.router.router_mlp.2.weight",
    "mlp.gate.router_mlp.fc2.bias": "zaya_block.router.router_mlp.2.bias",
    "mlp.gate.router_mlp.out_proj.weight": "zaya_block.router.router_mlp.4.weight",
    "mlp.gate.balancing_biases": "zaya_block.router.balancing_biases",
}
EXPERTS = {"mlp.experts.gate_up_proj": "linear_fc1", "mlp.experts.down_proj": "linear_fc2"}
OTHERS = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.final_norm.weight",
    "model.input_hidden_states_scale": "model.layers.0.res_scale.hidden_states_scale",
    "model.input_hidden_states_bias": "model.layers.0.res_scale.hidden_states_bias",
    "lm_head.bias": "lm_head.bias",
}


def by_hand(native: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """The legacy tensors of a native state dict, by the names of [legacy]."""
    legacy = {OTHERS[name]: tensor for name, tensor in native.items() if name in OTHERS}
    for name, tensor in native.items():
        if not (match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)):
            continue
        layer, rest = int(match[1]), match[2]
        kind, _, part = rest.rpartition(".")
        if rest in ATTENTION:
            legacy[f"model.layers.{2 * layer}.{ATTENTION[rest]}"] = tensor
        elif rest in MOE:
            legacy[f"model.layers.{2 * layer + 1}.{MOE[rest]}"] = tensor
        elif rest in EXPERTS:
            for expert, matrix in enumerate(tensor):
                where = f"model.layers.{2 * layer + 1}.zaya_block.experts.local_experts.{expert}"
                legacy[f"{where}.{EXPERTS[rest]}.weight"] = matrix.contiguous()
        elif kind == "post_attention_residual_scale":
            legacy[f"model.layers.{2 * layer + 1}.res_scale.{part}"] = tensor
        else:
            assert kind == "post_mlp_residual_scale"
            where = "model" if layer == num_layers - 1 else f"model.layers.{2 * layer + 2}"
            legacy[f"{where}.res_scale.{part}"] = tensor
    return legacy


def legacy_config(pair, form: str) -> dict:
    """As released in November 2025 ("lists") and in May 2026 ("numbers")."""
    config = pair.config
    layers = config.num_hidden_layers
    common = {
        "architectures": ["ZayaForCausalLM"], "model_type": "zaya", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "num_key_value_heads": config.num_key_value_heads,
        "norm_epsilon": config.rms_norm_eps, "rope_theta": config.rope_theta, "rope_scaling": False,
        "lm_head_bias": config.lm_head_bias, "partial_rotary_factor": 0.5, "activation_func": "swiglu",
        "max_position_embeddings": config.max_position_embeddings, "zaya_use_mod": True, "clamp_temp": False,
        "swa_layers": [x for k in config.layer_types for x in (4 if k == SLIDING else 0, 0)],
        "swa_rotary_base": config.sliding_rope_theta, "eos_token_id": 1,
    }  # fmt: skip
    if form == "numbers":
        return common | {
            "num_hidden_layers": 2 * layers, "num_attention_heads": config.num_attention_heads,
            "num_query_groups": config.num_key_value_heads, "head_dim": config.head_dim,
            "ffn_hidden_size": 2 * config.moe_intermediate_size, "num_experts": config.num_experts,
            "zaya_mlp_expansion": config.router_hidden_size, "cca_time0": 2, "cca_time1": 2,
        }  # fmt: skip
    return common | {
        "num_hidden_layers": 120, "num_attention_heads": config.hidden_size // config.head_dim,
        "zaya_layers": ["a", config.num_experts] * layers,
        "cca_num_q_heads": [config.num_attention_heads, 0] * layers,
        "num_query_groups_list": [config.num_key_value_heads, 0] * layers,
        "ffn_hidden_size_list": [0, 2 * config.moe_intermediate_size] * (layers + 3),
        "zaya_mlp_expansion": [0, config.router_hidden_size] * layers,
    }  # fmt: skip


@pytest.mark.parametrize("form", ["lists", "numbers"])
def test_a_legacy_checkpoint_by_hand(form, tmp_path):
    pair = build_released(3, **FIELDS[2])
    bias_LX = np.asarray(pair.variables["router_bias"]["layers"])
    bias_LX = bias_LX - bias_LX[:, :-1].max(axis=1, keepdims=True) * (
        np.arange(bias_LX.shape[1]) < bias_LX.shape[1] - 1
    )
    for layer, bias_X in zip(pair.reference.model.layers, bias_LX, strict=True):
        layer.mlp.gate.balancing_biases.data = torch.from_numpy(bias_X)
    native = {name: t for name, t in pair.reference.state_dict().items() if name != "lm_head.weight"}
    (tmp_path / "legacy").mkdir()
    safetensors.torch.save_file(by_hand(native, 4), tmp_path / "legacy/model.safetensors")
    (tmp_path / "legacy/config.json").write_text(json.dumps(legacy_config(pair, form)))

    model, _ = zaya_jax.load_pytorch(tmp_path / "legacy")
    assert model.config.skip_class == "identity"  # as in the legacy code
    assert dataclasses.replace(model.config, skip_class="zero") == pair.config
    assert model.execution == zaya_jax.ExecutionConfig(dtype="float32")
    cli.main(["convert", str(tmp_path / "legacy"), str(tmp_path / "native"), "--layout", "native"])
    returned = safetensors.torch.load_file(tmp_path / "native/model.safetensors")
    assert returned.keys() == native.keys()
    assert all(torch.equal(returned[name], native[name]) for name in native)
    theirs = AutoConfig.from_pretrained(tmp_path / "native")
    assert theirs.layer_types == list(pair.config.layer_types)
    assert theirs.sliding_window == 5

    cli.main(["convert", str(tmp_path / "native"), str(tmp_path / "again"), "--layout", "legacy"])
    again = safetensors.torch.load_file(tmp_path / "again/model.safetensors")
    wanted = by_hand(native, 4)
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)


def test_a_skip_class_that_can_win_is_not_exported_to_another_layout(tmp_path):
    pair = build(4)
    network = dataclasses.replace(pair.config, skip_class="identity")
    with pytest.raises(
        ValueError, match='skip_class is "identity"; Hugging Face supports only "zero", and in la'
    ):
        zaya_jax.save_pytorch(tmp_path / "out", zaya_jax.Zaya(network), pair.variables)
    assert list(tmp_path.iterdir()) == []
