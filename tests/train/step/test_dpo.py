"""The preference loss: values and gradients by hand, packed and separate pairs, and whole steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_models import EXECUTION, SMALL

from zaya_jax.config import BalancingConfig, Config, DataConfig, DpoConfig, LoraConfig
from zaya_jax.data.chats.packed_windows import (
    window_of_bytes,
    window_to_bytes,
    with_label,
    with_labels,
    with_reference,
)
from zaya_jax.data.chats.templates.encoding import EncodedChat
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.weights import initialize
from zaya_jax.model.zaya import Zaya
from zaya_jax.optim.balancing import make_balancer
from zaya_jax.optim.partition import make_partition
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.step.dpo import BatchTotals, preference_loss, preference_means, side_sums
from zaya_jax.train.step.state import TrainSetup, first_state
from zaya_jax.train.step.train_step import evaluate_step, reference_step, train_step

torch = pytest.importorskip("torch", reason="the formulas are those of TRL, in torch")
import trl_losses  # noqa: E402  (needs torch)

ROWS, LENGTH, WIDTH, BETA = 4, 32, 16, 0.3
MESH = data_mesh(jax.devices()[:1])


def declared(rank=0):
    """Returns the weights of the small network, with adapters if the rank is above 0."""
    data = DataConfig(sequence_length=LENGTH)
    return declare_run(Config(model=SMALL, data=data, lora=LoraConfig(rank=rank), execution=EXECUTION))


@functools.cache
def setup(rank=0, loss_type="sigmoid"):
    return TrainSetup(
        Zaya(SMALL, EXECUTION),
        make_partition(declared(rank), 1),
        optax.sgd(1.0),  # whose update is the gradient
        make_balancer(BalancingConfig(learning_rate=1e-2)),
        dpo=DpoConfig(beta=BETA, loss_type=loss_type),
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


def batch_of(windows, reference=None, labels=None):
    """Puts pairs by number into windows, one per row; remaining rows are padding.

    With labels, the first side of each pair is an answer with a label.
    """
    rows = []
    for numbers in [*windows, *[[]] * (ROWS - len(windows))]:
        chats = [chat for number in numbers for chat in labeled(number, labels)]
        raw = window_to_bytes(chats, length=LENGTH, pad_id=0, dtype="<u2")
        row = window_of_bytes(raw, length=LENGTH, pad_id=0, dtype="<u2")
        if labels is not None:
            row = with_labels(row, raw, dtype="<u2")
        if reference is not None:
            row = with_reference(row, np.array([reference[i] for i in numbers], np.float32).reshape(-1))
        rows.append(row)
    return jax.tree.map(lambda *each: jnp.asarray(np.stack(each)), *rows)


def labeled(number, labels):
    first, second = pairs()[number]
    return (first if labels is None else with_label(first, bool(labels[number] > 0))), second


LABELS = np.array([1.0, -1.0, 1.0, -1.0])
APART, PACKED = [[0], [1], [2], [3]], [[3, 0, 2], [1]]
# Far from the network's values, so that no two pairs have the same margin.
REFERENCE = -np.random.default_rng(1).uniform(1, 60, (4, 2))


# The loss alone, against float64


def by_hand(config, x_BTD, table_VD, bias_V, batch):
    """Returns the mean loss over pairs and the losses of pairs, by the formulas of TRL in torch's float64."""
    logits_BTV = x_BTD @ table_VD.T + bias_V
    log_probs_BTV = torch.log_softmax(logits_BTV, dim=-1)
    sides, chosen_nll, num_chosen = [], 0.0, 0
    for b in range(ROWS):
        for segment in range(1, batch.segments_BT[b].max() + 1):
            times = np.flatnonzero(batch.segments_BT[b] == segment)
            # The last token of a side has no target, and a prompt has one only for "orpo".
            of_targets = log_probs_BTV[b, times[:-1], batch.targets_BT[b, times[:-1]]]
            weights = torch.tensor(batch.weights_BT[b, times[:-1]], dtype=torch.float64)
            reference = 0.0 if batch.reference_BT is None else batch.reference_BT[b, times].sum()
            sides.append(
                ((of_targets * weights).sum(), torch.tensor(float(reference)).double(), weights.sum())
            )
            if segment % 2:
                chosen_nll, num_chosen = chosen_nll - of_targets.sum(), num_chosen + len(times) - 1
    policy_N2, reference_N2, lengths_N2 = (
        torch.stack(each).reshape(-1, 2) for each in zip(*sides, strict=True)
    )
    labels_N = torch.tensor(np.concatenate([LABELS[numbers] for numbers in PACKED]))
    losses_N = trl_losses.losses(config, policy_N2, reference_N2, lengths_N2, labels_N)
    nll = chosen_nll / num_chosen if config.loss_type == "orpo" else 0.0
    return losses_N.mean() + nll, config.beta * (policy_N2 - reference_N2), num_chosen


LOSSES = [
    ("sigmoid", 4096, True), ("sigmoid", 24, False), ("ipo", 4096, True), ("orpo", 24, True),
    ("kto", 4096, True),
]  # fmt: skip


@pytest.mark.parametrize(("loss_type", "chunk", "bias"), LOSSES)
def test_loss_and_gradients_are_those_of_the_formula(loss_type, chunk, bias):
    config, numbers = DpoConfig(beta=BETA, loss_type=loss_type), np.random.default_rng(2)
    reference = REFERENCE if config.has_reference else None
    batch = batch_of(PACKED, reference, LABELS if config.is_unpaired else None)
    batch = jax.tree.map(np.asarray, batch)
    x_BTD = 0.5 * numbers.standard_normal((ROWS, LENGTH, WIDTH))
    table_VD = 0.5 * numbers.standard_normal((SMALL.vocab_size, WIDTH))
    bias_V = numbers.standard_normal(SMALL.vocab_size) if bias else np.zeros(SMALL.vocab_size)
    exact = [torch.tensor(each, requires_grad=True) for each in (x_BTD, table_VD, bias_V)]
    mean, rewards_N2, num_chosen = by_hand(config, *exact, batch)
    mean.backward()
    totals = BatchTotals(jnp.float32(4), jnp.float32(num_chosen) if loss_type == "orpo" else None)

    def ours(x_BTD, table_VD, bias_V):
        result = preference_loss(
            x_BTD,
            table_VD,
            bias_V if bias else None,
            batch,
            config=config,
            totals=totals,
            execution=dataclasses.replace(EXECUTION, loss_chunk=chunk),
        )
        return result.objective, result

    arguments = [jnp.asarray(each, jnp.float32) for each in (x_BTD, table_VD, bias_V)]
    gradients, result = jax.jit(jax.grad(ours, argnums=(0, 1, 2), has_aux=True))(*arguments)
    np.testing.assert_allclose(result.loss / 4, mean.item(), rtol=1e-5)
    for name, gradient, exactly in zip("xtb", gradients, exact, strict=True):
        if bias or name != "b":
            expected = exactly.grad.numpy()
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
    means = preference_means({name: float(value) for name, value in result.metrics.items()}, 4)
    if loss_type in ("sigmoid", "ipo"):
        margins_N = (rewards_N2[:, 0] - rewards_N2[:, 1]).detach().numpy()
        np.testing.assert_allclose(means["rewards/margins"], margins_N.mean(), rtol=1e-5)
        assert means["rewards/accuracies"] == (margins_N > 0).mean()
        assert 0 < (margins_N > 0).sum() < 4
    if loss_type == "kto":
        is_good_N = np.concatenate([LABELS[numbers] for numbers in PACKED]) > 0
        own_N = rewards_N2[:, 0].detach().numpy()
        np.testing.assert_allclose(means["rewards/chosen"], own_N[is_good_N].mean(), rtol=1e-5)
        np.testing.assert_allclose(means["rewards/rejected"], own_N[~is_good_N].mean(), rtol=1e-5)
        difference = own_N[is_good_N].mean() - own_N[~is_good_N].mean()
        np.testing.assert_allclose(means["rewards/margins"], difference, rtol=1e-5)
        assert "count/chosen" not in means


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
def program(function, rank=0, loss_type="sigmoid", **options):
    return jax.jit(functools.partial(function, setup=setup(rank, loss_type), mesh=MESH, **options))


close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


@functools.cache
def after_one_step(packed, num_microbatches=1, loss_type="sigmoid"):
    reference = None if loss_type == "orpo" else REFERENCE
    batch = batch_of(PACKED if packed else APART, reference, LABELS if loss_type == "kto" else None)
    step = program(train_step, loss_type=loss_type, num_microbatches=num_microbatches)
    return step(start(), batch)


def check_equal(actual, expected):
    (state, metrics), (expected_state, expected_metrics) = actual, expected
    assert metrics.num_targets == expected_metrics.num_targets == 4
    for name in ("loss", "preferences", "gradient_norm"):
        jax.tree.map(close, getattr(metrics, name), getattr(expected_metrics, name))
    jax.tree.map(close, state.buckets, expected_state.buckets)
    np.testing.assert_array_equal(metrics.router_counts_LX, expected_metrics.router_counts_LX)
    jax.tree.map(close, state.router_bias_LX, expected_state.router_bias_LX)


@pytest.mark.parametrize("loss_type", ["sigmoid", "orpo"])
def test_packed_pairs_equal_single_ones(loss_type):
    check_equal(after_one_step(True, loss_type=loss_type), after_one_step(False, loss_type=loss_type))


@pytest.mark.campaign
@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_two_microbatches_equal_one(loss_type):
    """The divergence of "kto" is that of the batch, in however many parts it is computed."""
    one, two = (after_one_step(False, num_microbatches=n, loss_type=loss_type) for n in (1, 2))
    check_equal(two, one)
    if loss_type == "kto":
        assert one[1].preferences["kl"] > 0.1


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
