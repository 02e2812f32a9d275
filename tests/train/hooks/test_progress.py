"""Progress of a run, as displayed on a terminal and in a log."""

import io
import math
import os
import re
import signal
import threading
import time
import types

import numpy as np
import pytest
from rich.console import Console

from zaya_jax.progress import working
from zaya_jax.train.hooks import progress
from zaya_jax.train.hooks.progress import QUIET_SECONDS, ProgressLine

VALUES = {"loss": 1.5, "bits_per_byte": 2.25, "tokens_per_second": 1000.0, "load_entropy": 0.5}


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests advance."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def terminal(monkeypatch):
    """Makes terminals of a width, whose last frame can be read."""
    monkeypatch.setenv("TERM", "xterm")

    def make(width):
        return Console(file=io.StringIO(), width=width, force_terminal=True, soft_wrap=True, highlight=False)

    return make


def shown(line):
    """Returns the current progress line on its terminal."""
    line._live.refresh()
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line._console.file.getvalue())
    return re.split(r"[\r\n]", written.rstrip())[-1].strip()


def stayed(line):
    """Returns the lines above it."""
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line._console.file.getvalue())
    return [text for text in re.split(r"[\r\n]+", written) if not text.startswith(("━", "╸", "╺"))]


class Step:
    """A loss that its device completes on request; waiting for it fails."""

    def __init__(self):
        self.is_done = False

    def is_ready(self):
        return self.is_done

    def __float__(self):
        raise AssertionError("this would wait for the device")

    __array__ = __float__


@pytest.fixture
def steps(monkeypatch):
    """Starts twelve steps one after the other."""
    monkeypatch.setattr(progress.jax, "Array", Step)
    return [Step() for _ in range(12)]


def new_log():
    log = io.StringIO()
    return log, Console(file=log, width=200)


# In a log


def test_a_log_has_a_line_per_step_with_the_time_left(clock):
    """Step 1 took 20 s, most of them for compilation; the ten later ones one each."""
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    line.compiling()
    clock.now = 20.0
    line.update(1, VALUES)
    clock.now = 30.0
    line.update(11, VALUES, "a")
    assert log.getvalue().splitlines() == [
        "step 1/40 | loss 1.5000 | 2.250 bits/byte | 1,000 tokens/s | load entropy 0.5000",
        "step 11/40 | a | loss 1.5000 | 2.250 bits/byte | 1,000 tokens/s | load entropy 0.5000 | 0:29 left",
    ]


def test_a_narrow_log_has_the_full_line():
    log = io.StringIO()
    ProgressLine(40, 0, Console(file=log, width=60, soft_wrap=True)).update(1, VALUES, "warm")
    (output,) = log.getvalue().splitlines()
    assert output == "step 1/40 | warm | loss 1.5000 | 2.250 bits/byte | 1,000 tokens/s | load entropy 0.5000"


def times_left(clock, line, log, looks):
    """Returns the time left, or None, after updates at (second, step)."""
    for now, step in looks:
        clock.now = now
        line.update(step, VALUES)
    return [
        output[1] if (output := re.search(r"(\S+) left$", text)) else None
        for text in log.getvalue().splitlines()
    ]


def test_a_resumed_run_shows_no_time_left_before_it_is_known(clock):
    log, console = new_log()
    line = ProgressLine(100, 50, console)
    line.compiling()
    actual = times_left(clock, line, log, [(60.0, 51), (78.0, 60), (98.0, 70)])
    assert actual == [None, "1:20", "1:00"]  # two seconds per step


def test_a_new_program_restarts_the_estimate(clock):
    log, console = new_log()
    line = ProgressLine(100, 0, console)
    line.compiling()
    assert times_left(clock, line, log, [(30.0, 1), (40.0, 11)]) == [None, "1:29"]
    line.compiling()
    actual = times_left(clock, line, log, [(90.0, 12), (108.0, 18), (138.0, 28)])[2:]
    assert actual == [None, "4:06", "3:36"]  # three seconds per step


# On a terminal


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("phase", ["", "annealing"])
@pytest.mark.parametrize(("num_steps", "left"), [(200, "1:39:00"), (838_623, "6988:31:00")])
def test_the_bar_the_counter_and_the_time_left_are_always_visible(
    clock, terminal, width, phase, num_steps, left
):
    """In the middle of a run whose steps take a minute."""
    middle = num_steps // 2
    with ProgressLine(num_steps, middle - 1, terminal(width)) as line:
        line.update(middle, VALUES, phase)
        clock.now = 60.0
        line.update(middle + 1, VALUES, phase)
        bar, text = shown(line).split(" step ")
    assert len(f"{bar} step {text}") <= width
    assert len(bar) == progress.BAR_WIDTH
    assert set(bar) <= set("━╸╺")
    assert text.startswith(f"{middle + 1}/{num_steps} ")
    assert text.endswith(f" {left} left")


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 0, 1, 3, 2), (2, 1, 0)])
def test_the_counter_advances_with_each_completed_step_without_waiting(steps, terminal, order):
    """Devices complete steps in order; a step that appears complete before its predecessors does not count
    yet.
    """
    with ProgressLine(40, 3, terminal(80)) as line:
        for step in steps:
            line.add(step, 1.0)
        assert " step 3/40 " in shown(line)
        for number in order:
            steps[number].is_done = True
            complete = next(i for i, step in enumerate([*steps, Step()]) if not step.is_done)
            assert f" step {3 + complete}/40 " in shown(line)
            assert line.completed == 3 + complete


def test_at_ctrl_c_both_counts_are_printed(steps):
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    for step in steps:
        line.add(step, 1.0)
    for step in steps[:7]:
        step.is_done = True
    line.stopping(12)
    assert log.getvalue() == "stopping: 7 steps are complete; finishing and saving step 12\n"


def test_each_logged_step_stays_on_a_terminal(clock, terminal):
    with ProgressLine(40, 0, terminal(100)) as line:
        for step in (1, 11, 21):
            clock.now = float(step)
            line.update(step, VALUES | {"loss": 9.0 / step, "model_flops_utilisation": 0.412})
        actual = [text for text in stayed(line) if text.startswith("step ")]
    texts = ["loss 9.0000", "loss 0.8182", "loss 0.4286"]
    assert len(actual) == 3
    for text, loss, step, left in zip(actual, texts, (1, 11, 21), (None, "0:29", "0:19"), strict=True):
        parts = [f"step {step}/40", loss, "2.250 bits/byte", "1,000 tokens/s", "MFU 41.2%"]
        assert text.startswith(" | ".join(parts))
        assert left is None or text.endswith(f" | {left} left")


def test_a_narrow_terminal_drops_the_least_important_parts(terminal):
    """The load entropy, then the phase; never loss, bits per byte, speed or utilization."""
    values = VALUES | {"model_flops_utilisation": 0.412}
    kept = "loss 1.5000 | 2.250 bits/byte | 1,000 tokens/s | MFU 41.2%"
    expected = {
        130: f"step 7/40 | warm | {kept} | load entropy 0.5000",
        80: f"step 7/40 | warm | {kept}",
        72: f"step 7/40 | {kept}",
    }
    for width, text in expected.items():
        with ProgressLine(40, 6, terminal(width)) as line:
            line.update(7, values, "warm")
            assert text in stayed(line)


def test_the_held_out_loss_stands_out(terminal):
    with ProgressLine(40, 0, terminal(80)) as line:
        line.validated(20, "loss 1.5000 | 2.2500 bits/byte")
        written = line._console.file.getvalue()
    styled = r"\x1b\[1;32mheld-out at step 20/40 \| loss 1.5000 \| 2.2500 bits/byte\x1b\[0m"
    assert re.search(styled, written)
    log, console = new_log()
    ProgressLine(40, 0, console).validated(20, "loss 1.5000 | 2.2500 bits/byte")
    assert log.getvalue() == "held-out at step 20/40 | loss 1.5000 | 2.2500 bits/byte\n"


def test_a_terminal_counts_down_from_the_same_estimate_as_a_log(clock, terminal):
    with ProgressLine(40, 0, terminal(80)) as line:
        line.compiling()
        assert "step 0/40 | compiling the step, 0 s" in shown(line)
        clock.now = 12.0
        assert "step 0/40 | compiling the step, 12 s" in shown(line)
        assert shown(line).endswith(" --:-- left")
        clock.now = 20.0
        line.update(1, VALUES)
        assert shown(line).endswith(" --:-- left")
        clock.now = 30.0
        line.update(11, VALUES)
        assert shown(line).endswith(" 0:29 left")
        clock.now = 35.0
        assert shown(line).endswith(" 0:24 left")
        line.compiling()
        assert shown(line).endswith(" --:-- left")


def test_the_time_left_is_known_before_the_second_line(clock, steps, terminal):
    """From the completed steps: the first compiled, the next three took two seconds each."""
    with ProgressLine(44, 0, terminal(80)) as line:
        line.compiling()
        for step in steps:
            line.add(step, 1.0)
        for seconds, number in ((20.0, 0), (22.0, 1), (24.0, 2), (26.0, 3)):
            clock.now = seconds
            steps[number].is_done = True
            output = shown(line)
        assert output.endswith("step 4/44 1:20 left")


@pytest.mark.parametrize("forced", [False, True])
def test_a_pipe_gets_plain_lines(forced, monkeypatch, capsys):
    """CI systems set FORCE_COLOR, for which rich would write control characters."""
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressLine(40, 0) as line:
        line.compiling()
        line.update(1, VALUES)
        line.validated(1, "loss 1.0")
    with working("compiling"):
        pass
    output = capsys.readouterr().out
    assert output.isprintable() or set(output) - {"\n"} == {each for each in output if each.isprintable()}
    assert len(output.splitlines()) == 2


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    with ProgressLine(40, 0, Console(file=file, width=80, force_terminal=True)) as line:
        line.update(1, VALUES)
    assert "\x1b" not in file.getvalue()
    assert "\r" not in file.getvalue()


def test_a_log_reports_long_waits(clock):
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    line.compiling()
    for clock.now in (10.0, 16.0, 20.0, 32.0):
        line._say_if_quiet()
    assert log.getvalue().splitlines() == [
        "step 0/40 | compiling the step, 16 s",
        "step 0/40 | compiling the step, 32 s",
    ]


def test_a_log_of_slow_steps_counts_once_per_minute(clock, steps):
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    for step in steps:
        line.add(step, 1.0)
        step.is_done = True
        clock.now += 20.0
        line._say_if_quiet()
    assert log.getvalue().splitlines() == [f"step {step}/40" for step in (3, 6, 9, 12)]


# What runs before the first step


def test_work_shows_its_seconds_on_a_terminal_and_leaves_nothing(terminal):
    console = terminal(80)
    with working("training a [tokenizer]", console):
        pass
    written = console.file.getvalue()
    assert "training a [tokenizer]" in written
    assert "0:00:00" in written


def test_long_work_is_reported_in_a_log(monkeypatch):
    monkeypatch.setattr("zaya_jax.progress.QUIET_SECONDS", 0.05)
    log, console = new_log()
    with working("compiling", console):
        while log.getvalue().count("\n") < 2:
            time.sleep(0.01)
    assert log.getvalue().splitlines()[:2] == ["compiling: 0 s"] * 2


# Evaluations


def test_a_long_evaluation_reports_its_progress(clock):
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    seen = []
    for batch in line.evaluating(40, range(100), 100):
        seen.append(batch)
        clock.now += QUIET_SECONDS / 20
    assert seen == list(range(100))
    assert log.getvalue().splitlines() == [f"step 40: held-out batch {done}/100" for done in (20, 40, 60, 80)]


def test_a_short_evaluation_reports_nothing(clock):
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    assert len(list(line.evaluating(40, range(100), 100))) == 100
    assert log.getvalue() == ""


def test_a_terminal_shows_the_evaluation_and_then_the_step_again(clock, terminal):
    """The time left is hidden during the evaluation, and unchanged after it."""
    with ProgressLine(40, 0, terminal(80)) as line:
        line.update(1, VALUES)
        clock.now = 10.0
        line.update(11, VALUES)
        pictures = []
        for _ in line.evaluating(11, range(2), 2):
            pictures.append(shown(line))
            clock.now += 60.0
        for done, picture in enumerate(pictures):
            assert f" step 11/40 | held-out batch {done}/2, {60 * done} s " in picture
            assert picture.endswith(" --:-- left")
        assert shown(line).endswith(" step 11/40 0:29 left")


def test_evaluations_and_checkpoints_do_not_count_as_steps(clock):
    """The first of each compiles for a minute, between steps of a second."""
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    line.compiling()
    clock.now = 20.0
    line.update(1, VALUES)
    for _ in line.evaluating(1, range(1), 1):
        clock.now += 60.0
    clock.now += 5.0
    with line.pausing():
        clock.now += 60.0
    clock.now += 5.0
    line.update(11, VALUES)
    assert log.getvalue().splitlines()[-1].endswith(" | 0:29 left")


# The mean


def test_a_line_has_the_mean_of_all_steps_since_the_last():
    """Losses of 1, 2 and 3 nats over 1, 1 and 2 targets: 9 nats over 4 targets and 12 bytes."""
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    for step in ((1.0, 1.0), (2.0, 1.0), (3.0, 2.0)):
        line.add(*step)
    line.update(3, VALUES, num_bytes=(2.0, 4.0, 6.0))
    line.add(5.0, 2.0)
    line.update(4, VALUES, num_bytes=(5.0,))
    first, second = log.getvalue().splitlines()
    assert f"loss 2.2500 | {9 / 12 / math.log(2):.3f} bits/byte" in first
    assert f"loss 5.0000 | {10 / 5 / math.log(2):.3f} bits/byte" in second


def test_a_skipped_step_is_counted_but_not_part_of_the_mean():
    """Neither are its bytes."""
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    for step in ((1.0, 1.0), (math.nan, 1.0), (3.0, 1.0)):
        line.add(*step)
    line.update(3, VALUES | {"loss": math.nan, "skipped_steps": 1.0}, num_bytes=(2.0, 4.0, 6.0))
    line.add(math.inf, 1.0)
    line.update(4, VALUES | {"loss": math.inf, "skipped_steps": 1_002.0}, num_bytes=(1.0,))
    first, second = log.getvalue().splitlines()
    assert f"| loss 2.0000 | skipped steps 1 | {4 / 8 / math.log(2):.3f} bits/byte |" in first
    assert "| loss inf | skipped steps 1,002 |" in second


class OnDevice:
    """A value that counts how often it was fetched."""

    def __init__(self, value):
        self.value = value
        self.fetched = 0

    def __array__(self, dtype=None, copy=None):
        self.fetched += 1
        return np.float32(self.value) if dtype is None else np.asarray(self.value, dtype)

    def __float__(self):
        raise AssertionError("this would wait for the device")


def test_nothing_is_fetched_before_the_line_is_due():
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    numbers = [OnDevice(value) for value in (1.0, 4.0, 2.0, 4.0)]
    line.add(numbers[0], numbers[1])
    line.add(numbers[2], numbers[3])
    assert [number.fetched for number in numbers] == [0] * 4
    line.update(2, VALUES, num_bytes=(8.0, 8.0))
    assert [number.fetched for number in numbers] == [1] * 4
    assert "loss 1.5000 | " in log.getvalue()


def test_ctrl_c_interrupts_waiting_for_steps(steps):
    """Python would handle it only after all started steps are complete if it waited in a transfer."""
    line = ProgressLine(40, 0, new_log()[1])
    received = []

    def hear(number, frame):
        received.append(number)
        steps[0].is_done = True

    before = signal.signal(signal.SIGINT, hear)
    try:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        line.wait_for(steps[0])
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]
