"""The process of jax's service: it ends with process 0, outlasts signals, and reports why it cannot start."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.coordination_service import service_process
from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.service_process import ServiceProcess

SECONDS = 20.0
"""Time limit for what takes less than a second."""

# The fork keeps the pipe open by which the service would learn of the end of process 0.
KILLED = """
import os, signal, sys, time
from zaya_jax.parallel.processes.service_process import ServiceProcess
process = ServiceProcess(sys.argv[1], 2, limit_seconds=20.0)
process.listen()
fork = os.fork()
if not fork:
    time.sleep(30)
    os._exit(0)
print(fork, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def address() -> str:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def listening(address: str) -> Iterator[ServiceProcess]:
    with service_process(ProcessGroup(address, 2, 0), limit_seconds=SECONDS) as process:
        assert process is not None
        process.listen()
        yield process
        process.shutdown()


def is_listening(address: str) -> bool:
    host, _, port = address.partition(":")
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port)), SECONDS):
        return True
    return False


def wait_for_end(address: str) -> None:
    end = time.monotonic() + SECONDS
    while is_listening(address):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_it_outlasts_the_signals_that_stop_a_run(address):
    with listening(address) as process:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(process.pid, number)
        time.sleep(0.2)
        assert is_listening(address)
    assert not is_listening(address)


def test_it_ends_with_a_killed_process_0_although_a_fork_of_that_one_lives_on(address):
    ended = subprocess.Popen([sys.executable, "-c", KILLED, address], stdout=subprocess.PIPE)
    assert ended.stdout is not None
    with ended.stdout as output:
        fork = int(output.readline())
    try:
        assert ended.wait(SECONDS) == -signal.SIGKILL
        wait_for_end(address)
        os.kill(fork, 0)  # it still runs
    finally:
        os.kill(fork, signal.SIGKILL)


def test_an_address_in_use_is_reported(address):
    host, _, port = address.partition(":")
    with (
        contextlib.closing(socket.create_server((host, int(port)))),
        pytest.raises(UserError, match=rf"jax's service cannot listen at {address}: .* choose another"),
        listening(address),
    ):
        pass


def test_an_error_of_process_0_ends_it(address):
    with pytest.raises(ZeroDivisionError), listening(address):
        raise ZeroDivisionError
    assert not is_listening(address)


def test_a_program_that_does_not_start_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(UserError, match="its process ended with exit code 1"),
        listening("127.0.0.1:1"),
    ):
        pass


def test_other_processes_have_none():
    with service_process(ProcessGroup("127.0.0.1:1", 2, 1), limit_seconds=SECONDS) as process:
        assert process is None
