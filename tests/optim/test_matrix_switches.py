"""Hyperball, NorMuon and cautious decay of matrices, compared with the papers' formulas in float64."""

import dataclasses

import numpy as np
import pytest
from optimizer_steps import (
    CONVERGED,
    MODEL,
    RATE,
    nesterov,
    orthogonal,
    random_like,
    weights_after,
)

from zaya_jax.model.weights import declare, flatten_weights

INPUTS = {
    "layers/attention/q_proj": (2, 32),
    "layers/attention/o_proj": (2, 16),
    "layers/router/fc1/kernel": (2, 16),
    "layers/experts/down_proj": (2, 4, 24),
}
"""Numbers of matrices along each axis, and of their inputs."""
DECLARED = {path: flatten_weights(declare(MODEL))[path] for path in INPUTS}
NUM_STEPS = 3
GRADIENTS = [random_like(DECLARED, seed) for seed in (1, 2, 3)]
# Neurons of different sizes, which NorMuon evens out.
for tree in GRADIENTS:
    tree["layers/experts/down_proj"] *= np.geomspace(0.1, 10, 32)
PARAMS = random_like(DECLARED, 0)


def norm(matrices):
    return np.linalg.norm(matrices, axis=(-2, -1), keepdims=True)


def expected_weights(w, steps, *, normuon=False, hyperball=False, cautious_decay=False):
    """The papers' updates of matrices [..., outputs, inputs] with rates of 1, 2 and 3 times `RATE`."""
    m, n = w.shape[-2:]
    radius, v = norm(w), np.zeros((*w.shape[:-1], 1))
    for num in range(1, NUM_STEPS + 1):
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


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize(
    "switches", [("normuon", "cautious_decay"), ("hyperball",), ("normuon", "hyperball")]
)
def test_steps_equal_the_published_formulas(switches, num_devices):
    """On three devices a pool transposes and pads matrices; tests/multidevice has nodes."""
    on = dict.fromkeys(switches, True)
    actual = weights_after(
        dataclasses.replace(CONVERGED, **on), DECLARED, GRADIENTS, PARAMS, num_devices=num_devices
    )
    for path in INPUTS:
        steps = [published(tree[path], path) for tree in GRADIENTS]
        expected = expected_weights(published(PARAMS[path], path), steps, **on)
        # Updates are about 1e-2; ten steps of the iteration are within 1e-4 of the orthogonal matrix.
        np.testing.assert_allclose(published(actual[path], path), expected, atol=1e-5, err_msg=path)
