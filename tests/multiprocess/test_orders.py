"""Process 0 assigns work and the others do it: results, errors, and how all processes end."""

import json
import os
import re
import subprocess
import sys

import pytest
from groups import ROOT

WORDS = (
    "from zaya_jax.parallel.processes import launch as l; import sys; "
    "sys.exit(l.launch(l.Launch([sys.executable, *sys.argv[1:]], 3)))"
)


def run(how):
    """Returns what each of three processes printed at its end; process 0 comes first."""
    ended = subprocess.run(
        [sys.executable, "-c", WORDS, str(ROOT / "tests/multiprocess/ordered.py"), how],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # A line of a traceback may end with a brace too.
    lines = sorted(line for line in ended.stderr.splitlines() if re.match(r"(\[\d\] )?\{.*\}$", line))
    assert len(lines) == 3, ended.stderr
    return [json.loads(line[line.index("{") :]) for line in [lines[2], *lines[:2]]]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [("failure", "invalid literal for int() with base 10: 'seven'"), ("mistake", "there is no such task")],
)
def test_results_come_in_order_and_a_failure_is_reported_once_and_ends_all(how, sentence):
    first, *others = run(how)
    assert first["squares"] == [i**2 for i in range(40) for _ in (1, 2)]
    assert first["CollectiveError"].endswith(sentence)
    assert first["CollectiveError"].startswith("process 1 on ") == (how == "failure")
    assert first["is_printed_here"]
    for other in others:
        assert (other["CollectiveError"], other["is_printed_here"]) == (first["CollectiveError"], False)


def test_a_process_that_does_not_respond_is_named():
    first, *others = run("late")
    assert first["PeerTimeout"].startswith("waited 2 s for the work of process 2 on ")
    assert all("ended with PeerTimeout: waited 2 s" in other["PeerLost"] for other in others)
