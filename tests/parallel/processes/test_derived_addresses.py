"""Processes that go to their parents first, at derived addresses, and to process 0 where that fails."""

import concurrent.futures
import contextlib
import selectors
import socket
import threading
import time

import pytest
from rendezvous_peers import come, come_together, free_port, introduce, receive

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.errors import PeerTimeout
from zaya_jax.parallel.processes.listeners import PeerConnection, encode_line, parent_port
from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.tree.children import ChildRegistry, wait_for_events
from zaya_jax.parallel.processes.tree.shape import place_of

HOSTS = ("host0", "host1", "host2")
"""Processes in a row, with a fan-out of 1: process 2 is a child of process 1."""
DIRECT, REDIRECTED = 3, 5
"""Messages of process 0 in a row of three. Process 1 comes, sends the hosts of both, and receives all hosts.
Redirected, process 2 comes and receives an address."""


def row(*, limit: float = 20.0, late: dict[int, float] | None = None, coordinator: str = "", **options):
    """Returns the results of three processes in a row, and the number of messages of process 0.

    Args:
      limit: time limit in seconds.
      late: seconds after which processes start.
      coordinator: address of process 0; empty for a free one.
    """
    address, messages = coordinator or f"127.0.0.1:{free_port()}", {}

    def start(number: int):
        time.sleep((late or {}).get(number, 0.0))
        return come(address, 3, number, limit, fan_out=1, is_derived=True, messages=messages, **options)

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        return list(threads.map(start, range(3))), messages.get(0)


@contextlib.contextmanager
def occupied(coordinator: str, answer: bytes | None):
    """Listens at the derived port of process 1.

    Args:
      coordinator: address of process 0.
      answer: what each connection receives before it is closed; None to keep it open.
    """
    with socket.create_server(("127.0.0.1", parent_port(coordinator, 1))) as listener:
        connections = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])
                    if answer is not None:
                        connections[-1].sendall(answer)
                        connections[-1].shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield connections
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in connections:
                each.close()


@pytest.fixture
def no_reports(monkeypatch):
    """Numbers of messages are then the same on a busy machine."""
    monkeypatch.setattr("zaya_jax.parallel.processes.rendezvous._REPORT_SECONDS", 60.0)


@pytest.mark.usefixtures("no_reports")
def test_process_0_has_messages_only_from_its_children():
    """Each sends its first message and its hosts, and receives those of all."""
    messages: dict[int, int] = {}
    received = come_together(31, range(31), limit=30.0, fan_out=2, is_derived=True, messages=messages)
    assert received == [tuple(f"host{number}" for number in range(31))] * 31
    assert messages[0] == 3 * 2
    # Without derived addresses it has messages from all.
    come_together(31, range(31), limit=30.0, fan_out=2, messages=messages)
    assert messages[0] == 3 * 2 + 2 * 28


@pytest.mark.usefixtures("no_reports")
@pytest.mark.parametrize("first", [0, 1, 2])
def test_processes_come_in_any_order(first):
    late = {number: 0.3 * ((number - first) % 3) for number in range(3)}
    assert row(late=late) == ([HOSTS] * 3, DIRECT)


@pytest.mark.usefixtures("no_reports")
@pytest.mark.parametrize(
    "answer",
    [b"", None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"next": ["h", 1, ""], "process": 1}\n', b"[]\n"],
)
def test_another_program_has_the_port_of_the_parent(answer):
    coordinator = f"127.0.0.1:{free_port()}"
    with occupied(coordinator, answer) as connections:
        assert row(coordinator=coordinator, limit=4.0) == ([HOSTS] * 3, REDIRECTED)
        assert connections


@pytest.mark.usefixtures("no_reports")
def test_another_run_has_the_port_of_the_parent(monkeypatch):
    """A parent of that run sends the process away."""
    monkeypatch.setattr(
        "zaya_jax.parallel.processes.rendezvous.parent_port", lambda coordinator, process: port + process
    )
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        other = threads.submit(come, f"127.0.0.1:{free_port()}", 3, 1, 2.0, fan_out=1, is_derived=True)
        time.sleep(0.3)
        assert row() == ([HOSTS] * 3, REDIRECTED)
        assert isinstance(other.result(timeout=30), PeerTimeout)


@pytest.mark.usefixtures("no_reports")
def test_a_process_of_the_previous_attempt_has_the_port_of_the_parent():
    """It accepts the process, which begins again when it ends; or it knows an earlier one of that number."""
    coordinator = f"127.0.0.1:{free_port()}"
    for answer in ({"accepted": ""}, {"refused": "process 2 was started twice"}):
        with occupied(coordinator, encode_line(answer)) as connections:
            assert row(coordinator=coordinator) == ([HOSTS] * 3, REDIRECTED)
            assert connections


@pytest.mark.usefixtures("no_reports")
def test_a_parent_is_later_than_the_shortcut_lasts():
    """Process 2 waits in process 0, which then redirects it."""
    assert row(limit=4.0, late={1: 2.5}) == ([HOSTS] * 3, REDIRECTED)


def test_the_derived_name_does_not_resolve():
    begin = time.monotonic()
    assert row(name="no-such-host.invalid")[0] == [HOSTS] * 3
    assert time.monotonic() - begin < 5.0


@pytest.mark.parametrize("counts", [{2: 4}, {2: 4, 3: 4}, {1: 5}, {1: 5, 2: 5}])
def test_other_numbers_are_refused_in_all_processes(counts):
    """The parent, the child, or both of them have another number of processes than process 0."""
    present = range(4 if 3 in counts else 3)
    for error in come_together(3, present, limit=4.0, counts=counts, fan_out=1, is_derived=True):
        assert isinstance(error, UserError), error
        assert "start all with the same --num-processes" in str(error)


def test_a_twin_is_refused_by_the_parent():
    results = come_together(4, (0, 1, 2, 2), limit=4.0, fan_out=1, is_derived=True)
    refused = [str(each) for each in results if isinstance(each, UserError)]
    assert [each.partition(",")[0] for each in refused] == ["process 2 was started twice"]
    late = [str(each) for each in results if isinstance(each, PeerTimeout)]
    assert [each.partition(" for ")[2] for each in late] == ["process 3"] * 3


def test_process_0_is_missing_for_those_that_have_a_parent():
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        # The second one starts later, so that its parent reaches its limit before.
        waiting = [threads.submit(come, coordinator, 3, 1, 1.0, fan_out=1, is_derived=True)]
        time.sleep(0.3)
        waiting.append(threads.submit(come, coordinator, 3, 2, 1.0, fan_out=1, is_derived=True))
        for number, each in enumerate(waiting, start=1):
            reason = f"nothing listens at {coordinator} (Connection refused)"
            assert str(each.result(timeout=30)) == (
                f"process {number} of 3 on host{number} waited 1 s for process 0: {reason}"
            )


def test_a_parent_tells_its_children_what_keeps_it_from_process_0():
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        parent = threads.submit(come, coordinator, 3, 1, 2.0, fan_out=1, is_derived=True)
        time.sleep(0.3)
        address = f"127.0.0.1:{parent_port(coordinator, 1)}"
        with contextlib.closing(introduce(address, 3, 2, run=coordinator)) as child:
            assert receive(child) == {"accepted": ""}
            assert receive(child)["obstacle"].startswith(f"nothing listens at {coordinator}")
        # One that comes later learns it at once.
        with contextlib.closing(introduce(address, 3, 2, run=coordinator)) as child:
            assert receive(child)["accepted"].startswith("nothing listens at ")
        assert isinstance(parent.result(timeout=30), PeerTimeout)


def test_others_reach_a_child_on_the_same_host_by_its_name():
    """Debian gives the name of a host the address 127.0.1.1 on that host."""
    group = ProcessGroup("n0:61440", 4, 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        selectors.DefaultSelector() as selector,
        ChildRegistry(group, place_of(1, 4, fan_out=1), "h", listener, selector) as registry,
    ):
        here = f"localhost:{registry.port}"
        child = introduce(here, 4, 2, port=77, run=group.coordinator)
        wait_for_events(selector, 5.0)
        with contextlib.closing(introduce(here, 4, 3, run=group.coordinator)) as below:
            wait_for_events(selector, 5.0)
            assert receive(below)["next"] == ["localhost", 77, here]
        for each in (child, *registry.connections.values()):
            each.close()


def test_a_child_that_comes_again_before_its_end_was_read_is_no_twin():
    group = ProcessGroup(f"127.0.0.1:{free_port()}", 3, 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        selectors.DefaultSelector() as selector,
        ChildRegistry(group, place_of(1, 3, fan_out=1), "h", listener, selector) as registry,
    ):
        address = f"127.0.0.1:{registry.port}"
        introduce(address, 3, 2, run=group.coordinator).close()
        again = introduce(address, 3, 2, run=group.coordinator)
        time.sleep(0.1)
        wait_for_events(selector, 5.0)
        assert receive(again) == {"accepted": ""}
        # A second one at the same time is.
        twin: PeerConnection = introduce(address, 3, 2, run=group.coordinator)
        wait_for_events(selector, 5.0)
        assert "was started twice" in receive(twin)["refused"]
        for each in (again, twin, *registry.connections.values()):
            each.close()
