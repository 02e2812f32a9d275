"""kill -9 during a conversion never leaves an incomplete folder under its name, and the command resumes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("killed_conversions.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("min_kills", [5, pytest.param(20, marks=pytest.mark.campaign)])
def test_kills_in_each_direction(min_kills, tmp_path):
    paths = os.pathsep.join([str(ROOT), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(min_kills)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    for direction, actual in report.items():
        assert actual["kills"] >= min_kills
        assert actual["false"] == [], direction
        assert actual["resumed"] > 0, f"{direction}: no kill hit between two files; the test shows nothing"
