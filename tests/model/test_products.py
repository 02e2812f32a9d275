"""`product` against JAX's own differentiation of the same product."""

import chex
import jax
import jax.numpy as jnp
import pytest

from zaya_jax.model.products import InStack, product
from zaya_jax.model.remat import REMAT_POLICIES

SHAPES = [((5, 3), (3, 4)), ((1, 8), (8, 1)), ((256, 64), (64, 32)), ((3, 7, 6), (3, 6, 2))]


def _plain(x, kernel, dtype=None):
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


@pytest.mark.parametrize(("x_shape", "kernel_shape"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_a_product(x_shape, kernel_shape, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel = (jax.random.normal(k, s, dtype) for k, s in zip(keys, (x_shape, kernel_shape), strict=False))
    out, pull = jax.vjp(lambda x, w: product(x, w, dtype=jnp.float32), x, kernel)
    expected, expected_pull = jax.vjp(lambda x, w: _plain(x, w, jnp.float32), x, kernel)
    grad = jax.random.normal(keys[2], out.shape)
    # One rounding of a gradient to its own type, and the order of a sum of up to 256 terms.
    tolerance = 1e-5 if dtype == "float32" else 2**-8
    chex.assert_trees_all_close(out, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(pull(grad), expected_pull(grad), rtol=tolerance, atol=tolerance)
    chex.assert_trees_all_equal_dtypes(pull(grad), (x, kernel))


def test_a_policy_that_keeps_products_computes_none_twice():
    x, kernel = jnp.ones((4, 8)), jnp.ones((8, 8))

    def loss(x, kernel):
        return jnp.sum(jnp.sin(product(jnp.sin(x), kernel)))

    kept = jax.checkpoint(loss, policy=REMAT_POLICIES["products"])
    recomputed = jax.checkpoint(loss, policy=REMAT_POLICIES["layer"])
    assert _num_products(kept, x, kernel) == 3  # one forward, two backward
    assert _num_products(recomputed, x, kernel) == 4


def _num_products(loss, *arguments) -> int:
    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments)
    return lowered.as_text().count("stablehlo.dot_general")


@pytest.mark.parametrize("rows", [1, 5])
def test_a_matrix_left_in_its_stack_is_the_layer_s(rows):
    stack = jax.random.normal(jax.random.key(0), (3, 4, 32, 64))
    x = jax.random.normal(jax.random.key(1), (rows, 128))
    kernel = InStack(stack, jnp.int32(2)).reshape(-1, 64).astype("float32")
    assert kernel.shape == (128, 64)
    chex.assert_trees_all_close(product(x, kernel), x @ stack[2].reshape(-1, 64), rtol=1e-5, atol=1e-5)
