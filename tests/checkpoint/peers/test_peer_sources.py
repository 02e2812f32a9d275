"""Who keeps whose copies, and which step every process can restore."""

import random

import pytest

from zaya_jax.checkpoint.peers.copies import CopyKey
from zaya_jax.checkpoint.peers.sources import CompleteStep, in_order_of_distance, neighbors, newest_complete


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", (None,)),
        ("aaa", (None, None, None)),
        ("ab", (1, 0)),
        ("abcd", (1, 2, 3, 0)),
        ("aabb", (2, 3, 0, 1)),
        # A cyclic placement, and nodes of different sizes.
        ("abab", (1, 0, 3, 2)),
        ("aaab", (3, 3, 3, 0)),
    ],
)
def test_copies_go_to_the_next_node(hosts, expected):
    assert neighbors(hosts) == expected


def test_every_process_has_a_neighbor_on_another_node():
    numbers = random.Random(0)
    for _ in range(100):
        hosts = [numbers.choice("abcde") for _ in range(numbers.randrange(2, 20))]
        if len(set(hosts)) > 1:
            assert all(hosts[n or 0] != hosts[p] for p, n in enumerate(neighbors(hosts)))


def held_after(lost: str, hosts: str, steps=(4, 8)) -> list[set[CopyKey]]:
    """Copies that processes find after the loss of nodes, if all of them were complete."""
    held = [set() for _ in hosts]
    for owner, keeper in enumerate(neighbors(hosts)):
        for process in {owner, owner if keeper is None else keeper}:
            if hosts[process] not in lost:
                held[process] |= {CopyKey(step, "x", owner) for step in steps}
    return held


@pytest.mark.parametrize("hosts", ["abcd", "aabbcc", "abcabc"])
def test_any_one_node_may_be_lost(hosts):
    for lost in ("", *set(hosts)):
        complete = newest_complete(held_after(lost, hosts))
        assert complete is not None
        assert complete.step == 8
        assert all(hosts[n] not in lost for sources in complete.sources for n in sources)


def test_of_two_lost_nodes_only_those_that_are_not_adjacent():
    assert newest_complete(held_after("ac", "abcd")) is not None
    assert newest_complete(held_after("ab", "abcd")) is None
    assert newest_complete(held_after("da", "abcd")) is None


def test_a_single_node_restores_from_itself():
    assert newest_complete(held_after("", "aa")) == CompleteStep(8, "x", ((0,), (1,)))
    assert newest_complete([set(), set()]) is None


def test_an_incomplete_newer_step_is_not_used():
    held = held_after("", "ab")
    held[0].add(CopyKey(12, "x", 0))
    expected = CompleteStep(8, "x", ((0, 1), (0, 1)))
    assert newest_complete(held) == expected
    assert expected.key(1) == CopyKey(8, "x", 1)


def test_attempts_are_not_mixed():
    """Both have reached step 8, and neither has copied all of it."""
    held = [{CopyKey(8, "x", 0), CopyKey(4, "x", 0), CopyKey(4, "x", 1)}, {CopyKey(8, "y", 1)}]
    assert newest_complete(held) == CompleteStep(4, "x", ((0,), (0,)))


def test_copies_of_more_processes_are_no_obstacle():
    held = [{CopyKey(8, "x", owner) for owner in range(4)}]
    assert newest_complete(held) == CompleteStep(8, "x", ((0,),))


def test_the_nearest_source_comes_first():
    assert in_order_of_distance([0, 1, 2, 3], 2, "abbc") == [2, 1, 0, 3]
    assert in_order_of_distance([3, 0], 1, "abbc") == [0, 3]
