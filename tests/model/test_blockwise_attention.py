"""Blockwise attention against the plain formula in float64, and the network with either."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zaya_jax
from zaya_jax.model.attention import attend_within
from zaya_jax.model.blockwise_attention import attend_blockwise, block_of


def plain(q_BTNH, k_BTKH, v_BTKH, segments_BT, window):
    """All scores at once; those that are not allowed are minus infinity."""
    index = np.arange(q_BTNH.shape[1])
    distance = index[:, None] - index[None, :]
    allowed = (distance >= 0) & (distance < (window or len(index)))
    allowed = allowed & (segments_BT[:, :, None] == segments_BT[:, None, :])
    k_BTNH, v_BTNH = (jnp.repeat(x, q_BTNH.shape[2] // x.shape[2], axis=2) for x in (k_BTKH, v_BTKH))
    scores = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) / np.sqrt(q_BTNH.shape[-1])
    return jnp.einsum(
        "bnts,bsnh->btnh", jax.nn.softmax(jnp.where(allowed[:, None], scores, -jnp.inf)), v_BTNH
    )


def value_and_gradients(function, arguments, grad, dtype):
    out, pull_back = jax.vjp(function, *(jnp.asarray(x, dtype) for x in arguments))
    return [np.asarray(x) for x in (out, *pull_back(jnp.asarray(grad, dtype)))]


@pytest.mark.parametrize(
    ("time", "block", "window", "num_segments"),
    [
        (12, 4, None, 1),
        (13, 4, None, 3),  # an odd length: the last block is padded
        (13, 4, 3, 1),  # blocks that are out of the window's reach
        (13, 4, 6, 3),
        (9, 4, 1, 1),  # a token sees itself alone
        (5, 8, None, 2),  # a block longer than the sequence
        (1, 4, None, 1),
    ],
)
@pytest.mark.parametrize("num_key_heads", [1, 4])
def test_it_is_attention(time, block, window, num_segments, num_key_heads):
    random = np.random.default_rng(0)
    q, grad = random.standard_normal((2, 2, time, 4, 6))
    k, v = random.standard_normal((2, 2, time, num_key_heads, 6))
    segments = np.sort(random.integers(0, num_segments, (2, time)), axis=1)
    ours = value_and_gradients(
        lambda *qkv: attend_blockwise(*qkv, window=window, segments_BT=jnp.asarray(segments), block=block),
        (3 * q, k, v),
        grad,
        jnp.float32,
    )
    with jax.enable_x64(True):
        theirs = value_and_gradients(
            lambda *qkv: plain(*qkv, segments, window), (3 * q, k, v), grad, jnp.float64
        )
    for result, expected in zip(ours, theirs, strict=True):
        assert expected.dtype == np.float64
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_a_window_may_be_data():
    """As in the scan over layers, where it differs from layer to layer."""
    q, k, v = jnp.asarray(np.random.default_rng(1).standard_normal((3, 1, 10, 2, 4)), jnp.float32)
    for window in (2, 100):
        blockwise = jax.jit(lambda w: attend_blockwise(q, k, v, window=w, block=4))(jnp.int32(window))
        expected = attend_within(q, k, v, window=window)
        np.testing.assert_allclose(blockwise, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", [False, True])
def test_nothing_is_of_the_size_of_all_scores(remat):
    """Neither forward nor backward, nor when it is recomputed in a scan over layers: not even a mask."""
    time, heads, layers = 1024, 2, 3

    def layer(x, _):
        return x + attend_blockwise(x, x, x, window=None, block=64), None

    def loss(x):
        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, None, length=layers)[0].sum()

    x = jax.ShapeDtypeStruct((1, time, heads, 4), jnp.float32)
    memory = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < time * time


@pytest.mark.parametrize(("time", "block"), [(100, 256), (4096, 256), (40_000, 2048), (131_072, 2048)])
def test_blocks_suit_the_length(time, block):
    assert block_of(time) == block


def test_the_network_does_not_depend_on_it():
    config = zaya_jax.ModelConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, moe_intermediate_size=16, num_experts=2, router_hidden_size=8,
        layer_pattern=("hybrid_sliding", "hybrid"), sliding_window=5,
    )  # fmt: skip
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 20), 0, 32)
    segments_BT = jnp.asarray([[1] * 20, [1] * 7 + [2] * 9 + [0] * 4])
    plain = zaya_jax.ExecutionConfig(dtype="float32")
    variables = jax.jit(zaya_jax.Zaya(config, plain).init)(jax.random.key(1), tokens_BT)
    logits = []
    for name in ("full", "blockwise"):
        execution = dataclasses.replace(plain, attention_implementation=name)
        model = zaya_jax.Zaya(config, execution)
        logits.append(jax.jit(model.apply)(variables, tokens_BT, segments_BT=segments_BT).logits_BTV)
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)
