"""Where a process is, how long it may be there, and which process is late."""

import pytest

from zaya_jax.aegis.heartbeats import (
    COMPILE,
    DISPATCH,
    ENOUGH,
    READ,
    REMEMBERED,
    RESTORE,
    SAVE,
    SECTIONS,
    START,
    STEP,
    Beat,
    Heartbeats,
    find_late,
    limit_of,
)
from zaya_jax.aegis.watchdog import Stillness
from zaya_jax.config import WatchConfig


class Clock:
    """A clock that goes as far as it is told."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def visit(heartbeats, clock, section, durations):
    """Visits to a section, and from it to the next."""
    for seconds in durations:
        heartbeats.enter(section, 1)
        clock.seconds += seconds
    heartbeats.enter(READ, 2)


def test_all_time_is_in_some_section(clock):
    heartbeats = Heartbeats(clock)
    clock.seconds += 3
    visit(heartbeats, clock, STEP, [1, 2])
    clock.seconds += 0.5
    assert heartbeats.seconds() == dict.fromkeys(SECTIONS, 0.0) | {START: 3.0, STEP: 3.0, READ: 0.5}


def test_a_section_within_another_one_leads_back_to_it(clock):
    heartbeats = Heartbeats(clock)
    clock.seconds += 1
    with heartbeats.within(RESTORE):
        clock.seconds += 5
    clock.seconds += 2
    assert heartbeats.beat.section == START
    assert {name: s for name, s in heartbeats.seconds().items() if s} == {START: 3.0, RESTORE: 5.0}
    with pytest.raises(OSError, match="gone"), heartbeats.within(RESTORE):
        raise OSError("gone")
    assert heartbeats.beat.section == RESTORE


def test_the_slowest_of_the_newest_visits_counts(clock):
    heartbeats = Heartbeats(clock)
    visit(heartbeats, clock, STEP, [5] + [1] * (ENOUGH - 2))
    assert heartbeats.slowest(STEP) is None
    visit(heartbeats, clock, STEP, [2])
    assert heartbeats.slowest(STEP) == 5
    visit(heartbeats, clock, STEP, [1] * REMEMBERED)
    assert heartbeats.slowest(STEP) == 1


@pytest.mark.parametrize(
    ("section", "slowest", "limit"),
    [
        (STEP, None, 500),  # not known yet
        (STEP, 20.0, 200),
        (STEP, 80.0, 500),  # never above what the config has
        (STEP, 0.01, 30),  # nor below
        (DISPATCH, 20.0, 200),
        (COMPILE, 1.0, 900),  # the next program may be another one
        (START, 1.0, 3600),
        (SAVE, None, None),
    ],
)
def test_limits_are_learned_and_capped(section, slowest, limit):
    config = WatchConfig(step_seconds=500.0, compile_seconds=900.0, save_seconds=None, least_seconds=30.0)
    assert limit_of(config, Beat(1, section, 5), slowest) == limit


def test_of_several_steps_each_has_its_time():
    config = WatchConfig(step_seconds=500.0)
    assert limit_of(config, Beat(1, STEP, 40, 10), None) == 5000


def test_a_queue_that_is_full_for_the_first_time_is_no_fault(clock):
    heartbeats = Heartbeats(clock)
    visit(heartbeats, clock, DISPATCH, [0.001] * 100)
    assert heartbeats.slowest(DISPATCH) is None
    visit(heartbeats, clock, STEP, [7] * ENOUGH)
    assert heartbeats.slowest(DISPATCH) == 7


@pytest.mark.parametrize(
    ("counts", "late"),
    [([7, 7, 7], []), ([7, 5, 7], [1]), ([5, 7, 5], [0, 2]), ([7, None, 5], [1]), ([None, 3], [0])],
)
def test_late_is_who_says_nothing_or_is_furthest_behind(counts, late):
    beats = [None if count is None else Beat(count, STEP, 3) for count in counts]
    assert find_late(beats) == late


@pytest.mark.parametrize(("section", "made"), [(READ, 4), (STEP, 4), (SAVE, 5)])
def test_a_step_is_made_when_it_is_saved(section, made):
    assert Beat(9, section, 5).made == made


def look_each_second(stillness, clock, seconds):
    """What it finds first, and behind how many seconds."""
    for passed in range(seconds):
        if (reason := stillness.look(clock.seconds)) is not None:
            return passed, reason
        clock.seconds += 1
    return None


def test_what_takes_too_long_is_said_with_its_limit(clock):
    heartbeats = Heartbeats(clock)
    visit(heartbeats, clock, STEP, [2] * ENOUGH)
    heartbeats.enter(STEP, 12)
    stillness = Stillness(WatchConfig(least_seconds=5.0), heartbeats)
    assert look_each_second(stillness, clock, 100) == (
        21,
        "is at step 12 (step) for 21 s, and never took longer than 2.0 s; the limit is 20 s",
    )


def test_whoever_goes_on_is_left_alone(clock):
    heartbeats = Heartbeats(clock)
    stillness = Stillness(WatchConfig(step_seconds=10.0), heartbeats)
    for step in range(50):
        heartbeats.enter(STEP, step)
        assert look_each_second(stillness, clock, 9) is None


def test_a_machine_that_slept_has_not_stood_still(clock):
    heartbeats = Heartbeats(clock)
    heartbeats.enter(STEP, 3)
    stillness = Stillness(WatchConfig(step_seconds=60.0), heartbeats)
    assert look_each_second(stillness, clock, 5) is None
    clock.seconds += 7200
    assert look_each_second(stillness, clock, 40) is None
    assert look_each_second(stillness, clock, 40) is not None
