"""How many processes write a checkpoint, and which. tests/multidevice has what they gather."""

import jax
import numpy as np
import pytest
from reading_runs import Device

from zaya_jax.checkpoint.writers import has_parts, move_to_writers
from zaya_jax.config import Config
from zaya_jax.errors import UserError
from zaya_jax.parallel.device_groups import first_members, group_mesh, num_groups
from zaya_jax.parallel.mesh import data_mesh


@pytest.mark.parametrize(
    ("members", "limit", "processes", "groups"),
    [
        (1, 256, 1, 1),
        (200, 256, 1, 200),
        (256, 256, 1, 256),
        (1024, 256, 1, 256),
        (8192, 256, 1, 256),
        (384, 256, 1, 192),
        (768, 256, 1, 256),
        # 500 processes are twice as many as desired, 250 nearly as many.
        (500, 256, 1, 250),
        # Prime numbers.
        (257, 256, 1, 257),
        (8191, 256, 1, 8191),
        (13, 3, 1, 13),
        # One process can't write for all.
        (2, 2, 1, 2),
        (6, 2, 1, 2),
        # Members of eight processes.
        (128, 256, 8, 32),
        (4, 2, 8, 1),
    ],
)
def test_groups_are_equal_and_writers_about_as_many_as_desired(members, limit, processes, groups):
    assert num_groups(members, limit, processes=processes) == groups
    assert members % groups == 0


def _writers(processes, of_process, limit, *, node_devices=1, context_devices=1):
    devices = [Device(process_index=i // of_process, id=i) for i in range(processes * of_process)]
    mesh = data_mesh(devices, node_devices=node_devices, context_devices=context_devices)
    by_groups = group_mesh([mesh], limit)
    return None if by_groups is None else [each.id for each in first_members(by_groups).devices.flat]


@pytest.mark.parametrize(
    ("layout", "limit", "options", "ids"),
    [
        ((4, 1), 4, {}, None),
        ((4, 1), 2, {}, [0, 2]),
        # A process writes with all of its devices.
        ((4, 2), 2, {}, [0, 1, 4, 5]),
        # The processes of a node write together.
        ((8, 1), 2, {"node_devices": 2}, [0, 1]),
        ((8, 1), 4, {"node_devices": 2}, [0, 1, 4, 5]),
        # A process has two nodes; and neither a node nor a process has the other.
        ((4, 4), 2, {"node_devices": 2}, [0, 1, 2, 3, 8, 9, 10, 11]),
        ((4, 3), 2, {"node_devices": 2}, [0, 1, 2, 3, 4, 5]),
        ((4, 2), 2, {"context_devices": 4}, [0, 1, 4, 5]),
    ],
)
def test_the_first_member_of_each_group_writes(layout, limit, options, ids):
    assert _writers(*layout, limit, **options) == ids


def test_processes_with_unequal_numbers_of_devices_all_write():
    devices = [Device(process_index=min(i, 2), id=i) for i in range(4)]
    assert group_mesh([data_mesh(devices)], 2) is None


def test_one_process_moves_nothing_and_writes():
    tree = {"array": jax.numpy.ones(3), "count": np.int32(1)}
    assert move_to_writers(tree, 2) is tree
    assert has_parts(tree)
    assert has_parts({"count": np.int32(1)})


def test_a_single_writer_is_refused():
    with pytest.raises(UserError, match=r"train\.checkpoint_writers is 1; it must be 2 or above"):
        Config.from_dict({"train": {"checkpoint_writers": 1}})
