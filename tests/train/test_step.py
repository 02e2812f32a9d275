"""A step with several microbatches equals the step on the whole batch; both follow the mean gradient."""

import dataclasses
import functools
import itertools
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models
from flax.traverse_util import flatten_dict
from small_models import SMALL

from zaya_jax.config import BalancingConfig, ExecutionConfig, OptimizerConfig
from zaya_jax.data.reading.batch import Batch
from zaya_jax.model.weights import abstract_variables, declare, flatten_weights, initialize
from zaya_jax.model.zaya import Zaya, forward, initial_router_bias, residual_stream
from zaya_jax.optim.balancing import make_balancer
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.partition import make_partition
from zaya_jax.parallel.mesh import data_mesh, replicated
from zaya_jax.train.step.state import TrainSetup, from_checkpoint, shardings, to_checkpoint
from zaya_jax.train.step.state import first_state as state_of
from zaya_jax.train.step.train_step import evaluate_step, train_step

MODEL = SMALL
EXECUTION = dataclasses.replace(small_models.EXECUTION, loss_implementation="xla")
# With plain gradient descent the update is the gradient: Muon and AdamW would hide its scale.
SETUP = TrainSetup(
    Zaya(MODEL, EXECUTION),
    make_partition(declare(MODEL), 1),
    optax.sgd(1.0),
    make_balancer(BalancingConfig(learning_rate=1e-2)),
)
SCHEDULE = optax.constant_schedule(OptimizerConfig().learning_rate)
MUON = dataclasses.replace(
    SETUP, optimizer=make_optimizer(OptimizerConfig(warmup_steps=0), SETUP.partition, SCHEDULE)
)
MESH = data_mesh(jax.devices()[:1])
ROWS, TIME = 8, 16
DEEPER = dataclasses.replace(MODEL, num_hidden_layers=12)
KEY = jax.random.key(1)


@functools.cache
def uneven_batch():
    """Rows of two documents and padding of all lengths; two rows are all padding, one has no weight."""
    random = np.random.default_rng(0)
    tokens_BT, targets_BT = random.integers(0, MODEL.vocab_size, (2, ROWS, TIME)).astype(np.int32)
    ends_B1 = np.array([16, 0, 9, 16, 3, 0, 12, 7])[:, None]
    time_T = np.arange(TIME)
    segments_BT = np.where(time_T < ends_B1, 1 + (time_T >= 5), 0).astype(np.int32)
    positions_BT = np.where(segments_BT == 2, time_T - 5, time_T * (segments_BT == 1)).astype(np.int32)
    weights_BT = random.uniform(0, 2, (ROWS, TIME)) * (segments_BT > 0)
    weights_BT[3] = 0
    batch = Batch(tokens_BT, targets_BT, weights_BT.astype(np.float32), positions_BT, segments_BT)
    return jax.tree.map(jnp.asarray, batch)


def placed(state):
    """Returns a state with the sharding of a step's result: another one would compile a second program."""
    return jax.device_put(state, shardings(state, MESH))


@functools.cache
def first_state(setup=SETUP):
    return placed(jax.jit(lambda: state_of(setup, initialize(declare(MODEL), jax.random.key(0)), KEY))())


@functools.cache
def balanced(num_microbatches, remat):
    """Runs three steps that change only the router biases, which determine the next step's counts."""
    balancer = make_balancer(BalancingConfig(rule="pid", learning_rate=0.1, skip_share=0.2))
    model = Zaya(MODEL, dataclasses.replace(EXECUTION, remat=remat))
    setup = TrainSetup(model, SETUP.partition, optax.sgd(0.0), balancer)
    state, run = first_state(setup), program(setup, num_microbatches)
    counts = []
    for _ in range(3):
        state, metrics = run(state, uneven_batch())
        counts.append(np.asarray(metrics.router_counts_LX))
    return counts, state


@pytest.mark.slow
def test_accumulation_and_remat_do_not_touch_the_balancing():
    """Counts are integers of the global batch, so the biases are equal bitwise."""
    (counts, state), (expected_counts, expected) = balanced(4, "layer"), balanced(1, "none")
    np.testing.assert_array_equal(counts, expected_counts)
    assert np.any(counts[0] != counts[2]), "the biases must have mattered"
    np.testing.assert_array_equal(state.router_bias_LX, expected.router_bias_LX)
    chex.assert_trees_all_equal(state.balancer, expected.balancer)
    assert np.all(expected.router_bias_LX != initial_router_bias(MODEL))


@functools.cache
def program(setup, num_microbatches=1):
    # Not `compiled_step`, which donates the state: many tests here share one.
    return jax.jit(
        functools.partial(train_step, setup=setup, mesh=MESH, num_microbatches=num_microbatches),
        out_shardings=(shardings(first_state(setup), MESH), replicated(MESH)),
    )


@functools.cache
def step(num_microbatches):
    return program(SETUP, num_microbatches)(first_state(), uneven_batch())


def assert_near(ours, theirs):
    for (path, expected), result in zip(
        jax.tree.leaves_with_path(theirs), jax.tree.leaves(ours), strict=True
    ):
        norm = np.linalg.norm(expected)
        assert norm > 0, jax.tree_util.keystr(path)
        assert np.linalg.norm(result - expected) < 1e-5 * norm, jax.tree_util.keystr(path)


def moved(state):
    return jax.tree.map(jnp.subtract, state.params, first_state().params)


@pytest.mark.slow
def test_microbatches_change_nothing():
    (whole, whole_metrics), (parts, parts_metrics) = step(1), step(4)
    assert_near(moved(parts), moved(whole))
    np.testing.assert_array_equal(parts.router_bias_LX, whole.router_bias_LX)
    np.testing.assert_array_equal(parts_metrics.router_counts_LX, whole_metrics.router_counts_LX)
    for name in ("loss", "num_targets", "gradient_norm"):
        np.testing.assert_allclose(getattr(parts_metrics, name), getattr(whole_metrics, name), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_router_entropy_and_probability_are_means_over_tokens(num_microbatches):
    """Padding does not count, however it is split into microbatches."""
    state, batch = first_state(), uneven_batch()
    arguments = batch.tokens_BT, batch.positions_BT, batch.segments_BT
    expected_L = jax.jit(functools.partial(forward, MODEL, EXECUTION))(
        state.params, state.router_bias_LX, *arguments
    )
    metrics = step(num_microbatches)[1]
    np.testing.assert_allclose(metrics.router_entropy_L, expected_L.router.entropy_L, rtol=1e-5)
    np.testing.assert_allclose(metrics.router_probability_L, expected_L.router.probability_L, rtol=1e-5)


@pytest.mark.slow
def test_a_step_follows_the_gradient_of_the_mean_loss():
    """Including the mean square of the logsumexp, which the reported loss excludes."""
    batch, before = uneven_batch(), first_state()

    def mean_loss(params, z_loss):
        arguments = batch.tokens_BT, batch.positions_BT, batch.segments_BT
        logits_BTV = forward(MODEL, EXECUTION, params, before.router_bias_LX, *arguments).logits_BTV
        target_BT = jnp.take_along_axis(logits_BTV, batch.targets_BT[..., None], axis=-1)[..., 0]
        logsumexp_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
        loss, square = (
            jnp.sum(x_BT * batch.weights_BT) / batch.weights_BT.sum()
            for x_BT in (logsumexp_BT - target_BT, logsumexp_BT**2)
        )
        return loss + z_loss * square, loss

    gradient_of = jax.jit(jax.grad(mean_loss, has_aux=True))
    for z_loss, update_norms in ((0.0, True), (0.1, False)):  # metrics do not change the update
        gradient, loss = gradient_of(before.params, z_loss)
        setup = dataclasses.replace(SETUP, z_loss=z_loss, update_norms=update_norms)
        after, metrics = program(setup)(before, batch)
        assert bool(metrics.update_norms) == update_norms
        assert_near(moved(after), jax.tree.map(jnp.negative, gradient))
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
        np.testing.assert_allclose(metrics.gradient_norm, optax.tree.norm(gradient), rtol=1e-5)
        np.testing.assert_allclose(metrics.num_targets, batch.weights_BT.sum(), rtol=1e-6)
        assert after.step == 1


@pytest.mark.slow
def test_the_balancer_sees_the_whole_batch():
    """AdamW's first step changes a bias by the learning rate, against the sign of its excess tokens."""
    after, metrics = step(4)
    counts_LX = np.asarray(metrics.router_counts_LX)
    num_tokens = np.sum(uneven_batch().segments_BT > 0)
    np.testing.assert_array_equal(counts_LX.sum(axis=1), num_tokens)
    surplus_LE = counts_LX[:, :-1] / num_tokens - 1 / MODEL.num_experts
    moved_LX = after.router_bias_LX - initial_router_bias(MODEL)
    np.testing.assert_allclose(moved_LX[:, :-1], -1e-2 * np.sign(surplus_LE), rtol=1e-4)
    assert not np.any(moved_LX[:, -1])


def test_a_batch_without_targets_changes_nothing():
    batch = uneven_batch()
    empty = Batch(
        batch.tokens_BT, batch.targets_BT, 0 * batch.weights_BT, batch.positions_BT, batch.segments_BT
    )
    after, metrics = program(SETUP, 4)(first_state(), empty)
    assert metrics.loss == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(moved(after)))


def unlike(ours, theirs):
    """Returns the paths of leaves that differ bitwise."""
    pairs = zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    return [jax.tree_util.keystr(path) for (path, x), y in pairs if not jnp.array_equal(x, y)]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(value):
    """Weights, moments and router biases; an earlier step has filled the moments."""
    batch = uneven_batch()
    poisoned = dataclasses.replace(batch, weights_BT=batch.weights_BT.at[4, 1].set(value))
    run = program(MUON)
    before, _ = run(first_state(MUON), batch)
    after, metrics = run(before, poisoned)
    expected = dataclasses.replace(before, step=before.step + 1, skipped_steps=before.skipped_steps + 1)
    assert not unlike(after, expected)
    assert (after.step, after.skipped_steps, metrics.skipped_steps) == (2, 1, 1)
    assert all(norm == 0 for norm in metrics.update_norms.values())
    going_on, metrics = run(after, batch)
    assert metrics.skipped_steps == 1
    assert ".buckets['embedding/table']" in unlike(going_on, after)


@pytest.mark.slow
def test_clipping_scales_all_gradients_by_one_factor():
    clipped = dataclasses.replace(SETUP, clip_norm=0.1)
    after, metrics = program(clipped)(first_state(), uneven_batch())
    whole, whole_metrics = step(1)
    assert float(metrics.gradient_norm) == pytest.approx(float(whole_metrics.gradient_norm), rel=1e-6)
    assert metrics.gradient_norm > 0.1
    factor = 0.1 / metrics.gradient_norm
    for ours, theirs in zip(jax.tree.leaves(moved(after)), jax.tree.leaves(moved(whole)), strict=True):
        # Weights near 1 are rounded to 6e-8 before and after; updates are about 1e-3.
        np.testing.assert_allclose(ours, factor * theirs, rtol=1e-4, atol=3e-7)
    # With sgd(1.0) the update is the clipped gradient.
    np.testing.assert_allclose(np.linalg.norm(list(metrics.update_norms.values())), 0.1, rtol=1e-5)


def test_norms_by_group_are_of_all_weights_once():
    _, metrics = step(1)
    squares = sum(norm**2 for norm in metrics.gradient_norms.values())
    np.testing.assert_allclose(squares, metrics.gradient_norm**2, rtol=1e-5)
    experts = optax.tree.norm(moved(step(1)[0])["layers"]["experts"])  # the update of sgd(1.0)
    np.testing.assert_allclose(metrics.update_norms["experts"], experts, rtol=1e-5)
    np.testing.assert_allclose(metrics.gradient_norms["experts"], experts, rtol=1e-5)


def test_router_metrics_and_the_logit_bound():
    state = first_state()
    params = state.params
    params["layers"]["attention"]["temperature"] = jnp.array([[1.0, -3.0], [0.5, 2.0]])
    _, metrics = program(SETUP)(placed(state_of(SETUP, params, KEY)), uneven_batch())
    np.testing.assert_allclose(metrics.logit_bound, 3 * 8**0.5, rtol=1e-6)
    # The chosen class is the likeliest expert: its probability is at least an even share.
    assert np.all(metrics.router_probability_L > 1 / 5)
    assert np.all(metrics.router_probability_L < 1)


def test_a_state_of_other_devices_is_refused():
    others = dataclasses.replace(SETUP, partition=make_partition(declare(MODEL), 4))
    with pytest.raises(ValueError, match="the state has 1 devices, the setup 4 and the mesh 1"):
        train_step(first_state(), uneven_batch(), setup=others, mesh=MESH)


def test_a_state_is_repartitioned_for_other_devices():
    """Weights as declared and moments in buckets: on eight devices, three, and one again."""
    run = program(MUON)
    state, _ = run(first_state(MUON), uneven_batch())
    saved = to_checkpoint(state)
    shapes = jax.tree.map(lambda x: x.shape, saved["weights"]["params"])
    assert flatten_dict(shapes, sep="/") == {
        path: weight.shape for path, weight in flatten_weights(declare(MODEL)).items()
    }
    moved = state
    for num_devices in (8, 3, 1):
        setup = dataclasses.replace(MUON, partition=make_partition(declare(MODEL), num_devices))
        setup = dataclasses.replace(
            setup, optimizer=make_optimizer(OptimizerConfig(warmup_steps=0), setup.partition, SCHEDULE)
        )
        empty = jax.eval_shape(lambda setup=setup: state_of(setup, initialize(declare(MODEL), KEY), KEY))
        partition = functools.partial(from_checkpoint, like=empty, written=jax.eval_shape(lambda s: s, moved))
        moved = jax.jit(partition)(to_checkpoint(moved))
        moments = [x.shape[0] for x in jax.tree.leaves(moved.optimizer) if x.ndim]
        assert all(size % num_devices == 0 for size in moments)
    assert not unlike(to_checkpoint(moved), saved)


@pytest.mark.parametrize("what", ["loss", "gradient_norm"])
def test_a_loss_or_a_gradient_that_alone_is_not_finite_is_enough(what):
    """Weights whose sum float32 just holds: the summed loss overflows, the mean gradient does not. Logits
    of 1e20: the loss is finite, and the squares of gradients overflow."""
    params, batch = first_state().params, uneven_batch()
    if what == "loss":
        batch = dataclasses.replace(batch, weights_BT=batch.weights_BT * (3e38 / batch.weights_BT.sum()))
    else:
        params["final_norm"]["scale"] = jnp.full(MODEL.hidden_size, 1e20, jnp.float32)
    before = placed(state_of(SETUP, params, KEY))
    after, metrics = program(SETUP)(before, batch)
    wrong = [name for name in ("loss", "gradient_norm") if not jnp.isfinite(getattr(metrics, name))]
    assert wrong == [what]
    assert not unlike(after, dataclasses.replace(before, step=before.step + 1, skipped_steps=jnp.asarray(1)))


def test_scales_are_not_rounded_to_the_compute_dtype():
    """2^-12 is less than half of bfloat16's resolution at 1: rounded, the loss would be unchanged."""
    model = Zaya(MODEL, dataclasses.replace(EXECUTION, dtype="bfloat16"))
    setup = dataclasses.replace(SETUP, model=model)
    run = jax.jit(functools.partial(evaluate_step, setup=setup, mesh=MESH))
    losses = set()
    for scale in (1, 1 + 2**-12):
        params = first_state().params
        params["final_norm"]["scale"] = jnp.full(MODEL.hidden_size, scale, jnp.float32)
        losses.add(float(run(state_of(setup, params, KEY), uneven_batch()).loss))
    assert len(losses) == 2


def kept_bytes(remat):
    """Returns the values that a remat policy saves from the forward to the backward pass."""
    execution, bias_LX = dataclasses.replace(EXECUTION, remat=remat), initial_router_bias(DEEPER)

    def backward_of(params, tokens_BT):
        return jax.vjp(lambda p: residual_stream(DEEPER, execution, p, bias_LX, tokens_BT).x_BTD, params)[1]

    tokens_BT = jax.ShapeDtypeStruct(
        (256, TIME), jnp.int32
    )  # small compared with the weights, which are kept too
    kept = jax.eval_shape(backward_of, abstract_variables(DEEPER)["params"], tokens_BT)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))


def test_each_remat_policy_saves_less_than_the_previous_one():
    policies = typing.get_args(typing.get_type_hints(ExecutionConfig)["remat"])
    assert policies == ("none", "products", "attention_and_experts", "block", "layer", "group")
    sizes = [kept_bytes(remat) for remat in policies]
    assert all(more > 1.02 * less for more, less in itertools.pairwise(sizes)), sizes
