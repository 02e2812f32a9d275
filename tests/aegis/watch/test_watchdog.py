"""The watchdog: time limits, late processes, and the end of a stalled process."""

import subprocess
import sys
import time

import pytest
from section_visits import Clock, visit

from zaya_jax.aegis.watch.watchdog import StallDetector, find_late, limit_of
from zaya_jax.config import WatchConfig
from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import STALLED
from zaya_jax.train.heartbeats import COMPILE, DISPATCH, MIN_VISITS, SAVE, START, STEP, Beat, Heartbeats

PROGRAM = """
import io, sys, time
from zaya_jax.train.heartbeats import STEP, Heartbeats
from zaya_jax.aegis.watch.watchdog import Watchdog
from zaya_jax.config import WatchConfig

folder, stream, moves = sys.argv[1:]
if stream == "notebook":
    sys.stderr = io.StringIO()  # is no file
heartbeats = Heartbeats()
watchdog = Watchdog()
watchdog.start(WatchConfig(step_seconds=8.0), folder, heartbeats)
for step in range(6):
    heartbeats.enter(STEP, step)
    time.sleep(0.2)
if moves == "no":
    time.sleep(60)
watchdog.stop()
print("left in good order")
"""


@pytest.fixture
def clock():
    return Clock()


def run(folder, stream, moves):
    words = [sys.executable, "-c", PROGRAM, str(folder), stream, moves]
    return subprocess.run(words, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("stream", ["terminal", "notebook"])
def test_a_stalled_process_exits_with_its_stacks_and_an_event(stream, tmp_path):
    begun = time.monotonic()
    done = run(tmp_path, stream, "no")
    assert done.returncode == 124
    assert time.monotonic() - begun < 45
    assert "left in good order" not in done.stdout
    assert "Current thread" in done.stderr
    assert '"<string>", line' in done.stderr  # where the main thread was
    (event,) = read_events(tmp_path)
    assert (event["event"], event["step"], event["section"]) == (STALLED, 4, "step")
    assert event["still"] > 8
    assert event["late"] == "the process is at step 5 (step)"


def test_a_process_that_progresses_is_not_ended(tmp_path):
    done = run(tmp_path, "terminal", "yes")
    assert (done.returncode, done.stdout) == (0, "left in good order\n")


@pytest.mark.parametrize(
    ("section", "slowest", "limit"),
    [
        (STEP, None, 500),  # unknown yet
        (STEP, 20.0, 200),
        (STEP, 80.0, 500),  # at most the configured limit
        (STEP, 0.01, 30),  # at least the minimum
        (DISPATCH, 20.0, 200),
        (COMPILE, 1.0, 900),  # the next program may be larger
        (START, 1.0, 3600),
        (SAVE, None, None),
    ],
)
def test_limits_are_adaptive_and_capped(section, slowest, limit):
    config = WatchConfig(step_seconds=500.0, compile_seconds=900.0, save_seconds=None, min_seconds=30.0)
    assert limit_of(config, Beat(1, section, 5), slowest) == limit


def test_the_limit_scales_with_the_number_of_steps():
    config = WatchConfig(step_seconds=500.0)
    assert limit_of(config, Beat(1, STEP, 40, 10), None) == 5000


@pytest.mark.parametrize(
    ("counts", "late"),
    [([7, 7, 7], []), ([7, 5, 7], [1]), ([5, 7, 5], [0, 2]), ([7, None, 5], [1]), ([None, 3], [0])],
)
def test_late_processes_are_silent_or_have_the_lowest_count(counts, late):
    beats = [None if count is None else Beat(count, STEP, 3) for count in counts]
    assert find_late(beats) == late


def check_each_second(stalls, clock, seconds):
    """Returns the first reason and the seconds until it; None without one."""
    for passed in range(seconds):
        if (reason := stalls.check(clock.seconds)) is not None:
            return passed, reason
        clock.seconds += 1
    return None


def test_a_stall_is_reported_with_its_limit(clock):
    heartbeats = Heartbeats(clock)
    visit(heartbeats, clock, STEP, [2] * MIN_VISITS)
    heartbeats.enter(STEP, 12)
    stalls = StallDetector(WatchConfig(min_seconds=5.0), heartbeats)
    assert check_each_second(stalls, clock, 100) == (
        21,
        "is at step 12 (step) for 21 s, and never took longer than 2.0 s; the limit is 20 s",
    )


def test_progress_resets_the_time(clock):
    heartbeats = Heartbeats(clock)
    stalls = StallDetector(WatchConfig(step_seconds=10.0), heartbeats)
    for step in range(50):
        heartbeats.enter(STEP, step)
        assert check_each_second(stalls, clock, 9) is None


def test_a_machine_that_has_slept_has_not_stalled(clock):
    heartbeats = Heartbeats(clock)
    heartbeats.enter(STEP, 3)
    stalls = StallDetector(WatchConfig(step_seconds=60.0), heartbeats)
    assert check_each_second(stalls, clock, 5) is None
    clock.seconds += 7200
    assert check_each_second(stalls, clock, 40) is None
    assert check_each_second(stalls, clock, 40) is not None
