"""Bank conflicts: which lanes wait for each other, as AMD documents it and others measured it on MI300."""

import numpy as np
import pytest

from pallas_kernels.emulator.counts import Counts

ROW = 128
"""Bytes from a word to the next one in its bank."""


def cycles(size, *, is_read, same_bank=()):
    """Cycles and conflicts of an access of one wave, whose lanes use banks in turn but for those given."""
    # Lanes with the same word share it: an even spread of distinct words has no conflict in any order.
    addresses = np.arange(64) * size % ROW
    for number, lane in enumerate(same_bank):
        addresses[lane] = ROW * (number + 1)
    counts = Counts(memory=True)
    lanes = np.zeros((1, 64), bool)
    lanes[0, list(same_bank) or slice(None)] = True
    counts.count_local_access(addresses[None].astype(np.int64), lanes, size, is_read=is_read)
    return counts.local_cycles, counts.local_conflicts


@pytest.mark.parametrize(("size", "minimum"), [(4, 2), (8, 4), (16, 8)])
@pytest.mark.parametrize("is_read", [True, False])
def test_lanes_in_different_banks_do_not_wait(size, minimum, is_read):
    assert cycles(size, is_read=is_read) == (minimum, 0)


@pytest.mark.parametrize(
    ("size", "is_read", "together", "apart"),
    [
        # The groups of the documentation: lanes 0 to 3 with 20 to 23, 4 to 7 with 16 to 19, and so on.
        (16, True, [(0, 3), (0, 20), (5, 17), (11, 28), (15, 24), (47, 59)], [(0, 4), (8, 16), (0, 32)]),
        (16, False, [(0, 7), (8, 15), (56, 63)], [(0, 8), (0, 20), (7, 8)]),
        (8, True, [(0, 15), (16, 31), (48, 63)], [(0, 16), (15, 16)]),
        (4, True, [(0, 31), (32, 63)], [(0, 32), (31, 32)]),
    ],
)  # fmt: skip
def test_lanes_of_one_group_wait_for_each_other(size, is_read, together, apart):
    for pair in together:
        assert cycles(size, is_read=is_read, same_bank=pair)[1] == 1, pair
    for pair in apart:
        assert cycles(size, is_read=is_read, same_bank=pair)[1] == 0, pair
