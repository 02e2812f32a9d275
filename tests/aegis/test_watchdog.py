"""A process that stands still ends itself."""

import subprocess
import sys
import time

import pytest

from zaya_jax.aegis.journal import STALLED, read_events

PROGRAM = """
import io, sys, time
from zaya_jax.aegis.heartbeats import STEP, Heartbeats
from zaya_jax.aegis.watchdog import Watchdog
from zaya_jax.config import WatchConfig

folder, stream, moves = sys.argv[1:]
if stream == "notebook":
    sys.stderr = io.StringIO()  # is no file
heartbeats = Heartbeats()
with Watchdog(WatchConfig(step_seconds=8.0), folder, heartbeats):
    for step in range(6):
        heartbeats.enter(STEP, step)
        time.sleep(0.2)
    if moves == "no":
        time.sleep(60)
print("left in good order")
"""


def run(folder, stream, moves):
    words = [sys.executable, "-c", PROGRAM, str(folder), stream, moves]
    return subprocess.run(words, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("stream", ["terminal", "notebook"])
def test_a_process_that_stands_still_ends_with_its_stacks_and_an_event(stream, tmp_path):
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


def test_a_process_that_moves_is_left_alone(tmp_path):
    done = run(tmp_path, "terminal", "yes")
    assert (done.returncode, done.stdout) == (0, "left in good order\n")
