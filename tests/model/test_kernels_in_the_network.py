"""A network with interpreted Pallas kernels equals the network without them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels import choice
from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig
from zaya_jax.model.attention.cca import cca_projection, empty_cca_state, join_projections
from zaya_jax.model.rope import rope_table
from zaya_jax.model.weights import declare
from zaya_jax.model.zaya import Zaya
from zaya_jax.train.implementations import (
    OPERATIONS,
    describe_implementations,
    resolve_implementations,
)
from zaya_jax.train.step.state import make_setup

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
)
PLAIN = ExecutionConfig(dtype="float32")
RUN = Config(model=SMALL, data=DataConfig(sequence_length=32), execution=PLAIN)
IN_TRAINING = (
    "attention_implementation",
    "experts_implementation",
    "residual_implementation",
    "cca_implementation",
)
FIELDS = (
    *IN_TRAINING,
    "decode_implementation",
    "loss_implementation",
    "newton_schulz_implementation",
)


@pytest.mark.slow
def test_queries_and_keys_equal_plain_jax():
    """Also all gradients, in a later chunk, with padding and packed documents."""
    random = np.random.default_rng(2)
    # Random biases and temperatures: constants would hide one in the wrong place.
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

    def project(x, weights, state, *, implementation):
        return cca_projection(x, weights, state, rotation, segments, implementation=implementation)

    def both(function):
        results, pull_back = jax.vjp(function, x, weights, state)
        return results, pull_back(
            jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), results)
        )

    expected, ours = (
        jax.jit(both, static_argnums=0)(functools.partial(project, implementation=name))
        for name in ("xla", "pallas")
    )
    for right, actual in zip(jax.tree.leaves(expected), jax.tree.leaves(ours), strict=True):
        # Some dozen roundings in float32, and sums over 22 tokens and 16 channels.
        assert np.linalg.norm(actual - right) <= 1e-5 * np.linalg.norm(right)


@functools.cache
def loss_and_gradients(execution):
    """Returns loss and gradients of packed documents with padding, with the remat policy that saves named
    values.
    """
    random = np.random.default_rng(0)
    tokens = random.integers(1, SMALL.vocab_size, (2, 19))
    segments = np.sort(random.integers(1, 4, tokens.shape), axis=1)
    segments[1, -4:] = 0
    tokens, segments = jnp.asarray(tokens), jnp.asarray(segments, jnp.int32)
    model = Zaya(SMALL, dataclasses.replace(execution, remat="attention_and_experts"))
    variables = jax.jit(Zaya(SMALL).init)(jax.random.key(0), tokens)  # equal for all implementations
    bias = variables["router_bias"]

    def loss(params):
        logits = model.apply({"params": params, "router_bias": bias}, tokens, segments_BT=segments).logits_BTV
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return (losses * (segments[:, 1:] != 0)).mean()

    return jax.jit(jax.value_and_grad(loss))(variables["params"])


@pytest.mark.slow
@pytest.mark.parametrize("field", IN_TRAINING)
def test_values_and_gradients_with_one_kernel(field):
    """Sums of at most some hundred float32 terms in another order, propagated through two layers."""
    loss, gradients = loss_and_gradients(dataclasses.replace(PLAIN, implementation="xla"))
    ours, our_gradients = loss_and_gradients(
        dataclasses.replace(PLAIN, implementation="xla", **{field: "pallas"})
    )
    np.testing.assert_allclose(ours, loss, rtol=1e-6)

    def check(ours, theirs):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)

    jax.tree.map(check, our_gradients, gradients)


def test_one_field_selects_all_kernels_and_each_can_be_selected_alone():
    forced = resolve_implementations(dataclasses.replace(PLAIN, implementation="pallas"), SMALL)
    assert [getattr(forced, field) for field in FIELDS] == ["pallas"] * 7
    but_one = dataclasses.replace(PLAIN, implementation="pallas", attention_implementation="blockwise")
    named = resolve_implementations(but_one, SMALL)
    assert [getattr(named, field) for field in FIELDS] == ["blockwise"] + ["pallas"] * 6
    assert resolve_implementations(named, SMALL) == named


def test_every_implementation_field_is_resolved():
    fields = {field.name for field in dataclasses.fields(ExecutionConfig)}
    assert set(OPERATIONS) == {name for name in fields if name.endswith("_implementation")}
    assert set(FIELDS) == set(OPERATIONS)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
def test_without_a_name_the_table_decides(platform, monkeypatch):
    monkeypatch.setitem(choice.TABLE, ("decode_attention", "cuda"), choice.Choice("pallas", "for this test"))
    choice._of_platform.cache_clear()
    named = resolve_implementations(PLAIN, SMALL, platform=platform)
    setup = make_setup(RUN, platform=platform)
    choice._of_platform.cache_clear()
    taken = [field.removesuffix("_implementation") for field in FIELDS if getattr(named, field) == "pallas"]
    on_cuda = ["attention", "experts", "cca", "decode", "newton_schulz"]
    on_rocm = ["attention", "residual", "cca"]
    assert taken == {"cpu": [], "cuda": on_cuda, "rocm": on_rocm}[platform]
    assert {getattr(named, field) for field in FIELDS} <= {"pallas", "xla", "ragged_dot+pallas", "pallas+xla"}
    assert (named.experts_implementation == "ragged_dot+pallas") == (platform == "rocm")
    assert setup.model.execution == named


def test_a_run_reports_its_kernels():
    assert describe_implementations(PLAIN, SMALL) == "Pallas kernels: none"
    one = dataclasses.replace(PLAIN, loss_implementation="pallas")
    assert describe_implementations(one, SMALL) == "Pallas kernels: loss; the rest by XLA"
    mixed = dataclasses.replace(one, experts_implementation="ragged_dot+pallas")
    assert describe_implementations(mixed, SMALL) == (
        "Pallas kernels: gradients of experts, loss; the rest by XLA"
    )
    every = dataclasses.replace(PLAIN, implementation="pallas")
    assert describe_implementations(every, SMALL) == (
        "Pallas kernels: attention, decode, experts, residual, cca, loss, newton_schulz; the rest by XLA"
    )


def test_a_wide_head_uses_no_kernel_by_default():
    wide = dataclasses.replace(SMALL, head_dim=512)
    assert resolve_implementations(PLAIN, wide, platform="rocm").attention_implementation == "xla"
    assert resolve_implementations(PLAIN, SMALL, platform="rocm").attention_implementation == "pallas"
