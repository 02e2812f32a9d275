"""The search, with a made-up compiler."""

import pytest

from zaya_jax.options import load_config
from zaya_jax.plan.command import config_of_phase
from zaya_jax.plan.memory import POLICIES
from zaya_jax.plan.search import cheapest_that_fits, largest_that_fits, search

GIB = 2**30


@pytest.mark.parametrize("guess", [1, 7, 1000])
@pytest.mark.parametrize(
    ("limit", "expected"), [(100, 9), (110, 10), (109, 9), (19, 0), (20, 1), (5020, 501)]
)
def test_the_largest_is_found(limit, expected, guess):
    trials = []

    def size(rows):
        trials.append(rows)
        return 10 + 10 * rows

    assert largest_that_fits(size, limit=limit, guess=guess) == expected
    assert len(set(trials)) <= 14


def test_a_step_in_the_sizes_is_found_too():
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
    assert cheapest_that_fits(size, limit=limit, guess=guess) == cheapest
    if guess == cheapest:  # it, and the one that is too large
        assert len(set(tried)) <= 2


def test_policies_and_micro_batches_are_searched():
    config = config_of_phase(load_config("configs/zaya1_8b.py", []))
    a_row = dict(zip(POLICIES, (40, 20, 9, 5, 4, 3), strict=True))

    def measure(config):
        assert config.execution.num_microbatches == 1
        return (50 + a_row[config.execution.remat] * config.data.batch_size // 1024) * GIB

    found = search(config, 1024, limit=100 * GIB, measure=measure)  # 4 sequences a GPU
    assert found.cheapest_remat == POLICIES[2]
    assert (found.largest_remat, found.largest_micro_batch) == (POLICIES[-1], 16)
    compiled = [(trial.remat, trial.micro_batch) for trial in found.trials]
    assert len(set(compiled)) == len(compiled)


def test_what_does_not_fit_is_said():
    config = config_of_phase(load_config("configs/zaya1_8b.py", []))
    found = search(config, 1024, limit=GIB, measure=lambda _: 2 * GIB)
    assert found.cheapest_remat is None
    assert found.largest_micro_batch == 0
