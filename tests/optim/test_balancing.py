"""The controllers of the router biases: their arithmetic, and a closed loop with real routers on text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from balancing_simulation import EVEN, MODEL, read_tokens, simulate, steps_until_even

from zaya_jax.config import BalancingConfig
from zaya_jax.model.router import route
from zaya_jax.optim.balancing import load_entropy, load_error, make_balancer, scale_by_pid

# By rule: the learning rate, and the number of steps within which it balances routers that send 90% of the
# tokens to one of 16 experts.
STEPS = {"adamw": (1e-2, 60), "sign": (3e-3, 160), "pid": (3e-2, 110)}
SKIP_SHARE = 0.1
NUM_STEPS, NUM_TOKENS = 300, 4096


@functools.cache
def simulation():
    """Returns counts [S, L, X] for each rule, for one that balances the skip class, and without balancing."""
    configs = {rule: BalancingConfig(rule=rule, learning_rate=rate) for rule, (rate, _) in STEPS.items()}
    configs["skip"] = BalancingConfig(learning_rate=1e-2, skip_share=SKIP_SHARE)
    configs["none"] = BalancingConfig(learning_rate=0.0)
    tokens_PJ = read_tokens(NUM_STEPS * NUM_TOKENS)
    counts = simulate(list(configs.values()), tokens_PJ, num_steps=NUM_STEPS, num_tokens=NUM_TOKENS)
    return dict(zip(configs, counts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("rule", STEPS)
def test_each_rule_evens_out_a_router_that_sends_nearly_all_to_one_expert(rule):
    counts_SLX = simulation()[rule]
    np.testing.assert_allclose(counts_SLX[0, :, 0] / NUM_TOKENS, 0.9, atol=0.02)
    _, limit = STEPS[rule]
    assert 0 < steps_until_even(counts_SLX) <= limit
    late_SL = jax.vmap(load_entropy)(jnp.asarray(counts_SLX[-100:]))
    assert np.asarray(late_SL).mean(axis=0).min() > EVEN


@pytest.mark.slow
def test_without_a_controller_the_load_stays_uneven():
    assert steps_until_even(simulation()["none"]) is None


def test_the_skip_class_is_balanced_to_its_share():
    """Experts share the rest; with a constant bias, no token skips."""
    shares_LX = simulation()["skip"][-100:].mean(axis=0) / NUM_TOKENS
    np.testing.assert_allclose(shares_LX[:, -1], SKIP_SHARE, atol=0.01)
    np.testing.assert_allclose(shares_LX[:, :-1], (1 - SKIP_SHARE) / MODEL.num_experts, atol=0.01)
    assert not simulation()["adamw"][:, :, -1].any()


def test_errors_by_hand():
    """Of 10 tokens, 2 skip: the experts' shares of all tokens are 6/10 and 2/10."""
    counts_LX = jnp.array([[6, 2, 2], [0, 5, 5], [0, 0, 0]])
    expected_LX = [[0.1, -0.3, 0], [-0.5, 0, 0], [-0.5, -0.5, 0]]
    np.testing.assert_allclose(load_error(counts_LX), expected_LX, atol=1e-7)
    expected_LX = [[0.2, -0.2, 0], [-0.4, 0.1, 0.3], [-0.4, -0.4, -0.2]]
    np.testing.assert_allclose(load_error(counts_LX, skip_share=0.2), expected_LX, atol=1e-7)


def test_counts_of_a_large_batch_are_exact():
    """16.78M tokens, and an expert with one more than its share: float32 must still distinguish them."""
    counts_LX = jnp.array([[2**23 + 1, 2**23 - 1, 0]])
    np.testing.assert_array_equal(load_error(counts_LX), [[2**-24, -(2**-24), 0]])


def steps_of(config, counts):
    """Returns the biases after each of several batches, from zero."""
    balancer = make_balancer(config)
    bias_LX = jnp.zeros(counts[0].shape)
    state, biases = balancer.init(bias_LX), []
    for counts_LX in counts:
        updates, state = balancer.update(counts_LX, state, bias_LX)
        bias_LX = optax.apply_updates(bias_LX, updates)
        biases.append(bias_LX)
    return biases


COUNTS = [jnp.array([[6, 2, 2]]), jnp.array([[4, 4, 2]]), jnp.array([[9, 1, 0]])]


def test_the_sign_rule_by_hand():
    biases = steps_of(BalancingConfig(rule="sign", learning_rate=0.5), COUNTS)
    np.testing.assert_allclose(biases, [[[-0.5, 0.5, 0]], [[0, 1, 0]], [[-0.5, 1.5, 0]]], atol=1e-7)


def test_pid_equals_the_textbook_formula():
    """Increments add up to the sum of errors, the error and its change, each with its gain."""
    config = BalancingConfig(rule="pid", learning_rate=0.3, proportional=2.0, derivative=0.7)
    errors = np.array([load_error(counts_LX) for counts_LX in COUNTS])
    change = np.diff(errors, axis=0, prepend=0)
    expected = -0.3 * (np.cumsum(errors, axis=0) + 2.0 * errors + 0.7 * change)
    np.testing.assert_allclose(steps_of(config, COUNTS), expected, rtol=1e-5, atol=1e-7)


def test_pid_without_a_history_has_no_jump():
    """The state contains only errors: their sum is in the biases."""
    state = scale_by_pid(1.0, 1.0).init(jnp.full((2, 3), 0.5))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state))


def test_adamw_starts_with_the_learning_rate_against_the_error():
    biases = steps_of(BalancingConfig(learning_rate=0.25), COUNTS[:1])
    np.testing.assert_allclose(biases[0], [[-0.25, 0.25, 0]], rtol=1e-4)  # 1 - 0.999 in float32


def test_adamw_equals_the_published_formula():
    """Bias-corrected means are weighted ones ([Adam] section 3): the newest weighs 1, those before
    beta, beta^2 and on. A large eps has an effect; the skip class has no error and a constant bias."""
    beta1, beta2, eps, rate = 0.8, 0.3, 0.05, 0.25
    config = BalancingConfig(learning_rate=rate, beta1=beta1, beta2=beta2, eps=eps)
    errors = np.array([[[0.1, -0.3, 0]], [[-0.1, -0.1, 0]], [[0.4, -0.4, 0]]])  # of COUNTS
    expected, bias_LX = [], np.zeros((1, 3))
    for num in range(1, 4):
        age = np.arange(num)[::-1]
        mean = np.average(errors[:num], axis=0, weights=beta1**age)
        square = np.average(errors[:num] ** 2, axis=0, weights=beta2**age)
        bias_LX = bias_LX - rate * mean / (np.sqrt(square) + eps)
        expected.append(bias_LX)
    np.testing.assert_allclose(steps_of(config, COUNTS), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", STEPS)
def test_biases_and_states_are_float32(rule):
    balancer = make_balancer(BalancingConfig(rule=rule))
    bias_LX = jnp.zeros((1, 3))
    updates, state = balancer.update(COUNTS[0], balancer.init(bias_LX), bias_LX)
    floats = [leaf.dtype for leaf in jax.tree.leaves((updates, state)) if leaf.dtype != jnp.int32]
    assert set(floats) == {jnp.dtype("float32")}


def test_no_gradient_reaches_the_biases():
    """Nor does one pass through the choice that they affect: only the chosen probability has a gradient."""
    kernel_DX = jnp.eye(3)
    x_BTD = jnp.array([[[1.0, 0.9, 0.0], [0.2, 0.0, 0.1]]])

    def chosen(bias_X):
        state_BTR = jnp.zeros((1, 2, 1))
        return route(x_BTD, state_BTR, {"kernel": kernel_DX}, jnp.zeros(1), bias_X, eps=1e-5).weights_BT.sum()

    gradient_X = jax.grad(chosen)(jnp.array([0.0, 0.3, 0.0]))
    np.testing.assert_array_equal(gradient_X, np.zeros(3))


def test_load_entropy_by_hand():
    """Shares 3/4 and 1/4 have 0.811278 bits; skipped tokens are not a load."""
    counts_LX = jnp.array([[5, 5, 7], [8, 0, 3], [3, 1, 0]])
    np.testing.assert_allclose(load_entropy(counts_LX), [1, 0, 0.811278], atol=1e-6)
    np.testing.assert_allclose(load_entropy(jnp.array([[2, 2, 2, 0, 9]])), [np.log(3) / np.log(4)], rtol=1e-6)
    np.testing.assert_array_equal(load_entropy(jnp.array([[4, 1], [0, 0]])), [1, 1])
