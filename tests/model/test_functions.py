"""Custom backward passes, compared with JAX's gradients of a plain float64 formula, and values checked by
hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cca import rotate
from pallas_kernels.cca.reference import normalize
from pallas_kernels.grouped_matmul.rows import MAX_COMPARED, group_rows, weighted_swiglu
from pallas_kernels.rms_norm import rms_norm
from zaya_jax.model.rope import rope_table


def value_and_pull_back(function, arguments, grad, dtype):
    arguments = [jnp.asarray(x, dtype) for x in arguments]
    out, pull_back = jax.vjp(function, *arguments)
    return [np.asarray(x) for x in (out, *pull_back(jnp.asarray(grad, dtype)))]


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


def test_rows_are_sorted_by_group_and_back():
    """Rows of no group come last; the gradient of the sort is its inverse."""
    random = np.random.default_rng(3)
    x, grad = random.standard_normal((2, 11, 3))
    groups_P = jnp.int32([2, 3, 0, 0, 2, 3, 1, 0, 3, 2, 2])
    groups = group_rows(groups_P, 3)
    np.testing.assert_array_equal(groups.sizes_E, [3, 1, 4])
    np.testing.assert_array_equal(groups.order_P, [2, 3, 7, 6, 0, 4, 9, 10, 1, 5, 8])
    ours = value_and_pull_back(groups.sort, [x], grad, jnp.float32)
    theirs = value_and_pull_back(lambda x: x[groups.order_P], [x], grad, jnp.float32)
    for result, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(groups.unsort(groups.sort(jnp.float32(x))), np.float32(x))


@pytest.mark.parametrize("num_rows", [0, 1, MAX_COMPARED, MAX_COMPARED + 1])
def test_rows_of_a_group_keep_their_order(num_rows):
    """Few rows are compared with each other, and many are sorted."""
    groups_P = np.random.default_rng(0).integers(0, 5, num_rows)  # group 4 is none
    groups = group_rows(jnp.int32(groups_P), 4)
    order_P = np.argsort(groups_P, stable=True)
    np.testing.assert_array_equal(groups.order_P, order_P)
    np.testing.assert_array_equal(groups.rank_P, np.argsort(order_P))
    np.testing.assert_array_equal(groups.sizes_E, np.bincount(groups_P, minlength=5)[:4])


def test_rope_rotations_by_hand():
    """Base 100 and 4 rotated channels: 1 and 1/10 radian per position; pairs are halves, not neighbors."""
    rotation = rope_table(jnp.array([[0, 2]]), theta=100.0, rotary_dim=4)
    x = jnp.array([1.0, 10.0, 2.0, 20.0, 5.0, 6.0])
    turned = rotate(jnp.broadcast_to(x, (1, 2, 1, 6)), rotation)[0, :, 0]
    np.testing.assert_array_equal(turned[0], x)
    (cos, sin), (cos_tenth, sin_tenth) = ((np.cos(a), np.sin(a)) for a in (2.0, 0.2))
    by_hand = [
        cos - 2 * sin, 10 * cos_tenth - 20 * sin_tenth, 2 * cos + sin, 20 * cos_tenth + 10 * sin_tenth, 5, 6
    ]  # fmt: skip
    np.testing.assert_allclose(turned[1], by_hand, rtol=1e-6)


def test_rope_products_depend_only_on_the_distance():
    q, k = np.random.default_rng(4).standard_normal((2, 8)).astype(np.float32)

    def product(query, key):
        tables = (rope_table(jnp.array([[at]]), theta=10_000.0, rotary_dim=8) for at in (query, key))
        rotated = (rotate(jnp.asarray(x)[None, None, None], t) for x, t in zip((q, k), tables, strict=True))
        return float(jnp.vdot(*rotated))

    assert product(9, 4) == pytest.approx(product(105, 100), rel=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-2)


def test_norms_by_hand():
    """The mean square of (3, 4) is 12.5 and of (1, 7) is 25; epsilon 3.5 makes the first one 16."""
    scale = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(rms_norm(jnp.array([3.0, 4.0]), scale, eps=3.5), [0.75, 2.0], rtol=1e-6)
    np.testing.assert_allclose(rms_norm(jnp.array([[1.0, 7.0]]), scale, eps=0.0), [[0.2, 2.8]], rtol=1e-6)
    # Length 5 becomes sqrt(4) = 2.
    np.testing.assert_allclose(normalize(jnp.array([3.0, 0.0, 4.0, 0.0])), [1.2, 0, 1.6, 0], rtol=1e-6)


@pytest.mark.parametrize("norm", [normalize, lambda x: rms_norm(x, jnp.ones(4), eps=1e-5)], ids=["l2", "rms"])
def test_norms_of_zero(norm):
    out, gradient = jax.value_and_grad(lambda x: norm(x).sum())(jnp.zeros((3, 4)))
    assert out == 0
    assert np.isfinite(gradient).all()


def test_the_norm_of_bfloat16_is_float32():
    assert rms_norm(jnp.ones((1, 4), jnp.bfloat16), jnp.ones(4), eps=1e-5).dtype == jnp.float32
