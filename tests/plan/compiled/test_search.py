"""The search, with a fake compiler."""

import pytest

from zaya_jax.options import load_config
from zaya_jax.plan.command import config_of_phase
from zaya_jax.plan.compiled.search import cheapest_that_fits, context_devices_of, largest_that_fits, search
from zaya_jax.plan.memory import POLICIES

GIB = 2**30


@pytest.mark.parametrize("guess", [1, 7, 1000])
@pytest.mark.parametrize(
    ("limit", "expected"), [(100, 9), (110, 10), (109, 9), (19, 0), (20, 1), (5020, 501)]
)
def test_the_largest_micro_batch_is_found(limit, expected, guess):
    trials = []

    def size(rows):
        trials.append(rows)
        return 10 + 10 * rows

    assert largest_that_fits(size, limit=limit, guess=guess) == expected
    assert len(set(trials)) <= 14


def test_a_jump_in_memory_is_found():
    def size(rows):
        return 10 * rows + (30 if rows > 4 else 0)

    assert largest_that_fits(size, limit=75, guess=6) == 4


@pytest.mark.parametrize("guess", POLICIES)
@pytest.mark.parametrize("cheapest", [*POLICIES, None])
def test_the_cheapest_policy_is_found_from_any_guess(cheapest, guess):
    sizes = {remat: len(POLICIES) - i for i, remat in enumerate(POLICIES)}
    tried = []

    def size(remat):
        tried.append(remat)
        return sizes[remat]

    limit = 0 if cheapest is None else sizes[cheapest]
    assert cheapest_that_fits(size, POLICIES, limit=limit, guess=guess) == cheapest
    if guess == cheapest:  # it, and the next one, which is too large
        assert len(set(tried)) <= 2


def test_policies_and_micro_batches_are_searched():
    config = config_of_phase(load_config("configs/zaya1_8b.py", []))
    a_row = dict(zip(POLICIES, (40, 20, 9, 5, 4, 3), strict=True))

    def measure(config):
        assert config.execution.num_microbatches == 1
        return (50 + a_row[config.execution.remat] * config.data.batch_size // 1024) * GIB

    def model_time(config):
        assert config.data.batch_size == 4096
        return {POLICIES[2]: 0.65, POLICIES[3]: 0.62, POLICIES[4]: 0.64, POLICIES[5]: 0.8}[
            config.execution.remat
        ]

    # 4 sequences per GPU
    result = search(config, 1024, limit=100 * GIB, measure=measure, model_time=model_time)
    assert result.cheapest_remat == POLICIES[2]
    assert (list(result.seconds), result.fastest_remat) == (list(POLICIES[2:]), POLICIES[3])
    assert (result.largest_remat, result.largest_micro_batch) == (POLICIES[-1], 16)
    assert result.fewest_context_devices == 1
    assert [each.node_devices for each in result.sharings] == [1, 8]
    assert all(each.seconds is None for each in result.sharings)  # with "products" 130 GiB
    compiled = [(trial.remat, trial.micro_batch, trial.context_devices) for trial in result.trials]
    assert len(set(compiled)) == len(compiled)


def test_a_step_that_does_not_fit_is_reported():
    config = config_of_phase(load_config("configs/zaya1_8b.py", []))
    result = search(config, 1024, limit=GIB, measure=lambda _: 2 * GIB, model_time=lambda _: 1.0)
    assert result.cheapest_remat is None
    assert (result.seconds, result.fastest_remat) == ({}, None)
    assert result.largest_micro_batch == 0
    assert result.fewest_context_devices is None


@pytest.mark.parametrize(("limit", "fewest"), [(300, 1), (255, 2), (128, 2), (127, 4), (33, 8), (8, 32)])
def test_the_fewest_gpus_per_sequence_are_found(limit, fewest):
    config = config_of_phase(load_config("configs/zaya1_8b.py", []), "finetune")  # 8 GPUs per sequence

    # One sequence per group: 256 bytes over its GPUs.
    result = search(
        config, 128, limit=limit, measure=lambda config: 2 * config.data.batch_size, model_time=lambda _: 1.0
    )
    assert result.fewest_context_devices == fewest


def test_gpus_per_sequence_are_limited_by_batch_and_length():
    config = config_of_phase(load_config("configs/zaya1_8b.py", []), "finetune")  # 128 sequences
    assert context_devices_of(config, 1024) == [8, 16, 32, 64, 128, 256, 512, 1024]
    config = config_of_phase(load_config("configs/tiny.py", ["--config.data.sequence_length=24"]))
    assert context_devices_of(config, 8) == [1, 2, 4]  # two chunks per GPU
