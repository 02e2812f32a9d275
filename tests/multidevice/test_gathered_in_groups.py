"""Groups of devices gather what one of each group writes into a checkpoint."""

import math

from programs import program

SHAPE = (16, 16, 8)


def test_what_writers_have_is_the_whole_of_each_array():
    cases = program("gathered_in_groups.py")
    assert len(cases) == 16
    for case in cases:
        _, _, of_member, groups = case["layout"]
        assert all(case["equal"]), case
        assert case["others"] == [True, 7, 8], case
        # The first member of each group, and each of its devices an equal part.
        distance = 8 // groups
        assert case["devices"] == [g * distance + i for g in range(groups) for i in range(of_member)], case
        assert set(case["sizes"]) == {math.prod(SHAPE) // (groups * of_member)}, case


def test_a_group_gathers_each_array_once_and_no_device_has_more_than_its_group():
    for case in program("gathered_in_groups.py"):
        *_, groups = case["layout"]
        sent = case["collectives"]
        sizes = sent.pop("all-gather")
        # The last of the six arrays is already on all devices.
        assert len(sizes) == 5, case
        assert max(sizes) <= math.prod(SHAPE) // groups, case
        assert not any(sent.values()), case
