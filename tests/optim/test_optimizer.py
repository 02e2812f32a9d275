"""Which weight is moved by what, and how far."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zaya_jax.config import ModelConfig, OptimizerConfig
from zaya_jax.model.matrices import matrix_axes
from zaya_jax.model.weights import declare, flatten
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.parallel.deal import deal, from_parts, to_parts

MODEL = ModelConfig(
    vocab_size=43,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    moe_intermediate_size=24,
    num_experts=3,
    router_hidden_size=16,
    lm_head_bias=True,
)
RATE = 1e-2
OPTIMIZER = OptimizerConfig(learning_rate=RATE, weight_decay=0.5)

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


def by_path(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from by_path(value, f"{prefix}{name}/")
        else:
            yield prefix + name, np.asarray(value)


def random_like(declared, seed):
    random = np.random.default_rng(seed)

    def is_weight(leaf):
        return not isinstance(leaf, dict)

    def draw(weight):
        return jnp.asarray(random.standard_normal(weight.shape), jnp.float32)

    return jax.tree.map(draw, declared, is_leaf=is_weight)


def first_update(config, declared, gradients, params):
    dealt = deal(declared, 1, by_matrix=config.name == "muon")
    optimizer = make_optimizer(config, dealt, optax.constant_schedule(config.learning_rate))

    # Level 0 of the compiler: compiling is nearly all the time that this takes.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(gradients, params):
        parts = to_parts(dealt, params)
        updates, _ = optimizer.update(to_parts(dealt, gradients), optimizer.init(parts), parts, step=0)
        return from_parts(dealt, updates)

    return run(gradients, params)


def test_which_weight_is_moved_by_what():
    declared = flatten(declare(MODEL))
    assert set(declared) == set(MUON) | ADAMW_WITH_DECAY | ADAMW_WITHOUT_DECAY
    muon = {path: matrix_axes(weight) for path, weight in declared.items() if weight.matrix}
    assert muon == {path: optax.contrib.MuonDimensionNumbers(*axes) for path, axes in MUON.items()}
    assert {path for path, weight in declared.items() if weight.decay} == set(MUON) | ADAMW_WITH_DECAY


def test_the_linear_router_is_a_matrix():
    linear = dataclasses.replace(MODEL, router="linear")
    weight = flatten(declare(linear))["layers/router/kernel"]
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


def test_muon_orthogonalises_each_matrix_by_itself():
    """Gradients of one matrix are a thousand times another's; their updates are of one size."""
    declared = {path: weight for path, weight in flatten(declare(MODEL)).items() if path in MUON}
    config = dataclasses.replace(OPTIMIZER, weight_decay=0.0)
    params, gradients = random_like(declared, 0), random_like(declared, 1)
    sizes = jnp.geomspace(1, 1000, 2 * 3 * 2).reshape(2, 3, 1, 2, 1)
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
            # Five steps of the quintic bring singular values to about 0.7 .. 1.2, not to 1 (Jordan).
            singular = np.linalg.svd(matrix, compute_uv=False) / scale
            assert 0.5 < singular.min() <= singular.max() < 1.3, path
            assert np.sqrt(np.mean(matrix**2)) == pytest.approx(0.2 * RATE, rel=0.2), path
            assert np.vdot(matrix, gradient) < 0, path
            left, _, right = np.linalg.svd(gradient, full_matrices=False)
            towards = -(left @ right).ravel() @ matrix.ravel() / np.linalg.norm(matrix) / np.sqrt(len(right))
            assert towards > 0.95, path


def test_adamw_moves_the_rest_by_the_sign_of_the_first_gradient():
    declared = declare(MODEL)
    params, gradients = random_like(declared, 0), random_like(declared, 1)
    config = dataclasses.replace(OPTIMIZER, weight_decay=0.0)
    updates = dict(by_path(first_update(config, declared, gradients, params)))
    for path, gradient in by_path(gradients):
        if path in MUON:
            assert np.std(np.abs(updates[path])) > 1e-4, path
        else:
            np.testing.assert_allclose(updates[path], -RATE * np.sign(gradient), rtol=1e-3, err_msg=path)
