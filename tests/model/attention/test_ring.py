"""Blocks that the devices of a sequence visit and residuals that they keep; `tests/multidevice` compares
values.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mapped_devices import mapped_over
from small_models import EXECUTION, SLIDING

from pallas_kernels.flash_attention.spans import block_spans
from zaya_jax.model.attention.ring import _visit_others, _visit_own
from zaya_jax.model.weights import declare, map_weights
from zaya_jax.model.zaya import hidden_states
from zaya_jax.parallel.context import chunk_numbers, rank
from zaya_jax.parallel.mesh import ALL, CONTEXT
from zaya_jax.plan.memory import activation_bytes
from zaya_jax.train.implementations import resolve_implementations

EVERYTHING = np.iinfo(np.int32).max
SEQUENCES = 7
"""A number that no other axis has, nor is a part of: what grows with it is of the tokens."""
OWN_TOKENS = 16


def visited(num_queries, num_keys, start, *, blocks=(64, 32)):
    """Returns the blocks that the kernel visits: of keys for queries, forward, and of queries for keys,
    backward.
    """
    limits = jnp.array([start, EVERYTHING])
    spans = block_spans(num_queries, num_keys, *blocks, limits, None, None)
    return jnp.stack([jnp.sum(x[..., 3] - x[..., 0]) for x in spans])


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [2, 8])
def test_around_a_ring_every_device_visits_equally_many_blocks_and_all_visible_ones(ranks):
    size = 256
    keys = jnp.zeros(size), jnp.zeros(size)

    def add(q, k, count, _, source):
        return count + visited(size, size, (chunk_numbers(rank())[q] - chunk_numbers(source)[k]) * size)

    def visits(_):
        count = _visit_own(add, jnp.zeros(2, jnp.int32), keys)
        for distance in range(1, ranks):
            count = _visit_others(add, count, keys, (rank() - distance) % ranks)
        return count

    actual = mapped_over(CONTEXT, visits)(jnp.arange(ranks))
    assert np.all(actual.max(axis=0) <= 1.02 * actual.mean(axis=0))
    whole = visited(2 * ranks * size, 2 * ranks * size, 0)
    np.testing.assert_array_equal(actual.sum(axis=0), whole)


def kept_bytes(execution, ranks):
    """Returns residuals per token that the backward pass keeps from the forward pass, except document ids."""
    execution = resolve_implementations(execution, SLIDING)
    params = map_weights(lambda weight: jnp.zeros(weight.shape), declare(SLIDING))
    bias_LX = jnp.zeros((SLIDING.num_hidden_layers, SLIDING.num_experts + 1))
    tokens_BT = jnp.zeros((SEQUENCES, OWN_TOKENS), jnp.int32)

    def pull_back(params):
        def stream(params):
            inputs = bias_LX, tokens_BT, tokens_BT, tokens_BT
            return hidden_states(SLIDING, execution, params, *inputs, is_shared=True).x_BTD

        return jax.vjp(stream, params)[1]

    axes = [(axis, ranks if axis == CONTEXT[0] else 1) for axis in ALL]
    kept = jax.make_jaxpr(pull_back, axis_env=axes)(params).out_avals
    floats = [x for x in kept if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(x.size * x.dtype.itemsize for x in floats if x.size % SEQUENCES == 0)


@pytest.mark.campaign
@pytest.mark.parametrize("form", ["gathered", "ring"])
@pytest.mark.parametrize("remat", ["products", "attention_and_experts", "layer"])
def test_memory_of_a_device_does_not_grow_with_the_sequence(form, remat):
    """Equally many tokens per device, for a sequence that is four times as long."""
    execution = dataclasses.replace(
        EXECUTION, context_attention=form, remat=remat, experts_implementation="ragged_dot"
    )
    actual = kept_bytes(execution, 8)
    print(actual, SEQUENCES * activation_bytes(SLIDING, execution, OWN_TOKENS))
    assert actual == kept_bytes(execution, 2)
