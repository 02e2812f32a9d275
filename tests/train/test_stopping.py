"""What a run makes of signals."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from zaya_jax.train.stopping import SIGNALS, Stopped, StopRequest

TWICE = """
import os, signal, sys
from zaya_jax.train.stopping import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop.signal_number, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")
"""


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_is_kept_and_handlers_come_back(number, exit_code, capfd):
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopRequest() as stop:
        assert stop.signal_number is None
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert "stopping when this step is saved" in capfd.readouterr().err
    assert Stopped(number, 7).exit_code == exit_code


def test_a_second_signal_leaves_at_once():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{int(signal.SIGTERM)}\n"
    assert done.returncode == -signal.SIGINT


def test_other_threads_get_none():
    """A notebook's kernel may train in one; Python refuses handlers there."""

    def listen():
        with StopRequest() as stop:
            found.append(stop.signal_number)

    found = []
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [None]
