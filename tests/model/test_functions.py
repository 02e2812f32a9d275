"""Backward passes of our own against JAX's of a plain float64 formula, and numbers checked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.model.attention import attend, attend_single, attention_mask
from zaya_jax.model.experts import permute, weighted_swiglu
from zaya_jax.model.norms import l2_norm, rms_norm
from zaya_jax.model.rope import apply_rope, rope_table


def plain_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    """Every query head meets a copy of its key head; masked scores are minus infinity."""
    k_BSNH, v_BSNH = (jnp.repeat(x, q_BTNH.shape[2] // x.shape[2], axis=2) for x in (k_BSKH, v_BSKH))
    scores_BNTS = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) / np.sqrt(q_BTNH.shape[-1])
    probs_BNTS = jax.nn.softmax(jnp.where(mask_BTS[:, None], scores_BNTS, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", probs_BNTS, v_BSNH)


def value_and_pull_back(function, arguments, grad, dtype):
    arguments = [jnp.asarray(x, dtype) for x in arguments]
    out, pull_back = jax.vjp(function, *arguments)
    return [np.asarray(x) for x in (out, *pull_back(jnp.asarray(grad, dtype)))]


@pytest.mark.parametrize(("window", "num_segments"), [(None, 1), (3, 1), (None, 3)])
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
def test_attention(window, num_segments, num_key_heads):
    random = np.random.default_rng(0)
    q, grad = random.standard_normal((2, 2, 9, 4, 6))
    k, v = random.standard_normal((2, 2, 9, num_key_heads, 6))
    time = jnp.arange(9)
    segments_BT = jnp.sort(jnp.asarray(random.integers(0, num_segments, (2, 9))), axis=1)
    mask = attention_mask(
        time, time, window=window, query_segments_BT=segments_BT, key_segments_BS=segments_BT
    )
    ours = value_and_pull_back(lambda *qkv: attend(*qkv, mask), (3 * q, k, v), grad, jnp.float32)
    with jax.enable_x64(True):
        theirs = value_and_pull_back(
            lambda *qkv: plain_attention(*qkv, mask), (3 * q, k, v), grad, jnp.float64
        )
    for result, expected in zip(ours, theirs, strict=True):
        assert expected.dtype == np.float64
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
def test_attention_of_a_single_query(num_key_heads):
    """The second text's query sees nothing, and gets a mean."""
    random = np.random.default_rng(1)
    q = 3 * random.standard_normal((2, 1, 4, 6))
    k, v = random.standard_normal((2, 2, 9, num_key_heads, 6))
    mask = jnp.stack([jnp.asarray(random.random((1, 9)) < 0.6), jnp.zeros((1, 9), bool)])
    assert 0 < mask[0].sum() < 9
    ours = attend_single(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), mask)
    with jax.enable_x64(True):
        expected = plain_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), mask)
    assert expected.dtype == np.float64
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-5, atol=1e-5)
    mean = np.repeat(v[1].mean(axis=0), 4 // num_key_heads, axis=0)
    np.testing.assert_allclose(ours[1, 0], mean, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_nothing_is_finite_and_takes_no_gradient():
    mask = jnp.array([[[True, False], [False, False]]])
    x = np.random.default_rng(1).standard_normal((4, 1, 2, 2, 4))
    grad = x[3] * np.array([0, 1])[:, None, None]
    out, *gradients = value_and_pull_back(lambda *qkv: attend(*qkv, mask), x[:3], grad, jnp.float32)
    np.testing.assert_allclose(out[0, 1], x[2].mean(axis=1)[0], rtol=1e-6)
    assert not any(np.any(gradient) for gradient in gradients)


def test_the_mask():
    mask = attention_mask(
        jnp.array([2, 3]),
        jnp.array([-1, 0, 1, 2, 3]),
        window=2,
        query_segments_BT=jnp.array([[1, 2]]),
        key_segments_BS=jnp.array([[1, 1, 1, 1, 2]]),
    )
    np.testing.assert_array_equal(mask[0], [[0, 0, 1, 1, 0], [0, 0, 0, 0, 1]])
    whole = attention_mask(jnp.arange(3), jnp.array([-1, 0, 1]), window=None)
    np.testing.assert_array_equal(whole[0], [[0, 1, 0], [0, 1, 1], [0, 1, 1]])


def test_weighted_swiglu():
    random = np.random.default_rng(2)
    x, weights, grad = 3 * random.standard_normal((7, 10)), random.random(7), random.standard_normal((7, 5))
    ours = value_and_pull_back(weighted_swiglu, [x, weights], grad, jnp.float32)
    with jax.enable_x64(True):
        theirs = value_and_pull_back(
            lambda x, weights: weights[:, None] * (x[:, :5] / (1 + jnp.exp(-x[:, :5])) * x[:, 5:]),
            [x, weights],
            grad,
            jnp.float64,
        )
    for result, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_permute():
    random = np.random.default_rng(3)
    x, grad = random.standard_normal((2, 11, 3))
    order = jnp.asarray(random.permutation(11))
    ours = value_and_pull_back(lambda x: permute(x, order, jnp.argsort(order)), [x], grad, jnp.float32)
    theirs = value_and_pull_back(lambda x: x[order], [x], grad, jnp.float32)
    for result, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_rope_turns_by_hand():
    """Base 100 and 4 rotated channels: 1 and 1/10 radian a position; halves, not neighbours, are pairs."""
    rotation = rope_table(jnp.array([[0, 2]]), theta=100.0, rotary_dim=4)
    x = jnp.array([1.0, 10.0, 2.0, 20.0, 5.0, 6.0])
    turned = apply_rope(jnp.broadcast_to(x, (1, 2, 1, 6)), rotation)[0, :, 0]
    np.testing.assert_array_equal(turned[0], x)
    (cos, sin), (cos_tenth, sin_tenth) = ((np.cos(a), np.sin(a)) for a in (2.0, 0.2))
    by_hand = [
        cos - 2 * sin, 10 * cos_tenth - 20 * sin_tenth, 2 * cos + sin, 20 * cos_tenth + 10 * sin_tenth, 5, 6
    ]  # fmt: skip
    np.testing.assert_allclose(turned[1], by_hand, rtol=1e-6)


def test_rope_products_depend_on_the_distance_alone():
    q, k = np.random.default_rng(4).standard_normal((2, 8)).astype(np.float32)

    def product(query, key):
        tables = (rope_table(jnp.array([[at]]), theta=10_000.0, rotary_dim=8) for at in (query, key))
        rotated = (
            apply_rope(jnp.asarray(x)[None, None, None], t) for x, t in zip((q, k), tables, strict=True)
        )
        return float(jnp.vdot(*rotated))

    assert product(9, 4) == pytest.approx(product(105, 100), rel=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-2)


def test_norms_by_hand():
    """Mean square of (3, 4) is 12.5 and of (1, 7) is 25; 3.5 as epsilon makes the first 16."""
    scale = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(rms_norm(jnp.array([3.0, 4.0]), scale, eps=3.5), [0.75, 2.0], rtol=1e-6)
    np.testing.assert_allclose(rms_norm(jnp.array([[1.0, 7.0]]), scale, eps=0.0), [[0.2, 2.8]], rtol=1e-6)
    # Length 5 becomes sqrt(4) = 2.
    np.testing.assert_allclose(l2_norm(jnp.array([3.0, 0.0, 4.0, 0.0])), [1.2, 0, 1.6, 0], rtol=1e-6)


@pytest.mark.parametrize("norm", [l2_norm, lambda x: rms_norm(x, jnp.ones(4), eps=1e-5)], ids=["l2", "rms"])
def test_norms_of_zero_and_of_bfloat16(norm):
    out, gradient = jax.value_and_grad(lambda x: norm(x).sum())(jnp.zeros((3, 4)))
    assert out == 0
    assert np.isfinite(gradient).all()
    assert norm(jnp.ones((1, 4), jnp.bfloat16)).dtype == jnp.float32
