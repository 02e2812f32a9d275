"""The moving average of weights against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.config import EmaConfig
from zaya_jax.optim.averaging import start_average, update_average

STEPS = 200


@pytest.mark.parametrize(("decay", "warmup"), [(0.9999, True), (0.9999, False), (0.5, True)])
def test_updates_are_those_of_float64(decay, warmup):
    """Near 1 a decay in float32 would be off by 3e-4 of its difference to 1."""
    numbers = np.random.default_rng(0)
    weights_SN = numbers.standard_normal((STEPS + 1, 64)).astype(np.float32)
    bias_LX = jnp.zeros((1, 2))
    average = start_average({"a": jnp.asarray(weights_SN[0])}, bias_LX)
    update = jax.jit(functools.partial(update_average, EmaConfig(decay=decay, decay_warmup=warmup)))
    mean = weights_SN[0].astype(np.float64)
    for step in range(1, STEPS + 1):
        average = update(average, {"a": jnp.asarray(weights_SN[step])}, bias_LX + step)
        exact = min(decay, (1 + step) / (10 + step)) if warmup else decay
        mean = exact * mean + (1 - exact) * weights_SN[step]
    np.testing.assert_allclose(average.buckets["a"], mean, rtol=0, atol=STEPS * 2.0**-24 * 4)
    assert int(average.num_updates) == STEPS
    assert 0 < average.router_bias_LX[0, 0] < STEPS


def test_equal_weights_leave_the_average_bitwise_as_it_was():
    weights = {"a": jnp.asarray(np.random.default_rng(0).standard_normal(64), jnp.float32)}
    average = start_average(weights, jnp.zeros((1, 2)))
    again = update_average(EmaConfig(decay=0.9), average, weights, jnp.zeros((1, 2)))
    np.testing.assert_array_equal(again.buckets["a"], weights["a"])
