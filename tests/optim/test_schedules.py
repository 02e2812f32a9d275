"""Learning rates by hand, and one schedule over all phases of a run."""

import dataclasses

import numpy as np
import pytest

from zaya_jax.config import Config, OptimizerConfig
from zaya_jax.optim.schedules import learning_rate_schedule, phase_schedule

OPTIMIZER = OptimizerConfig(learning_rate=1.0, final_learning_rate=0.2, warmup_steps=10)


def rates(schedule, *steps):
    return [float(np.asarray(schedule(step))) for step in steps]


def rates_of(schedule, *steps):
    """Returns the rates of steps, which are counted from 1."""
    return rates(schedule, *(step - 1 for step in steps))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # At steps 1, 5, 10, 35, 60, 85, 110 and after the end.
        ({"schedule": "constant"}, [0.1, 0.5, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [0.1, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"schedule": "cosine"}, [0.1, 0.5, 1, 0.6 + 0.4 * 0.5**0.5, 0.6, 0.6 - 0.4 * 0.5**0.5, 0.2, 0.2]),
        ({"schedule": "warmup_stable_decay", "decay_steps": 50}, [0.1, 0.5, 1, 1, 1, 0.6, 0.2, 0.2]),
        ({"schedule": "warmup_stable_decay", "decay_steps": 100}, [0.1, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
    ],
)
def test_schedules_by_hand(values, expected):
    schedule = phase_schedule(dataclasses.replace(OPTIMIZER, **values), 110)
    np.testing.assert_allclose(rates_of(schedule, 1, 5, 10, 35, 60, 85, 110, 1000), expected, rtol=1e-6)


DECAYS = [("linear", 0), ("cosine", 0), ("warmup_stable_decay", 7), ("warmup_stable_decay", 20)]


@pytest.mark.parametrize("warmup", [0, 1, 2, 13])
@pytest.mark.parametrize(("name", "decay"), DECAYS)
def test_the_last_step_has_the_final_rate_and_no_step_has_zero(name, decay, warmup):
    config = dataclasses.replace(
        OPTIMIZER, schedule=name, decay_steps=min(decay, 20 - warmup), warmup_steps=warmup
    )
    actual = rates_of(phase_schedule(config, 20), *range(1, 21))
    assert actual[max(warmup, 1) - 1] == pytest.approx(1)
    assert actual[-1] == pytest.approx(0.2, rel=1e-6)
    assert all(rate > 0 for rate in actual)
    assert actual[: warmup or 1] == pytest.approx([(i + 1) / (warmup or 1) for i in range(warmup or 1)])
    assert (np.diff(actual[max(warmup, 1) - 1 :]) <= 1e-7).all()


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_without_warm_up_the_first_step_has_the_full_rate(name):
    """Also in a phase of one step."""
    config = dataclasses.replace(OPTIMIZER, schedule=name, warmup_steps=0)
    assert rates_of(phase_schedule(config, 100), 1) == [1]
    assert rates_of(phase_schedule(config, 1), 1) == [1]


def test_phases_follow_one_another():
    """Each has its own first rate and its own last."""
    config = Config.from_dict(
        {
            "optimizer": {"learning_rate": 1.0, "final_learning_rate": 0.2, "warmup_steps": 0},
            "phases": [
                {"name": "cosine", "steps": 100, "optimizer": {"warmup_steps": 10}},
                {"name": "level", "steps": 50, "optimizer": {"schedule": "constant", "learning_rate": 0.2}},
                {"name": "end", "steps": 21, "optimizer": {"schedule": "linear", "final_learning_rate": 0}},
            ],
        }
    )
    schedule = learning_rate_schedule(config)
    assert rates_of(schedule, 5, 10, 55) == pytest.approx([0.5, 1, 0.6])
    assert rates_of(schedule, 100, 101, 150) == pytest.approx([0.2, 0.2, 0.2])
    assert rates_of(schedule, 151, 161, 170, 171) == pytest.approx([1, 0.5, 0.05, 0], abs=1e-6)
