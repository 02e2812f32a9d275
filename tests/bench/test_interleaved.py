"""Programs in separate processes alternate, and one that fails is named in the error."""

import functools
import itertools
import os
import re
import threading
import time

import pytest

from zaya_jax.bench import interleaved
from zaya_jax.bench.interleaved import best_interleaved, results_interleaved

LIMIT = 60.0


def _writes(path, letter, pauses):
    pauses = iter(pauses)

    def call():
        with open(path, "a") as file:
            file.write(f"{letter}{os.getpid()} ")
        time.sleep(next(pauses))

    return call


def _counts(first):
    return functools.partial(next, itertools.count(first))


def _fails():
    raise ValueError("no such weights")


def _dies():
    return functools.partial(os._exit, 3)


def _dies_between_turns():
    return lambda: threading.Timer(0.05, os._exit, (3,)).start()


def _hangs():
    return functools.partial(time.sleep, 100)


def test_programs_alternate_and_the_best_time_counts(tmp_path):
    path = tmp_path / "calls"
    pauses = {"a": (0, 0.5, 0.5, 0.5), "b": (0, 0.5, 0, 0.5)}
    programs = {letter: functools.partial(_writes, path, letter, pauses[letter]) for letter in pauses}
    times = best_interleaved(programs, rounds=3, limit=LIMIT)
    calls = path.read_text().split()
    assert "".join(call[0] for call in calls) == "abababab"  # once each to warm up, then alternating
    assert len({call[1:] for call in calls} | {str(os.getpid())}) == 3  # processes
    assert times["a"] >= 0.5 > times["b"] > 0


def test_results_exclude_the_first_call():
    programs = {str(first): functools.partial(_counts, first) for first in (0, 10)}
    assert results_interleaved(programs, rounds=2, limit=LIMIT) == {"0": [1, 2], "10": [11, 12]}


@pytest.mark.parametrize(
    ("program", "limit", "says"),
    [
        (_fails, LIMIT, "\"other\" failed: ValueError('no such weights')"),
        (_dies, LIMIT, 'the process of "other" exited early'),
        (_dies_between_turns, LIMIT, 'the process of "other" exited early'),
        (_hangs, 10.0, '"other" did not finish within 10 seconds'),
    ],
)
def test_a_failing_process_is_named(tmp_path, monkeypatch, program, limit, says):
    monkeypatch.setattr(interleaved, "EXIT_SECONDS", 0.5)  # a process that hangs does not end by itself
    programs = {"one": functools.partial(_writes, tmp_path / "calls", "a", (0, 0)), "other": program}
    with pytest.raises(RuntimeError, match=re.escape(says)):
        best_interleaved(programs, rounds=1, limit=limit)
