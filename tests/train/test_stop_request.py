"""Signals: the first stops a run after its step, the second at once."""

import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from zaya_jax.platform.stop_signals import stop_signals
from zaya_jax.train.stop_request import Stopped, StopRequest

DEFAULT_HANDLERS = {
    signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler
}  # fmt: skip


@pytest.fixture(autouse=True)
def _default_handlers():
    """Tests may run under nohup or in a shell's background, which ignore signals, also for children."""
    before = {number: signal.signal(number, handler) for number, handler in DEFAULT_HANDLERS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


TWICE = """
import os, signal, sys
from zaya_jax.train.stop_request import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop.signal_number, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")
"""


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_is_recorded_and_handlers_are_restored(number, exit_code, capfd):
    before = [signal.getsignal(each) for each in stop_signals()]
    with StopRequest() as stop:
        assert stop.signal_number is None
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
    assert [signal.getsignal(each) for each in stop_signals()] == before
    assert "stopping when this step is saved" in capfd.readouterr().err
    assert Stopped(number, 7).exit_code == exit_code


def test_a_second_signal_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{int(signal.SIGTERM)}\n"
    assert done.returncode == -signal.SIGINT


# The kernel and the shell both send SIGHUP when a terminal is closed, and systemd sends it after SIGTERM.
SIGNALS_IN_A_ROW = """
import os, sys
from zaya_jax.train.stop_request import StopRequest
with StopRequest() as stop:
    for number in map(int, sys.argv[1:]):
        os.kill(os.getpid(), number)
    print(stop.signal_number, flush=True)
"""


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ((signal.SIGHUP, signal.SIGHUP), signal.SIGHUP),
        ((signal.SIGTERM, signal.SIGHUP), signal.SIGTERM),
        ((signal.SIGINT, signal.SIGHUP, signal.SIGHUP), signal.SIGINT),
    ],
)
def test_a_hangup_is_never_the_second_signal(numbers, kept):
    words = [sys.executable, "-c", SIGNALS_IN_A_ROW, *(str(int(number)) for number in numbers)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, f"{int(kept)}\n")


def test_a_hangup_before_sigterm_does_not_hide_it():
    words = [sys.executable, "-c", SIGNALS_IN_A_ROW, str(int(signal.SIGHUP)), str(int(signal.SIGTERM))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGTERM


def test_nohup_keeps_ignoring_hangups():
    done = subprocess.run(
        ["nohup", sys.executable, "-c", SIGNALS_IN_A_ROW, str(int(signal.SIGHUP))],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "None\n")


AT_A_TERMINAL = """
import pathlib, sys, time
from zaya_jax.train.stop_request import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while stop.signal_number is None:
        time.sleep(0.01)
    print("a line that the closed terminal would refuse", flush=True)
    print("and one more", file=sys.stderr, flush=True)
    pathlib.Path(sys.argv[1]).write_text(f"saved after {stop.signal_number}")
"""


def test_output_to_a_closed_terminal_does_not_end_a_run_before_it_is_saved(tmp_path):
    # Not pty.fork: jax warns where a process with its threads forks.
    take_terminal = (
        "import fcntl, os, sys, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    words = [sys.executable, "-c", AT_A_TERMINAL, str(tmp_path / "saved")]
    terminal, of_command = pty.openpty()
    command = subprocess.Popen(
        [sys.executable, "-c", take_terminal, *words],
        stdin=of_command, stdout=of_command, stderr=of_command, start_new_session=True,
    )  # fmt: skip
    os.close(of_command)
    output = b""
    while b"ready" not in output:
        output += os.read(terminal, 1000)
    os.close(terminal)
    assert command.wait(60) == 0
    assert (tmp_path / "saved").read_text() == f"saved after {int(signal.SIGHUP)}"


def test_other_threads_receive_no_signal():
    """A notebook's kernel may train in one; Python refuses handlers there."""

    def listen():
        with StopRequest() as stop:
            actual.append(stop.signal_number)

    actual = []
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert actual == [None]
