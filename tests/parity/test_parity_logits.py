"""Logits and routing of the whole network against transformers' `ZayaForCausalLM`, in float32."""

import dataclasses

import numpy as np
import pytest
import torch
from huggingface_reference import (
    EXECUTION,
    TOLERANCE,
    ask_ours,
    ask_reference,
    build,
    padding_mask,
    random_tokens,
    relative_error,
    rope,
)

import zaya_jax

FULL, SLIDING = "hybrid", "hybrid_sliding"


@dataclasses.dataclass(frozen=True)
class Case:
    fields: dict
    batch: int = 3
    time: int = 20
    padding: str | None = None
    attention: str = "eager"
    seed: int = 0


CASES = {
    "as_8b": Case({}),
    "as_8b_sdpa": Case({}, attention="sdpa"),
    "left_padding": Case({}, padding="left"),
    "right_padding": Case({}, padding="right"),
    "left_padding_sdpa_conv_2_4": Case({"cca_time1": 4}, padding="left", attention="sdpa"),
    "one_layer_conv_1_1": Case({"num_hidden_layers": 1, "cca_time0": 1, "cca_time1": 1}),
    "conv_3_2_one_key_head": Case(
        {"cca_time0": 3, "num_key_value_heads": 1, "num_attention_heads": 3, "rope_parameters": rope(1e4)}
    ),
    "conv_1_3_left_padding": Case({"cca_time0": 1, "cca_time1": 3}, padding="left"),
    "conv_4_1_no_groups": Case({"cca_time0": 4, "cca_time1": 1, "num_key_value_heads": 4}),
    "six_key_heads_all_rotated": Case(
        {
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
            "head_dim": 8,
            "rope_parameters": rope(1e6, factor=1.0),
        }
    ),
    "odd_key_heads_quarter_rotated": Case(
        {"num_attention_heads": 6, "num_key_value_heads": 3, "rope_parameters": rope(500.0, factor=0.25)}
    ),
    "one_expert": Case({"num_experts": 1, "moe_intermediate_size": 40, "router_hidden_size": 8}),
    "many_experts_head_bias": Case(
        {"num_experts": 11, "router_hidden_size": 40, "lm_head_bias": True}, batch=4, time=33
    ),
    "alternating_window": Case(
        {
            "num_hidden_layers": 4,
            "layer_types": [FULL, SLIDING] * 2,
            "sliding_window": 5,
            "rope_parameters": rope(1e6, 100.0),
        }
    ),
    "irregular_window_left_padding": Case(
        {"num_hidden_layers": 5, "layer_types": [SLIDING, FULL, FULL, SLIDING, FULL], "sliding_window": 4},
        padding="left",
    ),
    "window_of_one": Case({"layer_types": [SLIDING] * 3, "sliding_window": 1}, padding="right"),
    "window_beyond_the_sequence": Case(
        {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 64}, attention="sdpa"
    ),
    "one_token": Case({"layer_types": [FULL, SLIDING, FULL], "sliding_window": 2}, batch=2, time=1),
    "batch_of_one_large_epsilon_wide_head": Case(
        {"rms_norm_eps": 0.05, "head_dim": 32, "hidden_size": 40}, batch=1, time=31
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_experts_equal_the_reference(name):
    case = CASES[name]
    pair = build(case.seed, attention=case.attention, **case.fields)
    tokens_BT = random_tokens(pair, case.seed, case.batch, case.time)
    mask_BT = padding_mask(case.batch, case.time, case.padding)
    theirs, ours = ask_reference(pair, tokens_BT, mask_BT), ask_ours(pair, tokens_BT, mask_BT)
    real_BT = np.ones_like(tokens_BT, bool) if mask_BT is None else mask_BT == 1

    experts_LP = theirs.experts_LBT[:, real_BT]
    np.testing.assert_array_equal(ours.experts_LBT[:, real_BT], experts_LP)
    error = relative_error(ours.logits_BTV[real_BT], theirs.logits_BTV[real_BT])
    print(f"{name}: {error:.1e}; tokens of each class {np.bincount(experts_LP.ravel()).tolist()}")
    assert error < TOLERANCE
    if case.time > 1:
        _check_that_routing_was_tested(experts_LP, pair.config.num_experts)


def _check_that_routing_was_tested(experts_LP: np.ndarray, num_experts: int) -> None:
    counts_X = np.bincount(experts_LP.ravel(), minlength=num_experts + 1)
    assert counts_X[-1] > 0, f"no token skips: {counts_X}"
    assert np.count_nonzero(counts_X[:-1]) >= min(3, num_experts), f"too few experts in use: {counts_X}"


def test_attention_maps_equal_the_reference():
    case = CASES["irregular_window_left_padding"]
    pair = build(case.seed, **case.fields)
    tokens_BT = random_tokens(pair, case.seed, case.batch, case.time)
    mask_BT = padding_mask(case.batch, case.time, case.padding)
    with torch.no_grad():
        theirs_LBNTS = pair.reference(
            torch.from_numpy(tokens_BT).long(),
            attention_mask=None if mask_BT is None else torch.from_numpy(mask_BT).long(),
            use_cache=False,
            output_attentions=True,
        ).attentions
    maps_LBNTS = zaya_jax.attention_maps(
        zaya_jax.Zaya(pair.config, EXECUTION), pair.variables, tokens_BT, None, mask_BT
    )
    real_BT = np.ones_like(tokens_BT, bool) if mask_BT is None else mask_BT == 1
    for ours_BNTS, theirs_BNTS in zip(maps_LBNTS, theirs_LBNTS, strict=True):
        difference_BNTS = np.abs(ours_BNTS - theirs_BNTS.numpy())
        assert difference_BNTS.transpose(0, 2, 1, 3)[real_BT].max() < TOLERANCE
