"""Memory of peer copies, compared with sums by hand and with the state that a run copies."""

import pytest
from small_runs import small_config

from zaya_jax.options import load_config
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.memory import HOST_BANDWIDTH, peer_copy_cost
from zaya_jax.train.extensions import NO_EXTENSIONS
from zaya_jax.train.peer_copies.host_state import copy_layout


def test_a_node_keeps_two_steps_of_itself_and_of_another_node():
    """With plain AdamW: three float32 values per parameter; padding is below 1%."""
    config = load_config(
        "configs/zaya1_8b.py", ["--config.optimizer.name=adamw", "--config.execution.node_devices=1"]
    )
    cost = peer_copy_cost(config, Cluster(device=MI300X, nodes=128, gpus_per_node=8))
    assert cost.every is None
    assert cost.gpu_bytes == pytest.approx(8_840_488_784 * 12 / 1024, rel=0.01)
    assert (cost.node_bytes, cost.buffer_bytes) == (32 * cost.gpu_bytes, 8 * cost.gpu_bytes)
    assert cost.host_seconds == cost.gpu_bytes / HOST_BANDWIDTH
    assert cost.network_seconds == cost.gpu_bytes / MI300X.network_bandwidth
    alone = peer_copy_cost(config, Cluster(device=MI300X, nodes=1, gpus_per_node=8))
    assert (alone.node_bytes, alone.network_seconds) == (16 * alone.gpu_bytes, 0.0)


def test_the_plan_counts_the_bytes_that_a_process_copies(tmp_path):
    config = small_config(run_folder=tmp_path / "run", corpus=tmp_path / "corpus")
    cost = peer_copy_cost(config, Cluster(device=MI300X, nodes=1, gpus_per_node=1))
    actual = copy_layout(config, data_mesh(), NO_EXTENSIONS).num_bytes
    # The rest are router biases, keys and counters.
    assert 0 < actual - cost.gpu_bytes < 300
