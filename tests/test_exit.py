"""Exit of the command's process: signals during the exit, and a running compiler."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(("times", "code"), [(1, 0), (2, 128 + signal.SIGTERM)])
def test_a_signal_does_not_interrupt_the_exit(times, code):
    """The exit of Python and jax is not disturbed; a second signal ends the process at once."""
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


@pytest.mark.parametrize(
    ("ends", "code", "compiles"),
    # The server returns normally after a signal.
    [("sys.exit(130)", 130, True), ("sys.exit(75)", 75, True), ("return", 0, True), ("pass", 0, False)],
)
def test_a_process_that_is_stopped_while_it_compiles_has_the_right_exit_code(ends, code, compiles):
    """Python's exit is skipped: a compiler thread that returns from C++ during it aborts the process."""
    program = (
        "import atexit, sys, time\n"
        "from zaya_jax import cli\n"
        "from zaya_jax.platform.compile_thread import start_compiling\n"
        "import ctypes\n"
        "def compile():\n"
        f"    ctypes.CDLL(None).usleep({1_500_000 if compiles else 1000})\n"
        "def main():\n"
        "    thread = start_compiling(compile)\n"
        "    print('said')\n"
        f"    {ends}\n"
        "    thread.join()\n"
        "cli.main = main\n"
        "atexit.register(print, 'ended')\n"
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
    assert done.stdout == ("said\n" if compiles else "said\nended\n")
    assert done.stderr == ""


def test_a_crash_prints_where_each_thread_was():
    program = (
        "import os, signal\n"
        "from zaya_jax import cli\n"
        "def main():\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "cli.main = main\n"
        "cli.run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("Fatal Python error: Segmentation fault")
    assert "in main\n" in done.stderr
