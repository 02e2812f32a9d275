"""Which optimizer updates which weight, and by how much."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_steps import (
    CONVERGED,
    MODEL,
    OPTIMIZER,
    RATE,
    by_path,
    in_float64,
    nesterov,
    orthogonal,
    random_like,
    weights_after,
)

from zaya_jax.model.weights import declare, flatten_weights
from zaya_jax.optim.buckets import from_buckets, to_buckets
from zaya_jax.optim.matrices import matrix_axes
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.partition import make_partition

MUON = {
    "layers/attention/q_proj": ((1,), (2, 3)),
    "layers/attention/k_proj": ((1,), (2, 3)),
    "layers/attention/v_proj_current": ((1,), (2,)),
    "layers/attention/v_proj_delayed": ((1,), (2,)),
    "layers/attention/o_proj": ((1, 2), (3,)),
    "layers/router/down_proj/kernel": ((1,), (2,)),
    "layers/router/fc1/kernel": ((1,), (2,)),
    "layers/router/fc2/kernel": ((1,), (2,)),
    "layers/router/out_proj": ((1,), (2,)),
    "layers/experts/gate_up_proj": ((2,), (4,)),
    "layers/experts/down_proj": ((2,), (3,)),
}
"""Input and output axes of each matrix; the other axes count matrices."""
ADAMW_WITH_DECAY = {
    "embedding/table",
    "layers/attention/conv_depthwise/kernel",
    "layers/attention/conv_grouped/kernel",
}
ADAMW_WITHOUT_DECAY = {
    "embedding/scale",
    "embedding/bias",
    "final_norm/scale",
    "head/bias",
    "layers/attention/conv_depthwise/bias",
    "layers/attention/conv_grouped/bias",
    "layers/attention/temperature",
    "layers/attention_norm/scale",
    "layers/moe_norm/scale",
    "layers/router/down_proj/bias",
    "layers/router/fc1/bias",
    "layers/router/fc2/bias",
    "layers/router/norm/scale",
    "layers/router/eda_scale",
    *(
        f"layers/{block}_residual/{name}"
        for block in ("attention", "moe")
        for name in ("output_scale", "output_bias", "residual_scale", "residual_bias")
    ),
}


def first_update(config, declared, gradients, params):
    partition = make_partition(declared, 1, by_matrix=config.name == "muon")
    optimizer = make_optimizer(config, partition, optax.constant_schedule(config.learning_rate))

    @jax.jit
    def run(gradients, params):
        buckets = to_buckets(partition, params)
        updates, _ = optimizer.update(
            to_buckets(partition, gradients), optimizer.init(buckets), buckets, step=0
        )
        return from_buckets(partition, updates)

    return run(gradients, params)


def test_the_optimizer_of_each_weight():
    declared = flatten_weights(declare(MODEL))
    assert set(declared) == set(MUON) | ADAMW_WITH_DECAY | ADAMW_WITHOUT_DECAY
    muon = {path: matrix_axes(weight) for path, weight in declared.items() if weight.matrix}
    assert muon == {path: optax.contrib.MuonDimensionNumbers(*axes) for path, axes in MUON.items()}
    assert {path for path, weight in declared.items() if weight.decay} == set(MUON) | ADAMW_WITH_DECAY


def test_the_linear_router_is_a_matrix():
    linear = dataclasses.replace(MODEL, router="linear")
    weight = flatten_weights(declare(linear))["layers/router/kernel"]
    assert matrix_axes(weight) == optax.contrib.MuonDimensionNumbers((1,), (2,))


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_without_a_gradient_only_decay_moves(name):
    declared = declare(MODEL)
    params = random_like(declared, 0)
    gradients = jax.tree.map(jnp.zeros_like, params)
    updates = dict(
        by_path(first_update(dataclasses.replace(OPTIMIZER, name=name), declared, gradients, params))
    )
    for path, param in by_path(params):
        decay = 0.0 if path in ADAMW_WITHOUT_DECAY else 0.5
        np.testing.assert_allclose(updates[path], -RATE * decay * param, rtol=1e-5, atol=1e-9, err_msg=path)


def test_muon_orthogonalizes_each_matrix_separately():
    """The gradients of one matrix are a thousand times another's; their updates have the same size."""
    declared = {path: weight for path, weight in flatten_weights(declare(MODEL)).items() if path in MUON}
    config = dataclasses.replace(OPTIMIZER, weight_decay=0.0)
    params, gradients = random_like(declared, 0), random_like(declared, 1)
    sizes = jnp.geomspace(1, 1000, 16).reshape(2, MODEL.num_experts, 1, 2, 1)
    gradients["layers/experts/gate_up_proj"] *= sizes
    for path in ("layers/router/fc1/kernel", "layers/router/fc2/kernel"):
        gradients[path] += 16 * jnp.eye(16)  # a random square matrix has singular values near zero
    updates = dict(by_path(first_update(config, declared, gradients, params)))
    for path, (reduced, output) in MUON.items():
        rest = [axis for axis in range(updates[path].ndim) if axis not in reduced + output]
        order = (*rest, *reduced, *output)
        rows = int(np.prod([updates[path].shape[axis] for axis in reduced]))
        matrices, of_gradients = (
            np.transpose(x[path], order).reshape(np.prod([x[path].shape[axis] for axis in rest]), rows, -1)
            for x in (updates, gradients)
        )
        scale = 0.2 * RATE * max(matrices.shape[1:]) ** 0.5
        for matrix, gradient in zip(matrices, of_gradients, strict=True):
            # Five steps of the quintic bring singular values to about 0.7 .. 1.2, not to 1 ([Muon]).
            singular = np.linalg.svd(matrix, compute_uv=False) / scale
            assert 0.5 < singular.min() <= singular.max() < 1.3, path
            assert np.sqrt(np.mean(matrix**2)) == pytest.approx(0.2 * RATE, rel=0.2), path
            assert np.vdot(matrix, gradient) < 0, path
            left, _, right = np.linalg.svd(gradient, full_matrices=False)
            towards = -(left @ right).ravel() @ matrix.ravel() / np.linalg.norm(matrix) / np.sqrt(len(right))
            assert towards > 0.95, path


def test_adamw_updates_the_rest_by_the_sign_of_the_first_gradient():
    declared = declare(MODEL)
    params, gradients = random_like(declared, 0), random_like(declared, 1)
    config = dataclasses.replace(OPTIMIZER, weight_decay=0.0)
    updates = dict(by_path(first_update(config, declared, gradients, params)))
    for path, gradient in by_path(gradients):
        if path in MUON:
            assert np.std(np.abs(updates[path])) > 1e-4, path
        else:
            np.testing.assert_allclose(updates[path], -RATE * np.sign(gradient), rtol=1e-3, err_msg=path)


def weighted(steps, decay):
    """Returns the weighted mean of arrays over steps: weight 1 for the newest, then decay, decay^2 and so
    on.
    """
    return np.average(steps, axis=0, weights=decay ** np.arange(len(steps))[::-1])


@pytest.mark.parametrize(("name", "is_cautious"), [("muon", False), ("adamw", False), ("adamw", True)])
def test_steps_of_adamw_equal_the_published_formula(name, is_cautious):
    """Bias-corrected means are weighted ones; decay is decoupled, and both are multiplied by the step's rate.

    Sources: [Adam] section 3, [AdamW] algorithm 2, and [CWD] algorithm 1.
    """
    decays = {"embedding/table": 0.5, "layers/router/norm/scale": 0, "layers/attention/temperature": 0}
    if name == "adamw":
        decays["layers/router/fc1/kernel"] = 0.5
    declared = {path: weight for path, weight in flatten_weights(declare(MODEL)).items() if path in decays}
    config = dataclasses.replace(
        OPTIMIZER, name=name, beta1=0.8, beta2=0.3, eps=0.1, matrix_rate=2.0, cautious_decay=is_cautious
    )
    params, gradients = random_like(declared, 0), [random_like(declared, seed) for seed in (1, 2, 3)]
    actual = weights_after(config, declared, gradients, params)
    for path, decay in decays.items():
        expected, steps = np.float64(params[path]), in_float64(gradients, path)
        for num in range(1, 4):
            square = weighted(steps[:num] ** 2, 0.3)
            update = weighted(steps[:num], 0.8) / (np.sqrt(square) + 0.1)
            decayed = (
                decay * np.where(update * expected >= 0, expected, 0) if is_cautious else decay * expected
            )
            rate = num * RATE * (2 if "kernel" in path else 1)
            expected = expected - rate * (update + decayed)
        np.testing.assert_allclose(actual[path], expected, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_steps_of_muon_equal_orthogonal_matrices_of_the_svd(num_devices):
    """Scaled by 0.2 sqrt(max(inputs, outputs)) of the matrix itself, also where a pool pads it.

    On 3 devices matrices of 16 x 16 share a pool with one of 16 x 32. Before the iteration, momentum looks
    ahead: Nesterov's, bias-corrected (Dozat 2016, algorithm 2).
    """
    paths = [
        "layers/attention/q_proj", "layers/attention/o_proj",
        "layers/router/fc1/kernel", "layers/experts/down_proj",
    ]  # fmt: skip
    declared = {path: flatten_weights(declare(MODEL))[path] for path in paths}
    params, gradients = random_like(declared, 0), [random_like(declared, seed) for seed in (1, 2, 3)]
    actual = weights_after(CONVERGED, declared, gradients, params, num_devices=num_devices)
    for path in paths:
        rows = int(np.prod([declared[path].shape[axis] for axis in MUON[path][0]]))
        leading = declared[path].shape[
            : MUON[path][0][0]
        ]  # the axes of these weights that precede the inputs
        matrices = (*leading, rows, -1)
        expected = np.float64(params[path]).reshape(matrices)
        steps = in_float64(gradients, path).reshape(-1, *expected.shape)
        for num in range(1, 4):
            update = 0.2 * max(expected.shape[-2:]) ** 0.5 * orthogonal(nesterov(steps, num))
            expected = expected - num * RATE * (update + 0.5 * expected)
        # Updates are about 1e-2; ten steps are within 1e-4 of the orthogonal matrix.
        np.testing.assert_allclose(actual[path].reshape(matrices), expected, atol=1e-5, err_msg=path)
