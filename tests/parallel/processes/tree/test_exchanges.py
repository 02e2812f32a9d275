"""Exchanges over real connections between threads, which act as processes."""

import json
import threading
import time

import pytest
from connected import connected

from zaya_jax.errors import RESUMABLE, TIMED_OUT, exit_code_of
from zaya_jax.parallel.processes.errors import PeerLost, PeerTimeout
from zaya_jax.parallel.processes.tree.exchanges import join
from zaya_jax.parallel.processes.tree.links import decode, encode


@pytest.mark.parametrize(("count", "fan_out"), [(2, 16), (4, 16), (24, 3)])
def test_all_receive_values_of_all_sizes(count, fan_out):
    with connected(count, fan_out=fan_out) as peers:
        for text in ("x", "x" * 100_000):
            results = peers.on(
                range(count), lambda each, n, text=text: each.reduce("a", [text + str(n)], join)
            )
            assert set(map(tuple, results.values())) == {tuple(text + str(n) for n in range(count))}
        assert set(peers.on(range(count), lambda each, n: each.reduce("max", n, max)).values()) == {count - 1}
        assert set(peers.on(range(count), lambda each, n: each.broadcast("b", n)).values()) == {0}
        available = peers.on(range(count), lambda each, n: each.available("c", n, limit_seconds=5.0))
        assert all(each == {n: n for n in range(count)} for each in available.values())


def test_a_posted_message_reaches_all():
    with connected(24, fan_out=3) as peers:
        peers.exchanges[23].post("stop", "enough")
        got = peers.on(range(24), lambda each, n: each.wait_for_post("stop", limit_seconds=10.0))
        assert set(got.values()) == {"enough"}
        assert peers.exchanges[0].wait_for_post("other", limit_seconds=0.01) is None


@pytest.mark.parametrize("late", [1, 23])
def test_late_processes_are_named_in_all(late):
    with connected(24, fan_out=3) as peers:
        others = [n for n in range(24) if n != late]
        errors = peers.on(others, lambda each, n: each.reduce("lunch", n, max, limit_seconds=0.3))
        for error in errors.values():
            assert isinstance(error, PeerTimeout)
            assert exit_code_of(error) == TIMED_OUT
            assert str(error) == f"waited 0 s at lunch for process {late} on node"
        # Also in the late one, when it comes.
        (error,) = peers.on([late], lambda each, n: each.reduce("lunch", n, max)).values()
        assert str(error).endswith(f"for process {late} on node")


def test_a_stopped_process_is_named_with_the_number_of_those_that_it_connects():
    with connected(24, fan_out=3) as peers:
        place = peers.links[1].node.place
        # Its threads wait for the lock, as if the process was stopped.
        with peers.links[1].changed:
            others = [n for n in range(24) if n != 1]
            errors = peers.on(others, lambda each, n: each.reduce("lunch", n, max, limit_seconds=0.3))
        for number, error in errors.items():
            if place.process < number < place.end:
                # It gets no answer: process 0 may be late, or the one that connects it.
                assert "for process 0 on node" in str(error)
            else:
                more = f"the {place.end - 2} processes after it, which it connects"
                assert str(error).endswith(f"for process 1 on node (and {more})")
        answers = peers.on([0], lambda each, n: each.available("where", "here", limit_seconds=0.1))
        assert answers[0][1] is None
        assert answers[0][0] == "here"


def test_a_lost_connection_is_reported_at_once():
    with connected(8, fan_out=2) as peers:
        start = time.monotonic()
        peers.links[1].close()
        waiting = peers.links[1].node.place.children
        errors = peers.on(waiting, lambda each, n: each.reduce("next", n, max))
        for number, error in errors.items():
            assert isinstance(error, PeerLost)
            assert exit_code_of(error) == RESUMABLE
            assert str(error).startswith(
                f"process {number} on node does not reach process 0 through process 1 on node; run the same"
            )
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("sender", [0, 2])
def test_a_damaged_message_names_its_process(sender):
    """The process that is farther from process 0 ends; the other one waits for it, and names it."""
    with connected(3, fan_out=2) as peers:
        connection = peers.links[sender]._connections[2 - sender].socket
        line = encode({"kind": "post", "key": "a", "text": "b"})
        connection.sendall(line[:20] + bytes([line[20] ^ 1]) + line[21:])
        errors = peers.on(range(3), lambda each, n: each.reduce("next", n, max, limit_seconds=0.5))
        if sender == 0:
            # Process 2 may have sent its value before it read the damaged message.
            errors |= peers.on((0, 1), lambda each, n: each.reduce("next", n, max, limit_seconds=0.5))
    assert isinstance(errors[2], PeerLost)
    reason = "does not reach" if sender else "exchanges damaged messages with"
    assert str(errors[2]).startswith(f"process 2 on node {reason} process 0; ")
    damaged = ", whose messages are damaged" if sender else ""
    for number in (0, 1):
        assert isinstance(errors[number], PeerTimeout)
    assert str(errors[0]) == f"waited 0 s at next for process 2 on node{damaged}"


def test_every_damaged_byte_is_noticed():
    line = encode([3, "a"])
    assert decode(line) == [3, "a"]
    for place in range(len(line) - 1):
        with pytest.raises(ValueError, match=r"damaged"):
            decode(line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :])


def test_large_values_in_both_directions_do_not_block_each_other():
    """Each process sends more than fits into the kernel's buffers before it reads."""
    big = json.dumps(["x" * 1000] * 20_000)
    with connected(3, fan_out=2, limit_seconds=60.0) as peers:
        peers.exchanges[0].broadcast("down", big)
        results = peers.on(range(1, 3), lambda each, n: (each.post("up", big), each.broadcast("down", None)))
        assert all(each[1] == big for each in results.values())
        assert peers.exchanges[0].wait_for_post("up", limit_seconds=20.0) == big


def test_no_thread_is_left():
    before = threading.active_count()
    with connected(8, fan_out=2):
        pass
    assert threading.active_count() == before
