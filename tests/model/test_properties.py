"""Properties of the network for any weights: documents, causality, depth, remat, skipping."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models
from small_models import EXECUTION, SMALL

from pallas_kernels.rms_norm import rms_norm
from zaya_jax.config import ExecutionConfig
from zaya_jax.model import zaya
from zaya_jax.model.layer_input import layer_inputs
from zaya_jax.model.remat import group_size
from zaya_jax.model.rope import rotations
from zaya_jax.model.router import route
from zaya_jax.model.weights import abstract_variables, count_parameters
from zaya_jax.options import load_config

VOCABULARY, TIME = SMALL.vocab_size, 16
SLIDING = dataclasses.replace(small_models.SLIDING, cca_time0=3, sliding_window=3)
CONFIGS = pytest.mark.parametrize("config", [SMALL, SLIDING], ids=["taps 2 2", "taps 3 2, sliding"])


@functools.cache
def variables_of(config):
    """Returns weights without constant initial values, under which a forgotten scale or bias would be
    invisible.
    """
    random = np.random.default_rng(5)

    def value(path, leaf):
        name = jax.tree_util.keystr(path)
        mean = 1.0 if "scale" in name or "temperature" in name else 0.0
        return jnp.asarray(random.normal(mean, config.initializer_range, leaf.shape), jnp.float32)

    return jax.tree.map_with_path(value, abstract_variables(config))


def tokens_of(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0, static_argnames="execution")
def loss_and_gradient(
    config, variables, tokens_BT, positions_BT, segments_BT, targets_BT, weights_BT, *, execution=EXECUTION
):
    """Returns summed loss, its gradient by the weights, and the logits."""

    def loss(params):
        bias_LX = variables["router_bias"]["layers"]
        out = zaya.forward(config, execution, params, bias_LX, tokens_BT, positions_BT, segments_BT)
        losses_BT = optax.softmax_cross_entropy_with_integer_labels(out.logits_BTV, targets_BT)
        return jnp.sum(losses_BT * weights_BT), out

    (total, out), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    return total, gradient, out


def assert_trees_are_close(ours, theirs, tolerance):
    """Compares by the norm of each leaf; a leaf that is zero throughout proves nothing and is an error."""
    for (path, expected), result in zip(
        jax.tree.leaves_with_path(theirs), jax.tree.leaves(ours), strict=True
    ):
        norm = np.linalg.norm(expected)
        assert norm > 0, f"{jax.tree_util.keystr(path)} is zero"
        assert np.linalg.norm(result - expected) < tolerance * norm, jax.tree_util.keystr(path)


LENGTHS = [[5, 1, 1, 7, 2], [1] * 11]
"""Lengths of the documents of each row; the rest of the second row is padding."""
ROWS = sum(map(len, LENGTHS))
"""Of every batch: as many as there are documents, so that one program serves both packings."""


def batch_of(rows):
    """Returns tokens, positions, segments, targets and weights of rows of documents, drawn by document
    number.
    """
    batch = [np.zeros((ROWS, TIME), dtype) for dtype in ("int32",) * 4 + ("float32",)]
    for row, documents in enumerate(rows):
        end = 0
        for segment, (number, length) in enumerate(documents, start=1):
            random = np.random.default_rng(number)
            tokens, targets = random.integers(0, VOCABULARY, (2, length))
            values = (tokens, np.arange(length), segment, targets, random.uniform(0.5, 2, length))
            for array, value in zip(batch, values, strict=True):
                array[row, end : end + length] = value
            end += length
    return batch


def spans():
    """Yields row, first token and end of each document in the packed batch."""
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        yield from ((row, end - length, end) for length, end in zip(lengths, ends, strict=True))


def packed():
    """Many documents in two rows; the other rows are padding."""
    numbered = iter(enumerate(itertools.chain(*LENGTHS)))
    return batch_of([[next(numbered) for _ in lengths] for lengths in LENGTHS])


def alone():
    """The same documents, one per row."""
    return batch_of([[document] for document in enumerate(itertools.chain(*LENGTHS))])


@CONFIGS
def test_packed_documents_equal_single_ones(config):
    variables = variables_of(config)
    loss, gradient, out = loss_and_gradient(config, variables, *packed())
    loss_alone, gradient_alone, out_alone = loss_and_gradient(config, variables, *alone())
    for new, (row, start, end) in enumerate(spans()):
        np.testing.assert_allclose(
            out.logits_BTV[row, start:end], out_alone.logits_BTV[new, : end - start], rtol=1e-4, atol=1e-4
        )
        np.testing.assert_array_equal(
            out.router.experts_LBT[:, row, start:end], out_alone.router.experts_LBT[:, new, : end - start]
        )
    np.testing.assert_allclose(loss, loss_alone, rtol=1e-5)
    assert_trees_are_close(gradient, gradient_alone, 1e-4)


@CONFIGS
def test_without_segments_a_row_is_one_document(config):
    """Padding on the right, which no token sees, does not matter."""
    variables, (tokens_BT, *_) = variables_of(config), alone()
    out = loss_and_gradient(config, variables, *alone())[2]
    length = max(LENGTHS[0])
    row = LENGTHS[0].index(length)
    arguments = variables["params"], variables["router_bias"]["layers"], tokens_BT[row : row + 1, :length]
    plain = jax.jit(functools.partial(zaya.forward, config, EXECUTION))(*arguments)
    np.testing.assert_allclose(plain.logits_BTV[0], out.logits_BTV[row, :length], rtol=1e-4, atol=1e-4)


@CONFIGS
def test_padding_is_not_counted(config):
    out = loss_and_gradient(config, variables_of(config), *packed())[2]
    num_tokens = sum(map(sum, LENGTHS))
    np.testing.assert_array_equal(out.router.counts_LX.sum(axis=1), [num_tokens] * config.num_hidden_layers)
    experts_LP = out.router.experts_LBT[:, packed()[2] != 0]
    expected_LX = [np.bincount(experts_P, minlength=config.num_router_classes) for experts_P in experts_LP]
    np.testing.assert_array_equal(out.router.counts_LX, expected_LX)


@functools.partial(jax.jit, static_argnums=0)
def logits_and_pull_back(config, variables, tokens_BT, grad_BTV):
    """Returns logits, and the gradient by the embedded tokens for the cotangent `grad_BTV`."""
    params, bias_LX = variables["params"], variables["router_bias"]["layers"]

    def behind_embedding(x_BTD):
        context = zaya.Context(config, EXECUTION, rotations(config, jnp.arange(TIME)[None]), None, None)
        x_BTD = zaya.layers(context, params, bias_LX, x_BTD)[0]
        return zaya.head(config, params, x_BTD)

    logits_BTV, pull_back = jax.vjp(behind_embedding, zaya.embed(params["embedding"], tokens_BT))
    return logits_BTV, pull_back(grad_BTV)[0]


@CONFIGS
def test_no_token_sees_a_later_one(config):
    tokens_BT, variables = tokens_of(1, TIME), variables_of(config)
    for time in (1, 7, TIME - 1):
        later_BT = np.where(np.arange(TIME) == time, (tokens_BT + 1) % VOCABULARY, tokens_BT)
        grad_BTV = np.ones((1, TIME, VOCABULARY), np.float32) * np.arange(VOCABULARY)
        grad_BTV[:, time:] = 0
        logits_BTV, grad_BTD = logits_and_pull_back(config, variables, tokens_BT, grad_BTV)
        changed_BTV, _ = logits_and_pull_back(config, variables, later_BT, grad_BTV)
        np.testing.assert_allclose(logits_BTV[:, :time], changed_BTV[:, :time], rtol=1e-6, atol=1e-6)
        assert np.abs(logits_BTV - changed_BTV)[:, time].max() > 0.1
        assert not np.any(grad_BTD[:, time:])
        assert np.abs(grad_BTD[:, :time]).max(axis=-1).all()


def test_the_scan_is_a_loop_over_layers():
    tokens_BT, variables = jnp.asarray(tokens_of(2, TIME)), variables_of(SLIDING)
    params, bias_LX = variables["params"], variables["router_bias"]["layers"]

    @jax.jit
    def unrolled(params):
        context = zaya.Context(SLIDING, EXECUTION, rotations(SLIDING, jnp.arange(TIME)[None]), None, None)
        inputs = layer_inputs(SLIDING, params, bias_LX, 2, None)
        x_BTD = zaya.embed(params["embedding"], tokens_BT)
        state_BTR = jnp.zeros((2, TIME, SLIDING.router_hidden_size))
        experts_LBT = []
        for number in range(SLIDING.num_hidden_layers):
            layer = jax.tree.map(lambda leaf, number=number: leaf[number], inputs)
            out = zaya.decoder_layer(context, layer, x_BTD, state_BTR, None)
            x_BTD, state_BTR = out.x_BTD, out.routing.state_BTR
            experts_LBT.append(out.routing.experts_BT)
        x_BTD = rms_norm(x_BTD, params["final_norm"]["scale"], eps=SLIDING.rms_norm_eps)
        return zaya.head(SLIDING, params, x_BTD), jnp.stack(experts_LBT)

    logits_BTV, experts_LBT = unrolled(params)
    out = jax.jit(functools.partial(zaya.forward, SLIDING, EXECUTION))(params, bias_LX, tokens_BT)
    np.testing.assert_allclose(out.logits_BTV, logits_BTV, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out.router.experts_LBT, experts_LBT)
    assert len(np.unique(experts_LBT)) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "scan_layers", "num_layers"),
    [
        ("products", True, 4),
        ("group", True, 4),  # two groups of two
        ("none", False, SLIDING.num_hidden_layers),
        pytest.param("none", False, 4, marks=pytest.mark.campaign),
        pytest.param("layer", True, 4, marks=pytest.mark.campaign),
        pytest.param("group", False, 4, marks=pytest.mark.campaign),
    ],
)
def test_neither_remat_nor_unrolling_changes_a_value(remat, scan_layers, num_layers):
    even = dataclasses.replace(SLIDING, num_hidden_layers=num_layers)
    variables = variables_of(even)
    execution = dataclasses.replace(EXECUTION, remat=remat, scan_layers=scan_layers)
    loss, gradient, out = loss_and_gradient(even, variables, *packed())
    loss_again, gradient_again, out_again = loss_and_gradient(even, variables, *packed(), execution=execution)
    np.testing.assert_allclose(loss_again, loss, rtol=1e-6)
    np.testing.assert_array_equal(out_again.router.experts_LBT, out.router.experts_LBT)
    assert_trees_are_close(gradient_again, gradient, 1e-5)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_layers_are_a_loop_where_configured(scan_layers):
    execution = dataclasses.replace(EXECUTION, experts_implementation="ragged_dot", scan_layers=scan_layers)
    variables = abstract_variables(SLIDING)
    arguments = variables["params"], variables["router_bias"]["layers"], tokens_of(2, TIME)
    program = jax.jit(functools.partial(zaya.forward, SLIDING, execution)).lower(*arguments).as_text()
    assert program.count("stablehlo.while") == int(scan_layers)


@pytest.mark.parametrize(("num_layers", "size"), [(40, 5), (60, 6), (16, 4), (4, 2), (7, 1), (1, 1)])
def test_the_group_size_is_about_the_square_root_of_the_depth(num_layers, size):
    """40 layers: 8 streams between groups and 5 within one are 13, the minimum over all divisors."""
    assert group_size(num_layers) == size


def moe_block(config, *, skip_bias):
    """Returns input and output of the first layer's experts block, and its routing."""
    variables = variables_of(config)
    bias_LX = jnp.zeros_like(variables["router_bias"]["layers"]).at[:, -1].set(skip_bias)
    x_BTD = jnp.asarray(np.random.default_rng(1).standard_normal((2, TIME, config.hidden_size)), jnp.float32)

    @jax.jit
    def run(params):
        inputs = layer_inputs(config, params, bias_LX, 2, None)
        layer = jax.tree.map(lambda leaf: leaf[0], inputs)
        context = zaya.Context(config, EXECUTION, (), None, None)
        return zaya.routed_experts(context, layer, x_BTD, jnp.zeros((2, TIME, config.router_hidden_size)))

    return x_BTD, *run(variables["params"])


def test_skipping_returns_zero_or_the_input_times_its_probability():
    _, out_BTD, routing = moe_block(SMALL, skip_bias=10.0)
    assert np.all(routing.experts_BT == SMALL.num_experts)
    assert not np.any(out_BTD)
    x_BTD, out_BTD, routing = moe_block(dataclasses.replace(SMALL, skip_class="identity"), skip_bias=10.0)
    np.testing.assert_allclose(out_BTD, routing.probs_BTX[..., -1:] * x_BTD, rtol=1e-6)


def test_tokens_that_do_not_skip_do_not_depend_on_the_skip_class():
    _, zero_BTD, routing = moe_block(SMALL, skip_bias=0.2)
    _, identity_BTD, _ = moe_block(dataclasses.replace(SMALL, skip_class="identity"), skip_bias=0.2)
    skips_BT = np.asarray(routing.experts_BT == SMALL.num_experts)
    assert 0 < skips_BT.sum() < skips_BT.size
    np.testing.assert_array_equal(zero_BTD[~skips_BT], identity_BTD[~skips_BT])
    assert np.abs(zero_BTD[~skips_BT]).max(axis=-1).all()
    assert not np.any(zero_BTD[skips_BT])
    assert np.abs(identity_BTD[skips_BT]).max(axis=-1).all()


def test_a_layers_experts_by_hand():
    """Each token passes through its expert alone, in float64."""
    x_BTD, out_BTD, routing = moe_block(SMALL, skip_bias=-10.0)
    experts = {
        name: np.float64(w[0]) for name, w in variables_of(SMALL)["params"]["layers"]["experts"].items()
    }
    for at in np.ndindex(2, TIME):
        expert = int(routing.experts_BT[at])
        gate_F, up_F = np.einsum("d,dqf->qf", np.float64(x_BTD[at]), experts["gate_up_proj"][expert])
        expected_D = (gate_F / (1 + np.exp(-gate_F)) * up_F) @ experts["down_proj"][expert]
        expected_D *= float(routing.probs_BTX[at][expert])
        np.testing.assert_allclose(out_BTD[at], expected_D, rtol=1e-4, atol=1e-5)


def test_balancing_biases_affect_the_choice_but_not_the_weight():
    """A hand-made router with probabilities 2/3 and 1/3, where the bias changes the choice."""
    x_BTD = jnp.ones((1, 1, 1))
    weights = {"kernel": jnp.log(jnp.array([[2.0, 1.0]]))}
    state_BTR = jnp.full((1, 1, 3), 7.0)

    def answer(bias):
        return route(x_BTD, state_BTR, weights, jnp.ones(3), jnp.array([0.0, bias]), eps=1e-5)

    plain, turned = answer(0.3), answer(0.4)
    assert plain.experts_BT.item() == 0
    assert turned.experts_BT.item() == 1
    np.testing.assert_allclose(plain.weights_BT.item(), 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(turned.weights_BT.item(), 1 / 3, rtol=1e-6)
    np.testing.assert_array_equal(plain.state_BTR, state_BTR)  # passed on unchanged


def test_the_linear_router():
    config = dataclasses.replace(SMALL, router="linear")
    variables = variables_of(config) | {"router_bias": {"layers": zaya.initial_router_bias(config)}}
    assert list(variables["params"]["layers"]["router"]) == ["kernel"]
    _, gradient, out = loss_and_gradient(config, variables, *packed())
    assert np.isfinite(out.logits_BTV).all()
    assert all(np.abs(gradient["layers"]["router"]["kernel"]).max(axis=(1, 2)) > 0)
    assert len(np.unique(out.router.experts_LBT)) > 2


@pytest.mark.slow
def test_bfloat16_is_near_float32():
    """Every layer's choice is fixed, because a token that changes its expert is not a rounding error."""
    bias_LX = 10 * jnp.eye(SMALL.num_hidden_layers, SMALL.num_router_classes)
    variables = variables_of(SMALL) | {"router_bias": {"layers": bias_LX}}
    loss, gradient, out = loss_and_gradient(SMALL, variables, *packed())
    half = ExecutionConfig(dtype="bfloat16")
    half_loss, half_gradient, half_out = loss_and_gradient(SMALL, variables, *packed(), execution=half)
    assert half_out.logits_BTV.dtype == jnp.float32
    assert all(
        leaf.dtype == jnp.float32 and np.isfinite(leaf).all() for leaf in jax.tree.leaves(half_gradient)
    )
    real_BT = packed()[2] != 0
    logits_PV, half_logits_PV = out.logits_BTV[real_BT], half_out.logits_BTV[real_BT]
    # 8 bits of mantissa, about ten products in sequence.
    assert 1e-4 < np.linalg.norm(half_logits_PV - logits_PV) / np.linalg.norm(logits_PV) < 3e-2
    np.testing.assert_allclose(half_loss, loss, rtol=2e-2)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
    off = jax.tree.map(jnp.subtract, half_gradient, gradient)
    assert np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(off))) < 5e-2 * norm


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("zaya1_8b", 8_840_488_784),
        ("zaya1_base", 8_840_488_784),
        ("zaya1_74b", 74_793_953_144),
        ("tiny", 1_188_836),
    ],
)
def test_parameters_of_presets(preset, count):
    config = load_config(f"configs/{preset}.py", []).model
    assert count_parameters(config) == count
    variables = jax.eval_shape(zaya.Zaya(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == count
    assert variables["router_bias"]["layers"].shape == (config.num_hidden_layers, config.num_experts + 1)


def test_the_program_does_not_grow_with_depth():
    def size(depth):
        config = dataclasses.replace(SLIDING, num_hidden_layers=depth)
        arrays = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in packed()]
        return len(loss_and_gradient.lower(config, abstract_variables(config), *arrays).as_text())

    assert size(12) == pytest.approx(size(2), rel=0.02)
