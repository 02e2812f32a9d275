"""Learning rates by hand, and one schedule over all phases of a run."""

import dataclasses

import numpy as np
import pytest

from zaya_jax.config import Config, OptimizerConfig
from zaya_jax.optim.schedules import learning_rate_schedule, phase_schedule

OPTIMIZER = OptimizerConfig(learning_rate=1.0, final_learning_rate=0.2, warmup_steps=10)


def rates(schedule, *steps):
    return [float(np.asarray(schedule(step))) for step in steps]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # At steps 0, 5, 10, 35, 60, 85, 110 and behind the end.
        ({"schedule": "constant"}, [0, 0.5, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [0, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"schedule": "cosine"}, [0, 0.5, 1, 0.6 + 0.4 * 0.5**0.5, 0.6, 0.6 - 0.4 * 0.5**0.5, 0.2, 0.2]),
        ({"schedule": "warmup_stable_decay", "decay_steps": 50}, [0, 0.5, 1, 1, 1, 0.6, 0.2, 0.2]),
        ({"schedule": "warmup_stable_decay", "decay_steps": 100}, [0, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
    ],
)
def test_schedules_by_hand(values, expected):
    schedule = phase_schedule(dataclasses.replace(OPTIMIZER, **values), 110)
    np.testing.assert_allclose(rates(schedule, 0, 5, 10, 35, 60, 85, 110, 1000), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_without_warm_up_the_first_step_has_the_whole_rate(name):
    config = dataclasses.replace(OPTIMIZER, schedule=name, warmup_steps=0)
    assert rates(phase_schedule(config, 100), 0) == [1]


def test_phases_follow_one_another():
    """The last step of a phase is still its own; the next phase begins with its own first rate."""
    config = Config.from_dict(
        {
            "optimizer": {"learning_rate": 1.0, "final_learning_rate": 0.2, "warmup_steps": 0},
            "phases": [
                {"name": "cosine", "steps": 100, "optimizer": {"warmup_steps": 10}},
                {"name": "level", "steps": 50, "optimizer": {"schedule": "constant", "learning_rate": 0.2}},
                {"name": "end", "steps": 20, "optimizer": {"schedule": "linear", "final_learning_rate": 0}},
            ],
        }
    )
    schedule = learning_rate_schedule(config)
    assert rates(schedule, 5, 10, 55) == pytest.approx([0.5, 1, 0.6])
    assert rates(schedule, 99)[0] == pytest.approx(0.2, abs=1e-3)
    assert rates(schedule, 100, 149) == pytest.approx([0.2, 0.2])
    assert rates(schedule, 150, 160, 169, 170) == pytest.approx([1, 0.5, 0.05, 0])
