"""Times of collectives, compared with published tables and with the physical rates of the wires."""

import dataclasses
import math

import pytest

from zaya_jax.plan.cases import (
    ASSUMPTIONS,
    CASES,
    MI325X_POINTS,
    MIB,
    NODE_POINTS,
    OPTIMISTIC,
    PESSIMISTIC,
    POLLARA_POINTS,
    PUBLISHED,
    TWO_NODE_POINTS,
    replace_assumption,
    step_range,
)
from zaya_jax.plan.devices import Cluster, find_device
from zaya_jax.plan.gpus import DEVICES, MI300X
from zaya_jax.plan.links import BUS_FACTORS, Links, bus_factor, interpolate, wire_curve

LINKS = Cluster(device=MI300X, nodes=128, gpus_per_node=8).links
# Bus bandwidth in GB/s of all-reduces by MiB, as printed in [RCCL-runs], out of place.
ONE_NODE = {
    1: 64.64, 2: 100.05, 4: 138.60, 8: 173.16, 16: 195.85, 32: 238.45, 64: 271.51, 128: 293.50, 256: 304.96,
    512: 310.37, 1024: 313.66, 2048: 314.75, 4096: 315.26, 8192: 315.69,
}  # fmt: skip
TWO_NODES = {
    1: 4.74, 2: 12.34, 4: 23.27, 8: 39.10, 16: 63.26, 32: 106.58, 64: 153.10, 128: 173.70, 256: 293.75,
    512: 325.10, 1024: 340.75, 2048: 347.90, 4096: 353.40, 8192: 356.14,
}  # fmt: skip
POLLARA = {
    1: 24.16, 2: 39.92, 4: 66.30, 8: 94.49, 16: 120.23, 32: 160.59, 64: 204.84, 128: 241.57, 256: 304.67,
    512: 349.47, 1024: 364.39, 2048: 366.40, 4096: 368.22, 8192: 369.04,
}  # fmt: skip
GROUPS = [(8, 1), (2, 1), (1, 2), (8, 2), (1, 128), (8, 128), (4, 3), (1, 7)]
"""GPUs per node and nodes."""


def bus_bandwidth(links, collective, mebibytes, *, ranks=8, nodes):
    seconds = links.seconds(collective, mebibytes * MIB, ranks=ranks, nodes=nodes)
    return mebibytes * MIB * bus_factor(collective, ranks * nodes) / seconds / 1e9


@pytest.mark.parametrize(
    ("case", "nodes", "published"),
    [(PUBLISHED, 1, ONE_NODE), (PUBLISHED, 2, TWO_NODES), (OPTIMISTIC, 2, POLLARA)],
)
def test_published_all_reduces(case, nodes, published):
    """[RCCL-runs], 1 MiB to 8 GiB; 1 MiB took longer than 2 and 4 MiB between nodes."""
    links = dataclasses.replace(LINKS, case=case)
    ratios = {
        size: bus_bandwidth(links, "all_reduce", size, nodes=nodes) / published[size] for size in published
    }
    print(nodes, {size: round(ratio, 3) for size, ratio in ratios.items()})
    assert all(0.8 < ratio < 1.25 for ratio in ratios.values()), ratios
    assert math.prod(ratios.values()) ** (1 / len(ratios)) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(("points", "nodes"), [(NODE_POINTS, 1), (TWO_NODE_POINTS, 2), (POLLARA_POINTS, 2)])
def test_each_published_point_follows_from_the_others(points, nodes):
    """What the curve says of a size that it does not have; 2 MiB to 4 GiB, to interpolate and not beyond."""
    ratios = {}
    for left_out in (size for size in points if 2 * MIB <= size < 8192 * MIB):
        others = {size: time for size, time in points.items() if size != left_out}
        curve = wire_curve("all_reduce", others, rate=50e9, ranks=8, nodes=nodes)
        whole = wire_curve("all_reduce", points, rate=50e9, ranks=8, nodes=nodes)
        ratios[left_out // MIB] = points[left_out] / curve.at(whole.wire[list(points).index(left_out)])
    print(nodes, {size: round(ratio, 3) for size, ratio in ratios.items()})
    assert all(0.8 < ratio < 1.25 for ratio in ratios.values()), ratios


def test_the_floor_of_two_nodes():
    assert LINKS.seconds("all_reduce", 8, ranks=8, nodes=2) == pytest.approx(219e-6, rel=0.01)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [("all_gather", 330), ("reduce_scatter", 340), ("all_reduce", 330), ("all_to_all", 45)],
)
def test_other_kinds_compared_with_amds_expectations(collective, expected):
    """[CVS], two nodes, 8 GiB: no curve is made of the first three."""
    assert 0.8 < bus_bandwidth(LINKS, collective, 8192, nodes=2) / expected < 1.25


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_more_nodes_than_the_curve(nodes):
    """Two to eight nodes of MI325X [RCCL-runs], none of which is in the curve."""
    for num_bytes, microseconds in MI325X_POINTS[nodes].items():
        seconds = LINKS.seconds("all_reduce", num_bytes, ranks=8, nodes=nodes)
        assert 0.95 < 1e6 * seconds / microseconds < 1.05


def test_an_exchange_in_a_node_compared_with_amds_projection():
    """[Primus-projection]: 384 MB to and from the experts of 8 MI355X, 3.913 ms a layer."""
    node = Cluster(device=find_device("mi355x"), nodes=1, gpus_per_node=8)
    ours = 2 * node.links.in_node("all_to_all", 384 * MIB, ranks=8)
    assert 0.8 < ours / 3.913e-3 < 1.25


def test_steps_of_more_nodes_by_hand():
    """128 nodes: 126 steps more than two nodes in a ring; log2(128) = 7 levels of a tree instead of one."""
    step = PUBLISHED.network_step_seconds

    def of_empty(collective, nodes):
        # Latency alone: a byte on a wire of endless bandwidth.
        fast = dataclasses.replace(LINKS, network_bandwidth=1e30)
        return fast.between_nodes(collective, 1, ranks=1, nodes=nodes)

    assert of_empty("all_gather", 128) - of_empty("all_gather", 64) == pytest.approx(64 * step)
    assert of_empty("all_reduce", 128) - of_empty("all_reduce", 64) == pytest.approx(2 * step)


@pytest.mark.parametrize(
    "collective", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("device", ["mi300x", "h100"])
def test_times_grow_with_size_and_are_never_below_the_wire(collective, case, device):
    links = Cluster(device=DEVICES[device], nodes=128, gpus_per_node=8, case=case).links
    sizes = [0, 1, 999, *(2**power + odd for power in range(10, 38) for odd in (0, 2**9 + 1))]
    for ranks, nodes in GROUPS:
        times = [links.seconds(collective, size, ranks=ranks, nodes=nodes) for size in sizes]
        assert times == sorted(times)
        for size, time in zip(sizes, times, strict=True):
            # Whatever the algorithm: a GPU of a node receives its part of the message over its links, or the
            # node receives what it lacks over its NICs.
            part = size / (ranks if collective != "all_to_all" else 1)
            inside = size * (ranks - 1) / ranks / ((ranks - 1) * links.link_bandwidth) if ranks > 1 else 0
            wire = inside if nodes == 1 else part * (nodes - 1) / nodes / links.network_bandwidth
            assert time >= wire * (1 - 1e-9)


@pytest.mark.parametrize("collective", BUS_FACTORS)
def test_degenerate_messages_and_groups(collective):
    assert LINKS.seconds(collective, 2**30, ranks=1, nodes=1) == 0
    for ranks, nodes in GROUPS:
        assert LINKS.seconds(collective, 0, ranks=ranks, nodes=nodes) == 0
        small, one = (LINKS.seconds(collective, size, ranks=ranks, nodes=nodes) for size in (2, 1))
        assert 0 < one == pytest.approx(small)  # only latency
        large, twice = (LINKS.seconds(collective, size * 2**40, ranks=ranks, nodes=nodes) for size in (1, 2))
        assert twice == pytest.approx(2 * large, rel=0.01)  # only bandwidth


def test_more_nodes_and_fewer_links_take_longer():
    for collective in ("all_gather", "all_reduce", "all_to_all"):
        by_nodes = [LINKS.between_nodes(collective, 48 * MIB, ranks=1, nodes=n) for n in (2, 3, 4, 16, 128)]
        assert by_nodes == sorted(by_nodes)
    # A GPU of a pair has one link, with eight GPUs seven.
    pair, node = (LINKS.in_node("all_gather", 2**33, ranks=ranks) for ranks in (2, 8))
    assert pair / node == pytest.approx((1 / 2) / 1 / ((7 / 8) / 7), rel=0.01)


def test_interpolation_of_logarithms():
    sizes, times = (1000, 4000, 16_000), (1.0, 2.0, 8.0)
    assert interpolate(sizes, times, 0) == interpolate(sizes, times, 1) == pytest.approx(1.0)
    assert interpolate(sizes, times, 2000) == pytest.approx(2**0.5)
    assert interpolate(sizes, times, 64_000) == pytest.approx(32.0)
    # A time that falls becomes the geometric mean of both: neither is trusted more.
    assert interpolate(sizes, (4.0, 1.0, 8.0), 1000) == pytest.approx(2.0)
    assert interpolate(sizes, (4.0, 1.0, 8.0), 4000) == pytest.approx(2.0)


def test_measured_curves_replace_published_ones():
    """A wire of 10 GB/s with 1 ms of latency; unmeasured kinds follow the measured ones."""
    points = {size: 1e-3 + size * bus_factor("all_gather", 4) / 10e9 for size in (1, 2**20, 2**30, 2**34)}
    curve = wire_curve("all_gather", points, rate=50e9, ranks=1, nodes=4)
    slow = Links(link_bandwidth=64e9, network_bandwidth=50e9, measured_between={"all_gather": curve})
    expected = 1e-3 + 2**30 * 3 / 4 / 10e9
    assert slow.between_nodes("all_gather", 2**30, ranks=1, nodes=4) == pytest.approx(expected)
    # Twice as many bytes on the wire, and an all-reduce of four nodes has two levels of a tree twice.
    both = slow.between_nodes("all_reduce", 2**30, ranks=1, nodes=4)
    assert both == pytest.approx(1e-3 + 2 * 2**30 * 3 / 4 / 10e9, rel=0.05)
    exchange = slow.between_nodes("all_to_all", 2**33, ranks=1, nodes=4)
    assert exchange == pytest.approx(1e-3 + PUBLISHED.all_to_all_slowdown * 2**33 * 3 / 4 / 10e9, rel=0.01)
    # What was not measured stays as published.
    assert slow.in_node("all_gather", 2**30, ranks=8) == LINKS.in_node("all_gather", 2**30, ranks=8)


def test_assumptions_cover_all_fields_and_order_the_cases():
    fields = {field.name for field in dataclasses.fields(PUBLISHED)} - {"name"}
    assert sorted(fields) == sorted(field for fields in ASSUMPTIONS.values() for field in fields)
    others = {
        "share of the peak that products reach",
        "products in our kernels relative to the library's",
        "links in a node and NICs at the same time",
    }
    assert OPTIMISTIC.kernel_rate >= PUBLISHED.kernel_rate > PESSIMISTIC.kernel_rate > 0
    for name in set(ASSUMPTIONS) - others:
        cases = replace_assumption(name, OPTIMISTIC), PUBLISHED, replace_assumption(name, PESSIMISTIC)
        times = [
            math.fsum(
                dataclasses.replace(LINKS, case=case).seconds(kind, 48 * MIB, ranks=ranks, nodes=nodes)
                for kind in ("all_gather", "all_to_all")
                for ranks, nodes in ((8, 1), (1, 128))
            )
            for case in cases
        ]
        assert times == sorted(times)
        assert times[0] < times[2]


def test_the_range_names_the_assumption_that_matters():
    result = step_range(lambda case: 1.0 + 1e5 * case.network_step_seconds)
    assert result.main_assumption == "latency of each further node of a ring"
    assert result.seconds["published"] == pytest.approx(1.95)
    assert result.effects["bandwidth within a node"] == (result.seconds["published"],) * 2
