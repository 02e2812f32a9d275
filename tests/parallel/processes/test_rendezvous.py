"""Rendezvous of processes, which are simulated by threads over the loopback."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import pytest

from zaya_jax.errors import TIMED_OUT, USER_ERROR, UserError, exit_code_of
from zaya_jax.parallel.processes import listeners
from zaya_jax.parallel.processes.errors import PeerTimeout
from zaya_jax.parallel.processes.listeners import bind_address
from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.rendezvous import assembled


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def come(coordinator: str, count: int, process: int, limit: float):
    """Returns the result of a process: the hosts of all, or an error."""
    try:
        group = ProcessGroup(coordinator, count, process)
        with assembled(group, host=f"host{process}", limit_seconds=limit) as assembly:
            pass
        assert set(assembly.connections) == {*assembly.place.children, assembly.place.parent} - {None}
        assembly.close()
        return assembly.hosts
    except (PeerTimeout, UserError) as error:
        return error


def come_together(count: int, present, *, limit: float, counts=None):
    """Returns the result of each process in `present`."""
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(len(present)) as threads:
        each = [
            threads.submit(come, coordinator, (counts or {}).get(process, count), process, limit)
            for process in present
        ]
        return [future.result(timeout=60) for future in each]


@pytest.mark.parametrize("count", [1, 2, 4, 40])
def test_all_processes_receive_the_hosts_of_all(count):
    received = come_together(count, range(count), limit=30.0)
    assert received == [tuple(f"host{number}" for number in range(count))] * count


@pytest.mark.parametrize(
    ("count", "present", "late"),
    [
        (2, (0,), "process 1"),
        (4, (0, 2), "processes 1, 3"),
        (5, (0, 1, 2, 3), "process 4"),
        (1024, (0, 1023), "processes 1, 2, 3, 4, 5, 6, 7, 8 and 1014 more"),
    ],
)
def test_late_processes_are_named_to_all_others(count, present, late):
    for error in come_together(count, present, limit=1.0):
        assert isinstance(error, PeerTimeout)
        assert exit_code_of(error) == TIMED_OUT
        assert str(error).startswith(f"process 0 of {count} on host0 waited 1 s at 127.0.0.1:")
        assert str(error).endswith(f" for {late}")


def test_process_0_is_missing():
    coordinator = f"127.0.0.1:{free_port()}"
    error = come(coordinator, 2, 1, 0.5)
    assert exit_code_of(error) == TIMED_OUT
    sentence = f"waited 0 s for process 0: nothing listens at {coordinator} (Connection refused)"
    assert str(error) == f"process 1 of 2 on host1 {sentence}"


@pytest.mark.parametrize("name", ["no-such-host.invalid", "x" * 70 + ".invalid", "zaya..invalid"])
@pytest.mark.parametrize("process", [0, 1])
def test_a_name_that_does_not_resolve_is_named(name, process):
    """Names in .invalid never resolve (RFC 6761); the others have a label that is too long, or empty."""
    error = come(f"{name}:{free_port()}", 2, process, 0.5)
    assert exit_code_of(error) == TIMED_OUT
    assert f'the coordinator\'s name "{name}" does not resolve' in str(error)
    assert f"process {1 - process}" in str(error)


def test_duplicate_numbers_and_different_counts_are_rejected():
    first, twin, zero = come_together(3, (1, 1, 0), limit=3.0)
    refused = [error for error in (first, twin) if isinstance(error, UserError)]
    assert [exit_code_of(error) for error in refused] == [USER_ERROR]
    assert str(refused[0]).startswith("process 1 was started twice, on host1 and on host1")
    assert str(zero).endswith("for process 2")

    for error in come_together(2, (0, 1), limit=10.0, counts={1: 3}):
        assert exit_code_of(error) == USER_ERROR
        assert "process 1 on host1 was started as one of 3 processes" in str(error)


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff" * 4000, b"[1, 2]\n", b'{"process": []}\n']
)
def test_foreign_connections_are_ignored(noise):
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(come, coordinator, 2, 0, 30.0)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                stranger = socket.create_connection(("127.0.0.1", int(coordinator.rpartition(":")[2])))
                stranger.sendall(noise)
                break
        assert come(coordinator, 2, 1, 30.0) == ("host0", "host1") == first.result(timeout=30)
        stranger.close()


def test_a_process_that_disconnected_is_late():
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        zero = threads.submit(come, coordinator, 3, 0, 2.0)
        time.sleep(0.3)
        hello = {"process": 2, "num_processes": 3, "host": "h", "port": 0, "token": ""}
        with socket.create_connection(("127.0.0.1", int(coordinator.rpartition(":")[2]))) as leaver:
            leaver.sendall(json.dumps(hello).encode() + b"\n")
            time.sleep(0.3)
        assert str(zero.result(timeout=30)).endswith("for processes 1, 2")


def test_a_port_in_use_is_named(monkeypatch):
    monkeypatch.setattr("zaya_jax.parallel.processes.rendezvous._BIND_SECONDS", 0.0)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        error = come(f"127.0.0.1:{port}", 2, 0, 1.0)
    assert exit_code_of(error) == USER_ERROR
    assert f"process 0 cannot listen at port {port}" in str(error)


@pytest.mark.parametrize(
    ("coordinator", "address"),
    [
        ("127.0.0.1:5", "127.0.0.1:5"),
        ("localhost:5", "localhost:5"),
        ("amd007:61440", "[::]:61440"),
        ("[fd00::7]:61440", "[::]:61440"),
        ("zaya-0-0.zaya:1234", "[::]:1234"),
    ],
)
def test_local_coordinators_bind_only_the_loopback(coordinator, address):
    assert bind_address(coordinator) == address


def test_no_thread_is_left():
    before = threading.active_count()
    come_together(3, range(3), limit=30.0)
    assert threading.active_count() == before


@pytest.mark.parametrize(("soft", "hard", "raised"), [(1024, 10**6, 16_896), (20_000, 10**6, None)])
def test_process_0_raises_its_limit_of_open_files(soft, hard, raised, monkeypatch):
    limits = []
    monkeypatch.setattr(listeners.resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(listeners.resource, "setrlimit", lambda kind, both: limits.append(both))
    listeners.allow_connections(8192)
    assert limits == ([] if raised is None else [(raised, hard)])


def test_too_low_a_limit_of_open_files_is_named(monkeypatch):
    monkeypatch.setattr(listeners.resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(listeners.resource, "setrlimit", lambda kind, both: None)
    listeners.allow_connections(1024)
    with pytest.raises(UserError, match=r"8192 processes need 16896 open files .* its limit is 4096"):
        listeners.allow_connections(8192)
