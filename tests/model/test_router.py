"""The MLP router against its formula in float64 ([ZAYA1-8B] eqs. 1-5)."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from zaya_jax.model.router import route

NUM_TOKENS, WIDTH, ROUTER_WIDTH, CLASSES, EPS = 40, 12, 6, 5, 0.3


def gelu(x):
    """Uses the error function, not its approximation."""
    return x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2


def test_the_router_equals_its_formula():
    """With bfloat16 input only the operands of the first product are bfloat16; the rest is float32."""
    random = np.random.default_rng(0)
    x_PD = random.standard_normal((NUM_TOKENS, WIDTH)).astype(ml_dtypes.bfloat16)
    state_PR = random.standard_normal((NUM_TOKENS, ROUTER_WIDTH)).astype(np.float32)
    eda_scale_R = random.uniform(0.5, 2, ROUTER_WIDTH).astype(np.float32)
    bias_X = np.array([0, 0, 0.2, 0, -1], np.float32)
    shapes = {"down_proj": (WIDTH, ROUTER_WIDTH), "fc1": (ROUTER_WIDTH,) * 2, "fc2": (ROUTER_WIDTH,) * 2}
    weights = {
        name: {
            "kernel": random.normal(0, 0.5, shape).astype(np.float32),
            "bias": random.normal(0, 0.5, ROUTER_WIDTH).astype(np.float32),
        }
        for name, shape in shapes.items()
    }
    weights["norm"] = {"scale": random.uniform(0.5, 2, ROUTER_WIDTH).astype(np.float32)}
    weights["out_proj"] = random.normal(0, 0.5, (ROUTER_WIDTH, CLASSES)).astype(np.float32)

    def linear(x, name, kernel=None):
        kernel = np.float64(weights[name]["kernel"] if kernel is None else kernel)
        return x @ kernel + weights[name]["bias"]

    rounded = weights["down_proj"]["kernel"].astype(ml_dtypes.bfloat16)
    expected_PR = linear(np.float64(x_PD), "down_proj", rounded) + eda_scale_R * np.float64(state_PR)
    root_P1 = np.sqrt(np.mean(expected_PR**2, axis=1, keepdims=True) + EPS)
    hidden_PR = gelu(linear(weights["norm"]["scale"] * expected_PR / root_P1, "fc1"))
    logits_PX = gelu(linear(hidden_PR, "fc2")) @ np.float64(weights["out_proj"])
    probs_PX = np.exp(logits_PX) / np.exp(logits_PX).sum(axis=1, keepdims=True)
    experts_P = np.argmax(probs_PX + bias_X, axis=1)
    for other_PX in (probs_PX, logits_PX + bias_X):
        assert np.any(experts_P != np.argmax(other_PX, axis=1)), "the bias, on probabilities, must matter"

    given = jax.tree.map(jnp.asarray, (x_PD[None], state_PR[None], weights, eda_scale_R, bias_X))
    routing = route(*given, eps=EPS)
    np.testing.assert_allclose(routing.state_BTR[0], expected_PR, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(routing.probs_BTX[0], probs_PX, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(routing.experts_BT[0], experts_P)
    np.testing.assert_allclose(routing.weights_BT[0], probs_PX[np.arange(NUM_TOKENS), experts_P], rtol=1e-4)
