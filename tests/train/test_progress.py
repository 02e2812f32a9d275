"""What a person sees of a run, on a terminal and in a log."""

import io
import types

import pytest
from rich.console import Console

from zaya_jax.train import progress
from zaya_jax.train.progress import QUIET_SECONDS, ProgressLine

VALUES = {"loss": 1.5, "bits_per_byte": 2.25, "tokens_per_second": 1000.0, "load_entropy": 0.5}


@pytest.fixture
def clock(monkeypatch):
    """A time that moves when it is told to."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_log_has_a_line_a_step_with_the_time_left(clock):
    log = io.StringIO()
    line = ProgressLine(40, 0, Console(file=log, width=200))
    clock.now = 30.0
    line.update(10, VALUES)
    assert log.getvalue() == (
        "step 10/40 | loss 1.5000 | 2.250 bits/byte | 1,000 tokens/s | load entropy 0.5000 | 1:30 left\n"
    )


def test_a_long_evaluation_says_now_and_then_where_it_is(clock):
    log = io.StringIO()
    line = ProgressLine(40, 0, Console(file=log, width=200))
    seen = []
    for batch in line.evaluating(40, range(100), 100):
        seen.append(batch)
        clock.now += QUIET_SECONDS / 20
    assert seen == list(range(100))
    assert log.getvalue().splitlines() == [f"step 40: held-out batch {done}/100" for done in (20, 40, 60, 80)]


def test_a_short_evaluation_says_nothing(clock):
    log = io.StringIO()
    line = ProgressLine(40, 0, Console(file=log, width=200))
    assert len(list(line.evaluating(40, range(100), 100))) == 100
    assert log.getvalue() == ""


def test_a_terminal_shows_the_evaluation_and_then_the_step_again():
    screen = io.StringIO()
    with ProgressLine(40, 0, Console(file=screen, width=200, force_terminal=True)) as line:
        line.update(40, VALUES)
        (task,) = line._bar.tasks
        shown = [task.description for _ in line.evaluating(40, range(2), 2)]
        assert shown == ["step 40: held-out batch 0/2", "step 40: held-out batch 1/2"]
        assert task.description.startswith("step 40/40 | loss 1.5000")
    assert "step 40/40" in screen.getvalue()
