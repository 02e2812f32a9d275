"""Slowness: its words, and the time that it adds to the steps of a process."""

import pytest
from section_visits import Clock

from zaya_jax.aegis.watch import slowness
from zaya_jax.aegis.watch.fault_injection import Fault, FaultInjection, parse_faults
from zaya_jax.aegis.watch.slowness import Slowness
from zaya_jax.train.heartbeats import DISPATCH, READ, STEP, Heartbeats
from zaya_jax.train.hooks.hook import StepContext


def context_of(**values):
    context = object.__new__(StepContext)
    vars(context).update(values)
    return context


def test_slowness_is_parsed_next_to_other_faults():
    assert parse_faults(
        "slow@step=10:process=2:percent=30:steps=40, kill@step=3, slow@step=7:percent=2.5"
    ) == [
        Slowness(10, 2, 30.0, 40),
        Fault("kill", 3),
        Slowness(7, None, 2.5),
    ]


@pytest.mark.parametrize(
    "word",
    ["slow@step=3", "slow@step=3:percent=-5", "slow@step=3:process=1", "slow@step=3:percent=5:seconds=2"],
)
def test_an_invalid_slowness_is_refused(word):
    with pytest.raises(ValueError, match=f'ZAYA_FAULT has "{word}"; a slowness is slow@step=N:percent=P'):
        parse_faults(word)


def test_slow_steps_take_their_share_longer_and_lose_it_in_reading(tmp_path, monkeypatch):
    """Also if the steps are repeated, unlike other faults."""
    clock, step_seconds, naps = Clock(), 2.0, []

    def sleep(seconds):
        naps.append(seconds)
        clock.seconds += seconds

    monkeypatch.setattr(slowness.time, "monotonic", clock)
    monkeypatch.setattr(slowness.time, "sleep", sleep)
    for _ in range(2):
        heartbeats = Heartbeats(clock)
        heartbeats.enter(READ, 1)
        context = context_of(heartbeats=heartbeats, state=None, step=0)
        injection = FaultInjection(parse_faults("slow@step=2:process=1:percent=25:steps=4"), str(tmp_path), 1)
        for step, _ in enumerate(injection.wrap_batches(context, iter("abcdefgh")), start=1):
            heartbeats.enter(DISPATCH, step)
            clock.seconds += step_seconds
            heartbeats.enter(READ, step + 1)
    # The first slow step only starts the measurement of the process's own steps.
    assert naps == 2 * [0.0, 0.5, 0.5, 0.5]
    assert heartbeats.seconds()[READ] == pytest.approx(1.5)
    assert heartbeats.seconds()[STEP] == 0


def test_other_processes_are_as_fast_as_before(tmp_path):
    batches = iter("ab")
    injection = FaultInjection(parse_faults("slow@step=2:process=1:percent=25"), str(tmp_path), 0)
    assert injection.wrap_batches(context_of(step=0), batches) is batches
