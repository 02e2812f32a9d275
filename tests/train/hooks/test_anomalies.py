"""Loss spikes, starved experts and diverging devices, in synthetic values."""

import itertools

import numpy as np
import pytest

from zaya_jax.config import WatchConfig
from zaya_jax.train.hooks.anomalies import ExpertLoadMonitor, LossSpikeDetector
from zaya_jax.train.step.replica_checksums import Mismatch, find_mismatched_devices


def losses(seed, count=4000, noise=0.02):
    """Returns losses like those of a run: falling quickly, then slowly, with noise between batches."""
    steps = np.arange(count)
    falling = 2.0 + 6.0 * np.exp(-steps / 60) + 3.0 * np.exp(-steps / 900)
    return falling + noise * np.random.default_rng(seed).standard_normal(count)


def spikes(config, values):
    finder = LossSpikeDetector(config)
    actual = (finder.add(step, float(loss)) for step, loss in enumerate(values, start=1))
    return [each for each in actual if each is not None]


@pytest.mark.parametrize("noise", [0.002, 0.02, 0.3])
def test_a_falling_noisy_loss_has_no_spike(noise):
    """In twelve runs of 4,000 steps, with a single-batch outlier now and then."""
    for seed in range(12):
        values = losses(seed, noise=noise)
        values[np.random.default_rng(seed).choice(4000, 20)] += 3.0
        assert spikes(WatchConfig(), values) == []


@pytest.mark.parametrize("first", [40, 333, 2900])
def test_a_spike_is_reported_after_enough_high_losses(first):
    values = losses(1)
    values[first - 1 :] += 1.0 + 10.0 * np.exp(-first / 60)
    actual = spikes(WatchConfig(spike_steps=6), values[: first + 20])[0]
    assert (actual.first, actual.last) == (first, first + 5)
    assert actual.median == pytest.approx(np.median(values[max(first - 33, 0) : first - 1]))
    assert actual.loss == pytest.approx(np.mean(values[first - 1 : first + 5]))


def test_a_loss_that_recovers_is_no_spike_and_nan_is_ignored():
    values = losses(2)
    values[1000:1009] += 2.0
    values[1100:1200] = np.nan
    assert spikes(WatchConfig(), values) == []
    values[1000:1010] += 2.0
    assert [each.first for each in spikes(WatchConfig(), values)] == [1001]


def test_known_earlier_losses_count():
    config = WatchConfig(spike_steps=2)
    finder = LossSpikeDetector(config, losses(3)[2000:2064])
    assert finder.add(2065, 6.0) is None
    assert finder.add(2066, 6.0).first == 2065
    assert LossSpikeDetector(config).add(2065, 6.0) is None


def test_starved_experts_are_reported_once_and_again_after_recovery():
    """Two layers, three experts and the skip class: expert 1 of layer 0 has no tokens, expert 2 of layer 1
    all.
    """
    watch = ExpertLoadMonitor(WatchConfig(expert_alert_lines=3, collapse_share=0.9))
    starved = np.array([[5, 0, 4, 1], [0, 0, 97, 3]])
    even = np.array([[3, 3, 3, 1], [3, 3, 3, 1]])
    actual = [watch.add(starved) for _ in range(5)]
    assert [len(each) for each in actual] == [0, 0, 4, 0, 0]
    assert [(each.layer, each.expert, each.is_dead) for each in actual[2]] == [
        (0, 1, True),
        (1, 0, True),
        (1, 1, True),
        (1, 2, False),
    ]
    assert str(actual[2][3]) == "expert 2 of layer 1 had 97% of the tokens"
    assert watch.add(even) == []
    assert [len(watch.add(starved)) for _ in range(3)] == [0, 0, 4]


def test_the_skip_class_is_not_an_expert():
    """All tokens may skip: then no expert has nearly all tokens, and each has none."""
    watch = ExpertLoadMonitor(WatchConfig(expert_alert_lines=1))
    assert all(each.is_dead for each in watch.add(np.array([[0, 0, 10]])))


@pytest.mark.parametrize("count", [3, 4, 8])
def test_mismatched_devices_are_those_outside_the_majority(count):
    assert find_mismatched_devices([7] * count) is None
    for number in range(count):
        values = [7] * count
        values[number] = 8
        assert find_mismatched_devices(values) == Mismatch((number,), is_known=True)
    assert find_mismatched_devices([1, 2]) == Mismatch((0, 1), is_known=False)
    assert find_mismatched_devices([1, 1, 2, 2]) == Mismatch((0, 1, 2, 3), is_known=False)
    for values in itertools.product((5, 6), repeat=3):
        assert (find_mismatched_devices(values) is None) == (len(set(values)) == 1)
