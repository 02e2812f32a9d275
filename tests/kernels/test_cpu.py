"""What is compiled apart computes the same, and is a function of its own on CPUs alone."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_kernels.cpu import ROWS_IN_PLACE, apart, product_in_place, transposed_product


def _normalised(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))


def _through(call):
    return lambda x, y: jnp.sum(jnp.sin(call(lambda x, y: _normalised(x) * y["scale"], x, y)))


def _compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_values_and_gradients_are_the_function_s():
    arguments = jnp.linspace(-1, 1, 12).reshape(3, 4), {"scale": jnp.arange(4.0)}
    ours, plain = (_through(call) for call in (apart, lambda function, *rest: function(*rest)))
    for argument in (0, 1):
        chex.assert_trees_all_close(
            jax.jit(jax.value_and_grad(ours, argument))(*arguments),
            jax.jit(jax.value_and_grad(plain, argument))(*arguments),
            rtol=1e-6,
        )


def test_on_a_cpu_it_is_not_fused_with_its_reader():
    x = jax.device_put(jnp.ones((64, 32)), jax.devices("cpu")[0])
    assert " call(" in _compiled(lambda x: apart(_normalised, x).T + 1, x)
    assert " call(" not in _compiled(lambda x: _normalised(x).T + 1, x)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_on_other_platforms_it_is_the_plain_function(platform):
    def lowered(function):
        return jax.jit(function).trace(jnp.ones((8, 4))).lower(lowering_platforms=(platform,)).as_text()

    stack = jnp.ones((3, 4, 4096))
    for function in (
        lambda x: apart(_normalised, x),
        lambda x: transposed_product(x, x),
        lambda x: product_in_place(x[:1], stack, 2),
    ):
        assert "inlineable" not in lowered(function)
        assert "optimization_barrier" not in lowered(function)


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (3, 7, 6)])
def test_the_transposed_product_sums_over_rows(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    y = np.random.default_rng(1).standard_normal((*shape[:-1], 4))
    out = jax.jit(transposed_product)(jnp.float32(x), jnp.float32(y))
    np.testing.assert_allclose(out, np.einsum("...pd,...pf->...df", x, y), rtol=1e-5, atol=1e-6)
    assert transposed_product(jnp.bfloat16(x), jnp.bfloat16(y), dtype=jnp.float32).dtype == jnp.float32


# Read in place, and by a product: a width that is no multiple of 16, and a small matrix.
@pytest.mark.parametrize("shape", [(3, 128, 160), (3, 2, 64, 128), (3, 1008, 17), (3, 120, 160), (3, 16, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [1, 3, ROWS_IN_PLACE])
def test_the_product_in_place_is_that_of_the_matrix(shape, dtype, num_rows):
    stack = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((*shape[1:-2], num_rows, shape[-2])), dtype)
    for number in (0, 2):
        expected = np.float64(x) @ np.float64(stack[number])
        # Sums of up to 1,008 products of standard normals, in float32; then one rounding to 8 bits.
        tolerance = 1e-5 if dtype == "float32" else 2**-8
        out = jax.jit(product_in_place)(x, stack, jnp.int32(number))
        assert out.dtype == dtype
        np.testing.assert_allclose(np.float64(out), expected, rtol=tolerance, atol=32e-5)
        exact = jax.jit(product_in_place, static_argnames="dtype")(x, stack, number, dtype="float32")
        np.testing.assert_allclose(exact, expected, rtol=1e-5, atol=32e-5)


@pytest.mark.parametrize("num_rows", [1, ROWS_IN_PLACE])
def test_on_a_cpu_the_product_in_place_copies_no_matrix(num_rows):
    def through_all(x, stack):
        return jax.lax.scan(lambda x, i: (jnp.tanh(product_in_place(x, stack, i)), None), x, jnp.arange(5))[0]

    x, stack = jax.device_put((jnp.ones((num_rows, 192)), jnp.ones((5, 192, 192))), jax.devices("cpu")[0])
    text = _compiled(through_all, x, stack)
    assert re.findall(r"f32\[5,192,192\]", text)
    # Inside a fusion the rows have no memory: an instruction outside of one that gives the matrix does.
    outside = [part for part in text.split("\n\n") if not part.lstrip("%").startswith("fused_computation")]
    assert not re.findall(r" = f32\[(?:1,)?192,192\]", "\n".join(outside))
