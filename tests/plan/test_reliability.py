"""The model of failures, compared with a simulation, with values by hand, and with a run's events."""

import dataclasses
import json
import random

import pytest

from zaya_jax.aegis.views.goodput import BUCKETS, Goodput
from zaya_jax.plan.reliability import (
    Failures,
    best_interval,
    expect,
    failures_of_run,
    mean_seconds_between_failures,
)
from zaya_jax.plan.reliability_command import main


def simulate(given: Failures, intervals: int, seed: int) -> float:
    """The share of productive time of a run whose failures are drawn one by one."""
    drawn, time, done = random.Random(seed), 0.0, 0
    until_next = drawn.expovariate(1 / given.mean_seconds)
    while done < intervals:
        need = given.interval + given.stall
        if until_next >= need:
            until_next, time, done = until_next - need, time + need, done + 1
            continue
        time += until_next + given.restart
        until_next = drawn.expovariate(1 / given.mean_seconds)
    return done * given.interval / time


@pytest.mark.parametrize(
    "given",
    [
        Failures(28440.0, 600.0, 1.0, 300.0),
        Failures(600.0, 300.0, 20.0, 60.0),
        Failures(100.0, 200.0, 5.0, 50.0),
    ],
    ids=["a cluster", "a bad one", "a hopeless one"],
)
def test_the_model_equals_the_mean_of_simulated_runs(given):
    expected = expect(given)
    assert sum(dataclasses.astuple(expected)) == pytest.approx(1)
    result = [simulate(given, 20_000, seed) for seed in range(4)]
    assert sum(result) / 4 == pytest.approx(expected.productive, rel=0.02)


def test_a_published_figure():
    """7.9 hours, a save every ten minutes that costs a second, five minutes to restart: 97.7%."""
    assert expect(Failures(7.9 * 3600, 600.0, 1.0, 300.0)).productive == pytest.approx(0.977, abs=1e-3)
    assert mean_seconds_between_failures(1024) == pytest.approx(7.9 * 3600)
    assert mean_seconds_between_failures(2048) == pytest.approx(7.9 * 1800)


@pytest.mark.parametrize("mean", [3e2, 3e4, 3e6])
@pytest.mark.parametrize("stall", [0.1, 30.0])
def test_no_interval_is_better_than_the_best(mean, stall):
    given = Failures(mean, 1.0, stall, 60.0)
    best = best_interval(given)
    shares = [expect(dataclasses.replace(given, interval=best * f)).productive for f in (0.8, 1.0, 1.25)]
    assert shares[1] == max(shares)
    if stall < mean / 1000:  # where the square root of Young and Daly holds
        assert best == pytest.approx((2 * stall * mean) ** 0.5, rel=0.05)


def test_without_failures_only_saves_cost():
    expected = expect(Failures(1e12, 99.0, 1.0, 300.0))
    assert expected.productive == pytest.approx(0.99)
    assert expected.lost == pytest.approx(0, abs=1e-4)


def goodput(**seconds) -> Goodput:
    return Goodput(dict.fromkeys(BUCKETS, 0.0) | seconds, attempts=5, steps=900, lost_steps=100)


def test_the_parameters_of_a_run():
    result = failures_of_run(
        goodput(productive=900.0, save=50.0, hang=20.0, down=30.0, start=50.0, compile=100.0)
        , checkpoint_every=20,
    )  # fmt: skip
    assert result.interval == pytest.approx(18.0)
    assert result.stall == pytest.approx(1.0)
    assert result.restart == pytest.approx(50.0)
    assert result.mean_seconds == pytest.approx(950 / 4)
    with pytest.raises(ValueError, match="started 1 times"):
        failures_of_run(dataclasses.replace(goodput(), attempts=1), checkpoint_every=20)


def test_the_command_prints_its_assumptions(capsys):
    main(["--gpus=1024"])
    printed = capsys.readouterr().out
    assert "a failure every 7.9 h of work (1,024 GPUs of 8,090 hours each: Meta" in printed
    assert "a model, not measured on hardware" in printed
    main(["--mttf-hours=7.9", "--checkpoint-minutes=10", "--restart-seconds=300", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["expected"]["productive"] == pytest.approx(0.977, abs=1e-3)
    with pytest.raises(ValueError, match="--gpus is 0; it must be above 0"):
        main(["--gpus=0"])
