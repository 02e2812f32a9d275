"""Checkpoints of numbers of devices that divide few dimensions of the weights."""

import dataclasses
import math

import jax
import pytest
from programs import program
from reading_runs import Device

from zaya_jax.options import load_config
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.step.state import checkpoint_shardings, init_state, make_setup


def test_six_devices_save_and_restore_the_bits_of_their_state():
    for case in program("saved_by_six.py"):
        assert case["equal"]
        assert case["restored"]


def test_no_device_of_six_has_more_than_its_share_at_a_save():
    """Dimensions are multiples of 2, but not of 3: each half is on three devices."""
    plain, with_nodes = program("saved_by_six.py")
    for case in (plain, with_nodes):
        assert case["values of a device"] == case["values"] / 2
    assert plain["largest in the program"] <= plain["largest weight"] / 2
    # The three nodes all have copies: on its way the embedding, which is divided among all devices, is whole.
    assert with_nodes["largest in the program"] <= with_nodes["largest weight"]


@pytest.mark.parametrize(
    ("devices", "node_devices", "share"),
    [(768, 1, 180), (768, 8, 180), (1024, 8, 300), (8192, 1, 380), (8192, 8, 380)],
)
def test_a_device_has_a_small_part_of_the_8b_weights_at_a_save(devices, node_devices, share):
    config = load_config("configs/zaya1_8b.py", [])
    execution = dataclasses.replace(config.execution, node_devices=node_devices)
    config = dataclasses.replace(config, execution=execution)
    setup = make_setup(config, devices, platform="rocm")
    weights = jax.eval_shape(lambda: init_state(config, setup).stored)
    mesh = data_mesh([Device(process_index=i, id=i) for i in range(devices)], node_devices=node_devices)
    placed = checkpoint_shardings(weights, mesh, setup.partition)
    of_device = jax.tree.map(lambda x, sharding: math.prod(sharding.shard_shape(x.shape)), weights, placed)
    total = sum(x.size for x in jax.tree.leaves(weights))
    assert sum(jax.tree.leaves(of_device)) < total / share
