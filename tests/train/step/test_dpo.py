"""The preference loss: values and gradients by hand, packed and separate pairs, and whole steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_models import EXECUTION, SMALL

from zaya_jax.config import BalancingConfig, Config, DataConfig, LoraConfig
from zaya_jax.data.chats.packed_windows import window_of_bytes, window_to_bytes, with_reference
from zaya_jax.data.chats.templates.encoding import EncodedChat
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.weights import initialize
from zaya_jax.model.zaya import Zaya
from zaya_jax.optim.balancing import make_balancer
from zaya_jax.optim.partition import make_partition
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.step.dpo import preference_loss, side_sums
from zaya_jax.train.step.state import TrainSetup, first_state
from zaya_jax.train.step.train_step import evaluate_step, reference_step, train_step

ROWS, LENGTH, WIDTH, BETA = 4, 32, 16, 0.3
MESH = data_mesh(jax.devices()[:1])


def declared(rank=0):
    """Returns the weights of the small network, with adapters if the rank is above 0."""
    data = DataConfig(sequence_length=LENGTH)
    return declare_run(Config(model=SMALL, data=data, lora=LoraConfig(rank=rank)))


@functools.cache
def setup(rank=0):
    return TrainSetup(
        Zaya(SMALL, EXECUTION),
        make_partition(declared(rank), 1),
        optax.sgd(1.0),  # whose update is the gradient
        make_balancer(BalancingConfig(learning_rate=1e-2)),
        dpo_beta=BETA,
    )


def side(numbers, length):
    """Returns random tokens, of which the last and some others are learned."""
    learned_T = numbers.random(length) < 0.5
    learned_T[-1] = True
    return EncodedChat(numbers.integers(1, SMALL.vocab_size, length).astype(np.int32), learned_T)


@functools.cache
def pairs():
    """Pairs of the minimum length, with unequal sides, and one that fills a window."""
    numbers = np.random.default_rng(0)
    return [[side(numbers, n) for n in lengths] for lengths in ((2, 2), (20, 12), (3, 9), (7, 4))]


def batch_of(windows, reference=None):
    """Puts pairs by number into windows, one per row; remaining rows are padding."""
    rows = []
    for numbers in [*windows, *[[]] * (ROWS - len(windows))]:
        chats = [chat for number in numbers for chat in pairs()[number]]
        raw = window_to_bytes(chats, length=LENGTH, pad_id=0, dtype="<u2")
        row = window_of_bytes(raw, length=LENGTH, pad_id=0, dtype="<u2")
        if reference is not None:
            row = with_reference(row, np.array([reference[i] for i in numbers], np.float32).reshape(-1))
        rows.append(row)
    return jax.tree.map(lambda *each: jnp.asarray(np.stack(each)), *rows)


APART, PACKED = [[0], [1], [2], [3]], [[3, 0, 2], [1]]
# Far from the network's values, so that no two pairs have the same margin.
REFERENCE = -np.random.default_rng(1).uniform(1, 60, (4, 2))


# The loss alone, against float64


def by_hand(x_BTD, table_VD, bias_V, batch):
    """Returns the sum of -log sigmoid over single pairs, and their margins."""
    logits_BTV = x_BTD @ table_VD.T + bias_V
    log_probs_BTV = logits_BTV - jnp.log(jnp.exp(logits_BTV).sum(axis=-1, keepdims=True))
    margins = []
    for b in range(ROWS):
        for chosen in range(1, batch.segments_BT[b].max(), 2):
            ratios = []
            for segment in (chosen, chosen + 1):
                times = np.flatnonzero((batch.segments_BT[b] == segment) & (batch.weights_BT[b] > 0))
                policy = log_probs_BTV[b, times, batch.targets_BT[b, times]].sum()
                ratios.append(policy - batch.reference_BT[b, batch.segments_BT[b] == segment].sum())
            margins.append(BETA * (ratios[0] - ratios[1]))
    return sum(-jnp.log(1 / (1 + jnp.exp(-margin))) for margin in margins), jnp.stack(margins)


@pytest.mark.parametrize(("chunk", "bias"), [(4096, True), (24, False)])
def test_loss_and_gradients_are_those_of_the_formula(chunk, bias):
    numbers = np.random.default_rng(2)
    batch = jax.tree.map(np.asarray, batch_of(PACKED, REFERENCE))
    x_BTD = 0.5 * numbers.standard_normal((ROWS, LENGTH, WIDTH))
    table_VD = 0.5 * numbers.standard_normal((SMALL.vocab_size, WIDTH))
    bias_V = numbers.standard_normal(SMALL.vocab_size) if bias else np.zeros(SMALL.vocab_size)
    with jax.enable_x64():
        exact = [jnp.asarray(each, jnp.float64) for each in (x_BTD, table_VD, bias_V)]
        hand = functools.partial(by_hand, batch=batch)
        (loss, margins), expected = jax.value_and_grad(hand, argnums=(0, 1, 2), has_aux=True)(*exact)
        loss, margins, expected = jax.tree.map(np.asarray, (loss, margins, expected))

    def ours(x_BTD, table_VD, bias_V):
        result = preference_loss(
            x_BTD,
            table_VD,
            bias_V if bias else None,
            batch,
            beta=BETA,
            divisor=jnp.float32(4),
            execution=dataclasses.replace(EXECUTION, loss_chunk=chunk),
        )
        return result.objective, result

    arguments = [jnp.asarray(each, jnp.float32) for each in (x_BTD, table_VD, bias_V)]
    gradients, result = jax.jit(jax.grad(ours, argnums=(0, 1, 2), has_aux=True))(*arguments)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(result.metrics["rewards/margins"], margins.sum(), rtol=1e-5)
    assert result.metrics["rewards/accuracies"] == (margins > 0).sum()
    assert 0 < (margins > 0).sum() < len(margins) == 4
    for name, gradient, exactly in zip("xtb", gradients, expected, strict=True):
        if bias or name != "b":
            np.testing.assert_allclose(4 * gradient, exactly, rtol=1e-4, atol=1e-6)


def test_sums_of_sides_are_exact():
    """2**24 and 1 have no sum in float32: a difference of running sums would lose the second side."""
    segments_BT = jnp.array([[1, 1, 2, 2, 3, 3, 4, 4, 0], [1, 2, 0, 0, 0, 0, 0, 0, 0]])
    values_BT = jnp.array([[2.0**24, 2, 1, 3, 5, 7, 0, 1, 9], [1, 2, 9, 9, 9, 9, 9, 9, 9]])
    sums = jax.jit(side_sums)(values_BT, segments_BT)
    np.testing.assert_array_equal(sums, [[[2**24 + 2, 4], [12, 1]], [[1, 2], [0, 0]]])


# The step


@functools.cache
def start(rank=0):
    weights = initialize(declared(rank), jax.random.key(0))
    return jax.jit(functools.partial(first_state, setup(rank)))(weights, jax.random.key(1))


@functools.cache
def program(function, rank=0, **options):
    return jax.jit(functools.partial(function, setup=setup(rank), mesh=MESH, **options))


close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


@functools.cache
def after_one_step(packed, num_microbatches=1):
    batch = batch_of(PACKED if packed else APART, REFERENCE)
    return program(train_step, num_microbatches=num_microbatches)(start(), batch)


def check_equal(actual, expected):
    (state, metrics), (expected_state, expected_metrics) = actual, expected
    assert metrics.num_targets == expected_metrics.num_targets == 4
    for name in ("loss", "preferences", "gradient_norm"):
        jax.tree.map(close, getattr(metrics, name), getattr(expected_metrics, name))
    jax.tree.map(close, state.buckets, expected_state.buckets)
    np.testing.assert_array_equal(metrics.router_counts_LX, expected_metrics.router_counts_LX)
    jax.tree.map(close, state.router_bias_LX, expected_state.router_bias_LX)


def test_packed_pairs_equal_single_ones():
    check_equal(after_one_step(packed=True), after_one_step(packed=False))


def test_two_microbatches_equal_one():
    check_equal(after_one_step(packed=False, num_microbatches=2), after_one_step(packed=False))


@pytest.mark.parametrize("rank", [0, 3])
def test_the_margin_of_the_reference_itself_is_zero(rank):
    """A policy that equals its reference has the loss log 2 per pair; adapters start there."""
    sides, num_pairs = program(reference_step, rank)(start(rank), batch_of(PACKED))
    np.testing.assert_array_equal(num_pairs, [3, 1, 0, 0])
    reference = np.zeros((4, 2))
    for row, numbers in enumerate(PACKED):
        reference[numbers] = sides[row, : len(numbers)]
    assert (reference < -1).all()
    assert not sides[0, 3:].any()
    close(sides, program(reference_step)(start(), batch_of(PACKED))[0])
    sums = program(evaluate_step, rank)(start(rank), batch_of(APART, reference))
    np.testing.assert_allclose(sums.loss, 4 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(sums.preferences["logps/chosen"], reference[:, 0].sum(), rtol=1e-5)
    assert abs(sums.preferences["rewards/margins"]) < 1e-4
