"""The gradient of residual scaling, which is written out, against JAX's own of the same sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.model.residual import merge_residual

BATCH, TIME, WIDTH = 2, 5, 8


def plainly(output_BTD, residual_BTD, weights):
    output_BTD = (output_BTD.astype(jnp.float32) + weights["output_bias"]) * weights["output_scale"]
    return output_BTD + (residual_BTD + weights["residual_bias"]) * weights["residual_scale"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_gradients_are_those_of_both_affines(dtype):
    random = np.random.default_rng(0)
    output_BTD, residual_BTD, grad_BTD = random.normal(size=(3, BATCH, TIME, WIDTH)).astype(np.float32)
    names = ("output_bias", "output_scale", "residual_bias", "residual_scale")
    weights = dict(zip(names, random.normal(size=(4, WIDTH)).astype(np.float32), strict=True))
    arguments = jnp.asarray(output_BTD, dtype), residual_BTD, weights
    merged_BTD, pull_back = jax.vjp(merge_residual, *arguments)
    expected_BTD, pull_back_plainly = jax.vjp(plainly, *arguments)
    np.testing.assert_array_equal(merged_BTD, expected_BTD)
    gradients, expected = pull_back(grad_BTD), pull_back_plainly(grad_BTD)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, expected)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=2e-5, atol=2e-6)
