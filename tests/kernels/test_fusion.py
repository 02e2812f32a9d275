"""An unfused operation computes the same, and is a separate function only on CPUs."""

import chex
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.fusion import unfused
from pallas_kernels.product.xla import product_in_place, transposed_product


def _normalised(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))


def _through(call):
    return lambda x, y: jnp.sum(jnp.sin(call(lambda x, y: _normalised(x) * y["scale"], x, y)))


def _compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_values_and_gradients_are_those_of_the_function():
    arguments = jnp.linspace(-1, 1, 12).reshape(3, 4), {"scale": jnp.arange(4.0)}
    ours, plain = (_through(call) for call in (unfused, lambda function, *rest: function(*rest)))
    for argument in (0, 1):
        chex.assert_trees_all_close(
            jax.jit(jax.value_and_grad(ours, argument))(*arguments),
            jax.jit(jax.value_and_grad(plain, argument))(*arguments),
            rtol=1e-6,
        )


def test_on_a_cpu_it_is_not_fused_with_its_reader():
    x = jax.device_put(jnp.ones((64, 32)), jax.devices("cpu")[0])
    assert " call(" in _compiled(lambda x: unfused(_normalised, x).T + 1, x)
    assert " call(" not in _compiled(lambda x: _normalised(x).T + 1, x)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_on_other_platforms_it_is_the_plain_function(platform):
    def lowered(function):
        return jax.jit(function).trace(jnp.ones((8, 4))).lower(lowering_platforms=(platform,)).as_text()

    stack = jnp.ones((3, 4, 4096))
    for function in (
        lambda x: unfused(_normalised, x),
        lambda x: transposed_product(x, x),
        lambda x: product_in_place(x[:2], stack, jnp.int32([2, 0])),
    ):
        assert "inlineable" not in lowered(function)
        assert "optimization_barrier" not in lowered(function)
