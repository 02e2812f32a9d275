"""Shape of the tree of processes: which parents and children each process has."""

import math

import pytest

from zaya_jax.parallel.processes.tree.shape import FAN_OUT, parents, place_of


@pytest.mark.parametrize(
    ("count", "fan_out"), [(1, 16), (2, 16), (5, 2), (17, 16), (18, 16), (300, 3), (999, 16)]
)
def test_every_process_is_in_the_subtrees_of_its_ancestors_only(count, fan_out):
    places = [place_of(number, count, fan_out=fan_out) for number in range(count)]
    for place in places:
        assert len(place.children) <= fan_out
        for child in place.children:
            assert places[child].parent == place.process
            assert places[child].end - child == place.child_size(child)
            assert places[child].height < place.height
        # The subtrees of the children have all numbers after that of the process itself.
        covered = [n for child in place.children for n in range(child, places[child].end)]
        assert covered == list(range(place.process + 1, place.end))
        if place.children:
            # An upper bound, since children are of almost equal size.
            assert place.height == 1 + max(places[child].height for child in place.children)
    assert sum(place.parent is None for place in places) == 1
    assert parents(count, fan_out=fan_out) == {place.process: place.parent for place in places[1:]}


@pytest.mark.parametrize("count", range(1, FAN_OUT + 2))
def test_few_processes_are_all_children_of_process_0(count):
    assert place_of(0, count).children == tuple(range(1, count))
    assert all(place_of(number, count).parent == 0 for number in range(1, count))


def test_the_height_grows_like_the_logarithm_and_the_messages_of_process_0_not_at_all():
    """In an exchange process 0 receives a message of each child, and sends one to it."""
    for count in (*range(2, 8193), 100_000):
        root = place_of(0, count)
        assert len(root.children) == min(count - 1, FAN_OUT)
        assert root.height <= math.ceil(math.log(count, FAN_OUT)) or count <= FAN_OUT
