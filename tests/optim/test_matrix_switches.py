"""Hyperball, NorMuon and cautious decay of matrices, compared with the papers' formulas in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mapped_devices import mapped_over
from optimizer_steps import CONVERGED, MODEL, RATE, after_steps, by_path, nesterov, orthogonal, random_like

from zaya_jax.errors import UserError
from zaya_jax.model.weights import declare, flatten_weights
from zaya_jax.optim.buckets import from_buckets
from zaya_jax.optim.hyperball import hyperball_step
from zaya_jax.optim.matrices import MatrixAxes
from zaya_jax.optim.normuon import NorMuonState, from_elements, scale_by_neurons, to_elements
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.partition import MatrixStack, make_partition
from zaya_jax.parallel.mesh import DATA

INPUTS = {
    "layers/attention/q_proj": (2, 32),
    "layers/attention/o_proj": (2, 16),
    "layers/router/fc1/kernel": (2, 16),
    "layers/experts/down_proj": (2, 4, 24),
}
"""Numbers of matrices along each axis, and of their inputs."""
DECLARED = {path: flatten_weights(declare(MODEL))[path] for path in INPUTS}
GRADIENTS = [random_like(DECLARED, seed) for seed in (1, 2, 3)]
# Neurons of different sizes, which NorMuon evens out.
for tree in GRADIENTS:
    tree["layers/experts/down_proj"] *= np.geomspace(0.1, 10, 32)
PARAMS = random_like(DECLARED, 0)
SWITCHES = {
    "hyperball": ("hyperball",),
    "normuon": ("normuon", "cautious_decay"),
    "both": ("normuon", "hyperball"),
}


@functools.cache
def trained(name, num_devices):
    """Returns partition, buckets and optimizer state after three steps."""
    config = dataclasses.replace(CONVERGED, **dict.fromkeys(SWITCHES[name], True))
    return after_steps(config, DECLARED, GRADIENTS, PARAMS, num_devices=num_devices)


def norm(matrices):
    return np.linalg.norm(matrices, axis=(-2, -1), keepdims=True)


def expected_weights(w, steps, *, normuon=False, hyperball=False, cautious_decay=False):
    """The papers' updates of matrices [..., outputs, inputs] with rates of 1, 2 and 3 times `RATE`."""
    m, n = w.shape[-2:]
    radius, v = norm(w), np.zeros((*w.shape[:-1], 1))
    for num in range(1, len(steps) + 1):
        o, rate = orthogonal(nesterov(steps, num)), num * RATE
        u = 0.2 * max(m, n) ** 0.5 * o
        if normuon:
            v = 0.95 * v + 0.05 * np.mean(o * o, axis=-1, keepdims=True)
            o = o / (np.sqrt(v) + 1e-8)
            u = 0.2 * np.sqrt(m * n) / norm(o) * o
        if hyperball:
            moved = w - rate * radius * u / norm(u)
            w = radius * moved / norm(moved)
        else:
            w = w - rate * (u + 0.5 * np.where((u * w >= 0) | (not cautious_decay), w, 0))
    return w


def published(x, path):
    """Matrices of a weight in float64 as the papers write them, [..., outputs, inputs]."""
    return np.float64(x).reshape(*INPUTS[path], -1).swapaxes(-1, -2)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("hyperball", 3),
        ("normuon", 1),
        ("normuon", 3),
        pytest.param("hyperball", 1, marks=pytest.mark.campaign),
        pytest.param("both", 3, marks=pytest.mark.campaign),
    ],
)
def test_steps_equal_the_published_formulas(name, num_devices):
    """On three devices a pool transposes and pads matrices; tests/multidevice has nodes."""
    partition, buckets, _ = trained(name, num_devices)
    actual = dict(by_path(from_buckets(partition, buckets)))
    for path in INPUTS:
        steps = [published(tree[path], path) for tree in GRADIENTS]
        on = dict.fromkeys(SWITCHES[name], True)
        expected = expected_weights(published(PARAMS[path], path), steps, **on)
        # Updates are about 1e-2; ten steps of the iteration are within 1e-4 of the orthogonal matrix.
        np.testing.assert_allclose(published(actual[path], path), expected, atol=1e-5, err_msg=path)


def test_hyperball_keeps_norms_and_padding():
    """A step changes a norm by a rounding of about 1e-7."""
    partition, buckets, _ = trained("hyperball", 3)
    weights = dict(by_path(from_buckets(partition, buckets)))
    for path in INPUTS:
        first, last = (norm(published(x[path], path)) for x in (PARAMS, weights))
        np.testing.assert_allclose(last, first, rtol=1e-6, err_msg=path)
        assert np.abs(weights[path] - PARAMS[path]).max() > RATE / 10
    assert sum(np.count_nonzero(x) for x in buckets.values()) == sum(w.size for w in DECLARED.values())


def test_matrices_of_zeros_and_those_without_an_update_stay():
    """Padding, and experts that have had no token."""
    bucket = MatrixStack("w", 2, (3, 4), MatrixAxes((1,), (2,)))
    zeros = jnp.zeros((1, 2, 3, 4))
    large = 512 * jax.random.normal(jax.random.key(0), zeros.shape)
    step = mapped_over(DATA, lambda update, weight: hyperball_step(bucket, update, weight, -0.1))
    np.testing.assert_array_equal(step(large, zeros), zeros)
    np.testing.assert_array_equal(step(zeros, large), zeros)
    normuon = scale_by_neurons([bucket], 0.95, 1e-8, rms=512.0)
    scale = mapped_over(DATA, lambda x: normuon.update({"w": x}, normuon.init({"w": x}))[0]["w"])
    np.testing.assert_array_equal(scale(zeros), zeros)


def mean_squares(num_devices):
    """Returns matrix buckets by name, and NorMuon's state over all devices by bucket, whole and by weight."""
    partition, _, state = trained("normuon", num_devices)
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, NorMuonState))
    (found,) = (node for node in leaves if isinstance(node, NorMuonState))
    buckets = {each.name: each for each in partition.matrix_buckets}
    whole = {name: to_elements(buckets[name], x) for name, x in found.mean_square.items()}
    return buckets, found.mean_square, whole, dict(by_path(from_buckets(partition, whole)))


def test_mean_squares_move_to_other_numbers_of_devices():
    """They are the same for each neuron on one and three devices, and return to the same arrays."""
    trees = []
    for num_devices in (1, 3):
        buckets, state, whole, tree = mean_squares(num_devices)
        trees.append(tree)
        for name, x in state.items():
            assert x.size < whole[name].size / 4
            # The momentum has the shape of the bucket.
            assert to_elements(buckets[name], whole[name]) is whole[name]
            np.testing.assert_array_equal(from_elements(buckets[name], whole[name], x.shape), x)
    for path, shape in INPUTS.items():
        one, three = (x[path].reshape(*shape, -1) for x in trees)
        assert np.ptp(one, axis=-2).max() == 0 < np.ptp(one, axis=-1).min()
        np.testing.assert_allclose(three, one, rtol=1e-4, err_msg=path)


def test_matrices_that_start_at_zero_are_refused():
    path = "layers/router/fc1/kernel"
    declared = {path: dataclasses.replace(DECLARED[path], std=None)}
    config = dataclasses.replace(CONVERGED, hyperball=True)
    with pytest.raises(UserError, match=f"{path} starts at zero"):
        make_optimizer(config, make_partition(declared, 1), lambda step: RATE)
