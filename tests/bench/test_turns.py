"""Programs in processes of their own take turns, and one that fails is named."""

import functools
import os
import re
import time

import pytest

from zaya_jax.bench.turns import best_in_turn

LIMIT = 60.0


def _writes(path, letter, pause):
    def call():
        with open(path, "a") as file:
            file.write(f"{letter}{os.getpid()} ")
        time.sleep(pause)

    return call


def _fails():
    raise ValueError("no such weights")


def _dies():
    return functools.partial(os._exit, 3)


def _hangs():
    return functools.partial(time.sleep, 100)


def test_programs_take_turns_and_their_best_counts(tmp_path):
    path = tmp_path / "calls"
    programs = {
        letter: functools.partial(_writes, path, letter, pause) for letter, pause in (("a", 0.1), ("b", 0))
    }
    times = best_in_turn(programs, rounds=3, limit=LIMIT)
    calls = path.read_text().split()
    assert "".join(call[0] for call in calls) == "abababab"  # once each to warm up, then in turn
    assert len({call[1:] for call in calls} | {str(os.getpid())}) == 3  # processes
    assert times["a"] >= 0.1 > times["b"] > 0


@pytest.mark.parametrize(
    ("program", "limit", "says"),
    [
        (_fails, LIMIT, "\"other\" failed: ValueError('no such weights')"),
        (_dies, LIMIT, 'the process of "other" ended before its time'),
        (_hangs, 10.0, '"other" has not answered within 10 seconds'),
    ],
)
def test_a_process_that_does_not_answer_is_named(tmp_path, program, limit, says):
    programs = {"one": functools.partial(_writes, tmp_path / "calls", "a", 0), "other": program}
    with pytest.raises(RuntimeError, match=re.escape(says)):
        best_in_turn(programs, rounds=1, limit=limit)
