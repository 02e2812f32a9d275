"""The timed collectives are correct, and the plan reads the benchmark's file."""

import itertools

import pytest
from programs import program

from zaya_jax.plan.measured import ALL, IN_NODE, ONE_RAIL, RAILS, CollectiveTimes, read_measured


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("collectives")


@pytest.fixture(scope="module")
def printed(folder):
    return program("collectives_and_numpy.py", str(folder))


@pytest.mark.slow
def test_each_collective_equals_numpy(printed):
    assert printed["numbers"] == 24
    assert len(printed["differences"]) == 6
    assert not any(printed["differences"].values())


@pytest.mark.slow
def test_a_bench_times_all_subsets_at_all_sizes(printed, folder):
    actual = read_measured(folder / "found.json")
    assert isinstance(actual, CollectiveTimes)
    assert (actual.num_processes, actual.num_nodes, actual.devices_per_node) == (1, 2, 4)
    assert actual.layouts == [ALL, IN_NODE, RAILS, ONE_RAIL, "2 of a node"]
    shapes = {each.layout: (each.group_size, each.num_groups) for each in actual.timings}
    assert shapes == {ALL: (8, 1), IN_NODE: (4, 2), RAILS: (2, 4), ONE_RAIL: (2, 1), "2 of a node": (2, 2)}
    for layout, collective in itertools.product(actual.layouts, printed["differences"]):
        curve = actual.curve(layout, collective)
        assert curve is not None
        assert curve.num_bytes[0] <= 1024
    assert (folder / "found.png").stat().st_size > 10_000
