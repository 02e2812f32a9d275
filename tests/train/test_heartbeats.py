"""Heartbeats: sections of the loop, and the time spent in each."""

import pytest
from section_visits import Clock, visit

from zaya_jax.train.heartbeats import (
    DISPATCH,
    MIN_VISITS,
    NUM_RECENT_VISITS,
    READ,
    RESTORE,
    SAVE,
    SECTIONS,
    START,
    STEP,
    Beat,
    Heartbeats,
)


@pytest.fixture
def clock():
    return Clock()


def test_all_time_belongs_to_a_section(clock):
    heartbeats = Heartbeats(clock)
    clock.seconds += 3
    visit(heartbeats, clock, STEP, [1, 2])
    clock.seconds += 0.5
    assert heartbeats.seconds() == dict.fromkeys(SECTIONS, 0.0) | {START: 3.0, STEP: 3.0, READ: 0.5}


def test_an_inner_section_returns_to_the_outer_one(clock):
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


def test_the_slowest_recent_visit_counts(clock):
    heartbeats = Heartbeats(clock)
    visit(heartbeats, clock, STEP, [5] + [1] * (MIN_VISITS - 2))
    assert heartbeats.slowest(STEP) is None
    visit(heartbeats, clock, STEP, [2])
    assert heartbeats.slowest(STEP) == 5
    visit(heartbeats, clock, STEP, [1] * NUM_RECENT_VISITS)
    assert heartbeats.slowest(STEP) == 1


def test_a_first_full_queue_is_no_stall(clock):
    heartbeats = Heartbeats(clock)
    visit(heartbeats, clock, DISPATCH, [0.001] * 100)
    assert heartbeats.slowest(DISPATCH) is None
    visit(heartbeats, clock, STEP, [7] * MIN_VISITS)
    assert heartbeats.slowest(DISPATCH) == 7


@pytest.mark.parametrize(("section", "made"), [(READ, 4), (STEP, 4), (SAVE, 5)])
def test_a_step_is_complete_when_it_is_saved(section, made):
    assert Beat(9, section, 5).made == made
