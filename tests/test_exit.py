"""How the command's process ends."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(("times", "code"), [(1, 0), (2, 128 + signal.SIGTERM)])
def test_behind_the_last_line_a_signal_cuts_nothing_short(times, code):
    """What Python and jax do at their end is not disturbed; who asks twice will not wait."""
    program = (
        "import atexit, os, signal, sys, time\n"
        "from zaya_jax import cli\n"
        "@atexit.register\n"
        "def end():\n"
        f"    for _ in range({times}): os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.01)\n"
        "    print('ended')\n"
        "sys.argv = ['zaya', '--version']\n"
        "cli.run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert ("ended" in done.stdout) == (times == 1)
