"""Groups of devices gather what one of each group writes into a checkpoint."""

import math

from programs import program

SHAPE = (16, 16, 8)
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def test_what_writers_have_is_the_whole_of_each_array():
    cases = program("gathered_in_groups.py")
    assert len(cases) == 20
    for case in cases:
        node_devices, of_member, groups, copies = case["layout"]
        assert all(case["equal"]), case
        assert case["others"] == [True, 7, 8], case
        # The first member of each group.
        distance = 8 // groups
        assert case["devices"] == [g * distance + i for g in range(groups) for i in range(of_member)], case
        # Each device has an equal part; of arrays with copies, each node of a member.
        *sharded, whole = case["sizes"]
        parts = groups * (of_member if copies == 1 else node_devices)
        assert all(set(sizes) == {math.prod(SHAPE) // parts} for sizes in sharded), case
        assert set(whole) == {math.prod(SHAPE) // (groups * of_member)}, case


def test_a_group_gathers_each_array_once_and_no_device_has_more_than_its_group():
    for case in program("gathered_in_groups.py"):
        _, _, groups, _ = case["layout"]
        sizes, *others = (case["collectives"][kind] for kind in KINDS)
        # The last of the six arrays is already on all devices.
        assert len(sizes) == 5, case
        assert max(sizes) <= math.prod(SHAPE) // groups, case
        assert not any(others), case
