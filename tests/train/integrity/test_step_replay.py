"""Which device is named when a repeated step differs."""

import pytest

from zaya_jax.train.integrity.step_replay import suspects


@pytest.mark.parametrize("faulty", range(4))
def test_the_device_that_is_wrong_in_both_roles_is_named(faulty):
    """Of four devices rotated by one: role r is computed by device r, and then by device r - 1."""
    differing = [role for role in range(4) if faulty in (role, (role - 1) % 4)]
    assert suspects(differing, [(role - 1) % 4 for role in differing]) == [faulty]


def test_a_fault_of_one_time_names_both_devices_of_its_role():
    assert suspects([1], [3]) == [1, 3]
    assert suspects([], []) == []
