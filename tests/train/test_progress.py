"""What a person sees of a run, on a terminal and in a log."""

import io
import math
import re
import types

import numpy as np
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


@pytest.fixture
def terminal(monkeypatch):
    """Makes terminals of a width, whose last picture can be read."""
    monkeypatch.setenv("TERM", "xterm")

    def make(width):
        return Console(file=io.StringIO(), width=width, force_terminal=True, soft_wrap=True, highlight=False)

    return make


def shown(line):
    """What stands in the line's place on its terminal now."""
    line._bar.refresh()
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line._console.file.getvalue())
    return re.split(r"[\r\n]", written.rstrip())[-1].strip()


def new_log():
    log = io.StringIO()
    return log, Console(file=log, width=200)


# In a log


def test_a_log_has_a_line_a_step_with_the_time_left(clock):
    """Step 1 took 20 s, most of them to compile; the ten after it one each."""
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
    (said,) = log.getvalue().splitlines()
    assert said == "step 1/40 | warm | loss 1.5000 | 2.250 bits/byte | 1,000 tokens/s | load entropy 0.5000"


def times_left(clock, line, log, looks):
    """What is said after looks at (second, step): the time left or None."""
    for now, step in looks:
        clock.now = now
        line.update(step, VALUES)
    return [
        said[1] if (said := re.search(r"(\S+) left$", text)) else None for text in log.getvalue().splitlines()
    ]


def test_a_resumed_run_says_nothing_before_it_knows(clock):
    log, console = new_log()
    line = ProgressLine(100, 50, console)
    line.compiling()
    found = times_left(clock, line, log, [(60.0, 51), (78.0, 60), (98.0, 70)])
    assert found == [None, "1:20", "1:00"]  # two seconds a step


def test_a_new_program_begins_anew(clock):
    log, console = new_log()
    line = ProgressLine(100, 0, console)
    line.compiling()
    assert times_left(clock, line, log, [(30.0, 1), (40.0, 11)]) == [None, "1:29"]
    line.compiling()
    found = times_left(clock, line, log, [(90.0, 12), (108.0, 18), (138.0, 28)])[2:]
    assert found == [None, "4:06", "3:36"]  # three seconds a step


# On a terminal


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("phase", ["", "annealing"])
@pytest.mark.parametrize(("num_steps", "left"), [(200, "1:39:00"), (838_623, "6988:31:00")])
@pytest.mark.parametrize("utilisation", [{}, {"model_flops_utilisation": 0.412}])
def test_the_bar_and_the_time_left_are_always_seen(
    clock, terminal, width, phase, num_steps, left, utilisation
):
    """In the middle of a run whose steps take a minute."""
    values, middle = VALUES | {"tokens_per_second": 123_456.0} | utilisation, num_steps // 2
    with ProgressLine(num_steps, middle - 1, terminal(width)) as line:
        line.update(middle, values, phase)
        clock.now = 60.0
        line.update(middle + 1, values, phase)
        bar, text = shown(line).split(" step ")
    assert len(f"{bar} step {text}") <= width
    assert len(bar) == progress.BAR_WIDTH
    assert set(bar) <= set("━╸╺")
    assert text.startswith(f"{middle + 1}/{num_steps} | ")
    assert text.endswith(f" {left} left")
    assert "loss 1.5000" in text
    assert width == 60 or "2.250 bits/byte" in text
    assert width < 120 or "123,456 tokens/s" in text
    assert width < 120 or not utilisation or "MFU 41.2%" in text


def test_a_run_of_hundreds_of_steps_shows_its_speed_at_80_columns(terminal):
    """Also before there is a time, which has the most characters then."""
    with ProgressLine(200, 119, terminal(80)) as line:
        line.update(120, VALUES | {"tokens_per_second": 12_345.0})
        assert shown(line).endswith("20/200 | loss 1.5000 | 2.250 bits/byte | 12,345 tokens/s --:-- left")


def test_what_matters_less_goes_first(terminal):
    """From a wide terminal to a narrow one; bar, time left and spaces take 18 characters."""
    values = VALUES | {"model_flops_utilisation": 0.412}
    entropy, phase, speed = " | load entropy 0.5000", " | warm", " | 1,000 tokens/s | MFU 41.2%"
    full = f"step 7/40{phase} | loss 1.5000 | 2.250 bits/byte{speed}{entropy}"
    without_entropy = full.removesuffix(entropy)
    without_phase = without_entropy.replace(phase, "")
    without_speed = without_phase.removesuffix(speed)
    expected = {130: full, 110: without_entropy, 93: without_phase, 70: without_speed, 35: "step 7/40"}
    for width, text in expected.items():
        with ProgressLine(40, 6, terminal(width)) as line:
            line.update(7, values, "warm")
            assert shown(line).lstrip("━╸╺ ").removesuffix("--:-- left").rstrip() == text


def test_a_terminal_counts_down_from_the_same_estimate_as_a_log(clock, terminal):
    with ProgressLine(40, 0, terminal(80)) as line:
        line.compiling()
        assert "compiling the step" in shown(line)
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


def test_a_long_evaluation_says_now_and_then_where_it_is(clock):
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    seen = []
    for batch in line.evaluating(40, range(100), 100):
        seen.append(batch)
        clock.now += QUIET_SECONDS / 20
    assert seen == list(range(100))
    assert log.getvalue().splitlines() == [f"step 40: held-out batch {done}/100" for done in (20, 40, 60, 80)]


def test_a_short_evaluation_says_nothing(clock):
    log, console = new_log()
    line = ProgressLine(40, 0, console)
    assert len(list(line.evaluating(40, range(100), 100))) == 100
    assert log.getvalue() == ""


def test_a_terminal_shows_the_evaluation_and_then_the_step_again(clock, terminal):
    """Meanwhile nothing is said of the time left, which then is what it was."""
    with ProgressLine(40, 0, terminal(80)) as line:
        line.update(1, VALUES)
        clock.now = 10.0
        line.update(11, VALUES)
        pictures = []
        for _ in line.evaluating(11, range(2), 2):
            pictures.append(shown(line))
            clock.now += 60.0
        for done, picture in enumerate(pictures):
            assert f" step 11: held-out batch {done}/2 " in picture
            assert picture.endswith(" --:-- left")
        assert " step 11/40 | loss 1.5000 | 2.250 bits/byte " in shown(line)
        assert shown(line).endswith(" 0:29 left")


def test_evaluations_and_checkpoints_are_no_steps(clock):
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


def test_a_skipped_step_is_counted_and_leaves_the_mean_alone():
    """Also its bytes: they are no text of the others' losses."""
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
    """A number that knows how often it was fetched."""

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
