"""A network with Pallas kernels, interpreted, learns what one without them learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zaya_jax.config import ModelConfig
from zaya_jax.model.cache import empty_cca_state
from zaya_jax.model.cca import cca_projection, join_projections
from zaya_jax.model.kernels import project_and_rotate
from zaya_jax.model.rope import apply_rope, rope_table
from zaya_jax.model.weights import declare
from zaya_jax.model.zaya import Zaya

SMALL = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    layer_pattern=("hybrid", "hybrid_sliding"),
    sliding_window=5,
    moe_intermediate_size=16,
    num_experts=3,
    router_hidden_size=8,
    max_position_embeddings=64,
    initializer_range=0.2,
    dtype="float32",
)
PALLAS = dataclasses.replace(
    SMALL,
    attention_implementation="pallas",
    experts_implementation="pallas",
    residual_implementation="pallas",
    cca_implementation="pallas",
)


def test_queries_and_keys_are_those_of_plain_jax():
    """And all gradients, in a chunk behind others, with padding and packed documents."""
    random = np.random.default_rng(2)
    # Random biases and temperatures too: constants would hide one in the wrong place.
    weights = jax.tree.map(
        lambda weight: jnp.float32(0.5 * random.standard_normal(weight.shape[1:])),
        declare(SMALL)["layers"]["attention"],
    )
    weights = join_projections(weights)
    x = jnp.float32(random.standard_normal((2, 11, SMALL.hidden_size)))
    state = jax.tree.map(
        lambda x: jnp.float32(random.standard_normal(x.shape[1:])), empty_cca_state(SMALL, batch_size=2)
    )
    segments = jnp.int32([[0] * 2 + [1] * 4 + [2] + [3] * 4, [1] * 3 + [2] * 3 + [3, 4, 5] + [0] * 2])
    rotation = rope_table(jnp.arange(11)[None], theta=100.0, rotary_dim=SMALL.rotary_dim)

    def plain(x, weights, state):
        q, k, v, behind = cca_projection(x, weights, state, segments)
        return apply_rope(q, rotation), apply_rope(k, rotation), v, behind

    def kernel(x, weights, state):
        return project_and_rotate(x, weights, state, rotation, segments)

    def both(function):
        results, pull_back = jax.vjp(function, x, weights, state)
        return results, pull_back(
            jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), results)
        )

    options = {"xla_backend_optimization_level": 0}
    expected, ours = (jax.jit(both, static_argnums=0, compiler_options=options)(f) for f in (plain, kernel))
    for right, found in zip(jax.tree.leaves(expected), jax.tree.leaves(ours), strict=True):
        # Some dozen roundings in float32, and sums over 22 tokens and 16 channels.
        assert np.linalg.norm(found - right) <= 1e-5 * np.linalg.norm(right)


def losses(config, num_steps):
    """Of plain gradient descent on one batch of packed documents with padding at their end."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, config.vocab_size, (2, 19))
    segments = np.sort(random.integers(1, 4, tokens.shape), axis=1)
    segments[1, -4:] = 0
    tokens, segments = jnp.asarray(tokens), jnp.asarray(segments, jnp.int32)
    model = Zaya(config)
    variables = model.init(jax.random.key(0), tokens)
    bias = variables["router_bias"]

    def loss(params):
        logits = model.apply({"params": params, "router_bias": bias}, tokens, segments_BT=segments).logits_BTV
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return (losses * (segments[:, 1:] != 0)).mean()

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(params):
        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params, found = variables["params"], []
    for _ in range(num_steps):
        params, value = step(params)
        found.append(float(value))
    return np.array(found)


@pytest.mark.slow
def test_twenty_steps_have_the_same_losses():
    """With what attention's and the experts' kernels keep under a name, and the rest computed again."""
    plain, ours = (
        losses(dataclasses.replace(config, remat="attention_and_experts"), 20) for config in (SMALL, PALLAS)
    )
    assert plain[-1] < 0.9 * plain[0]
    # float32's rounding, which a step of descent can make larger but twenty of these do not a hundredfold.
    np.testing.assert_allclose(ours, plain, rtol=1e-5)
