"""Gradients of every parameter against torch's, of one cross-entropy loss in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from huggingface_reference import (
    EXECUTION,
    Pair,
    build,
    padding_mask,
    random_tokens,
    rope,
    variables_to_huggingface,
)

from zaya_jax.model.zaya import forward

FULL, SLIDING = "hybrid", "hybrid_sliding"
TOLERANCE = 1e-3

CASES = {
    "as_8b": ({}, None),
    "one_layer_one_expert_conv_3_2_left_padding": (
        {"cca_time0": 3, "num_hidden_layers": 1, "num_experts": 1},
        "left",
    ),
    "right_padding_head_bias": ({"lm_head_bias": True, "num_key_value_heads": 1}, "right"),
    "window_left_padding": (
        {
            "layer_types": [SLIDING, SLIDING, FULL],
            "sliding_window": 3,
            "cca_time1": 3,
            "rope_parameters": rope(1e4, 100.0, 1.0),
        },
        "left",
    ),
}


def torch_gradients(pair: Pair, tokens_BT, targets_BT, real_BT, mask_BT) -> dict[str, np.ndarray]:
    mask = None if mask_BT is None else torch.from_numpy(mask_BT).long()
    logits = pair.reference(torch.from_numpy(tokens_BT).long(), attention_mask=mask, use_cache=False).logits
    real = torch.from_numpy(real_BT)
    torch.nn.functional.cross_entropy(logits[real], torch.from_numpy(targets_BT).long()[real]).backward()
    return {name: weight.grad.numpy() for name, weight in pair.reference.named_parameters()}


def our_gradients(pair: Pair, tokens_BT, targets_BT, real_BT, mask_BT) -> dict[str, np.ndarray]:
    def loss(params, tokens_BT, mask_BT):
        bias_LX = pair.variables["router_bias"]["layers"]
        out = forward(pair.config, EXECUTION, params, bias_LX, tokens_BT, None, mask_BT)
        log_probs_BTV = jax.nn.log_softmax(out.logits_BTV)
        losses_BT = -jnp.take_along_axis(log_probs_BTV, targets_BT[:, :, None], axis=-1)[:, :, 0]
        return jnp.sum(losses_BT * real_BT) / real_BT.sum()

    gradients = jax.jit(jax.grad(loss))(pair.variables["params"], tokens_BT, mask_BT)
    # A gradient has the layout of its weight.
    tensors = variables_to_huggingface(pair.config, pair.variables | {"params": gradients})
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("balancing_biases")}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_reference(name):
    fields, padding = CASES[name]
    pair = build(1, **fields)
    tokens_BT, targets_BT = random_tokens(pair, 1, 3, 16), random_tokens(pair, 2, 3, 16)
    mask_BT = padding_mask(3, 16, padding)
    real_BT = np.ones_like(tokens_BT, bool) if mask_BT is None else mask_BT == 1
    theirs = torch_gradients(pair, tokens_BT, targets_BT, real_BT, mask_BT)
    ours = our_gradients(pair, tokens_BT, targets_BT, real_BT, mask_BT)

    assert ours.keys() == theirs.keys()
    errors = {}
    for tensor, gradient in theirs.items():
        norm = np.linalg.norm(gradient)
        assert norm > 0, f"{tensor} has no gradient: nothing was tested"
        errors[tensor] = float(np.linalg.norm(ours[tensor] - gradient) / norm)
    worst = max(errors, key=errors.__getitem__)
    print(f"{name}: {len(errors)} tensors, worst {errors[worst]:.1e}, {worst}")
    assert errors[worst] < TOLERANCE, worst
