"""Rendezvous of processes, which are simulated by threads over the loopback."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import pytest
from rendezvous_peers import come, come_together, free_port, introduce, receive

from zaya_jax.errors import TIMED_OUT, USER_ERROR, UserError, exit_code_of
from zaya_jax.parallel.processes import listeners
from zaya_jax.parallel.processes.errors import PeerTimeout
from zaya_jax.parallel.processes.listeners import PeerConnection, bind_address
from zaya_jax.parallel.processes.tree.shape import place_of


@pytest.mark.parametrize("is_derived", [False, True])
@pytest.mark.parametrize(("count", "fan_out"), [(1, 16), (2, 16), (4, 16), (40, 16), (30, 2), (5, 1)])
def test_all_processes_receive_the_hosts_of_all(count, fan_out, is_derived):
    received = come_together(count, range(count), limit=30.0, fan_out=fan_out, is_derived=is_derived)
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


@pytest.mark.parametrize("is_derived", [False, True])
def test_a_late_process_is_named_through_several_levels(is_derived):
    """Those below it are there, although their parent is not, and wait in another process."""
    place = place_of(8, 15, fan_out=2)
    late = place.children[0]
    assert place_of(late, 15, fan_out=2).children
    others = [each for each in range(15) if each != late]
    results = come_together(15, others, limit=4.0, fan_out=2, is_derived=is_derived)
    assert {str(error).partition(" for ")[2] for error in results} == {f"process {late}"}


def test_a_process_that_dies_is_replaced_with_its_connections():
    """Processes in a row: 1 dies after 2 has connected with it, and starts again."""
    coordinator, hosts = f"127.0.0.1:{free_port()}", ("host0", "host1", "host2", "host3")
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        others = [threads.submit(come, coordinator, 4, number, 30.0, fan_out=1) for number in (0, 2, 3)]
        time.sleep(0.3)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dying = introduce(coordinator, 4, 1, port=listener.getsockname()[1])
            child = PeerConnection(listener.accept()[0])
            # Processes 2 and 3 come in any order.
            assert receive(child)["run"] == coordinator
            child.close()
            dying.close()
        assert come(coordinator, 4, 1, 30.0, fan_out=1) == hosts
        assert [each.result(timeout=30) for each in others] == [hosts] * 3


def test_only_process_0_is_open_to_processes_that_do_not_name_the_run():
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        others = [threads.submit(come, coordinator, 3, number, 30.0, fan_out=1) for number in (0, 1)]
        time.sleep(0.3)
        with contextlib.closing(introduce(coordinator, 3, 2)) as first:
            address, port, run = receive(first)["next"]
        wrong = introduce(f"{address}:{port}", 3, 2, run="another:61440")
        with pytest.raises(OSError, match=r"closed the connection|reset"):
            receive(wrong)
        wrong.close()
        # It was not registered: the right one still can be.
        with contextlib.closing(introduce(f"{address}:{port}", 3, 2, run=run)) as right:
            assert "accepted" in receive(right)
            assert receive(right) == {"hosts": ["host0", "host1", "h"]}
        assert [each.result(timeout=30) for each in others] == [("host0", "host1", "h")] * 2


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

    for error in come_together(2, (0, 1), limit=4.0, counts={1: 3}):
        assert exit_code_of(error) == USER_ERROR
        assert "process 1 on host1 was started as one of 3 processes" in str(error)


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff" * 4000, b"[1, 2]\n", b'{"process": 1}\n']
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
        introduce(coordinator, 3, 2).close()
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


@pytest.mark.parametrize(("soft", "hard", "raised"), [(1024, 10**6, 8704), (20_000, 10**6, None)])
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
    with pytest.raises(UserError, match=r"8192 processes need 8704 open files .* its limit is 4096"):
        listeners.allow_connections(8192)
