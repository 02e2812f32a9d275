"""The cost of checks for silent corruption, compared with sums by hand."""

import pytest

from zaya_jax.options import load_config
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.integrity_costs import integrity_costs
from zaya_jax.plan.memory import memory_by_kind

CHECKSUMS = ["--config.watch.checksums=True"]
REPLAY = [*CHECKSUMS, "--config.watch.replay=True"]


@pytest.mark.parametrize("nodes", [1, 128])
def test_each_array_is_read_twice(nodes):
    """With plain AdamW: three float32 values per parameter, and a gradient; padding is below 1%."""
    words = ["--config.optimizer.name=adamw", "--config.execution.node_devices=1"]
    config = load_config("configs/zaya1_8b.py", words)
    cluster = Cluster(device=MI300X, nodes=nodes, gpus_per_node=8)
    checksums, replay = integrity_costs(config, cluster, 0.5)
    own = 8_840_488_784 * 12 / cluster.num_gpus
    assert checksums.read_bytes == pytest.approx(2 * own * 4 / 3, rel=0.01)
    assert replay.memory == pytest.approx(own, rel=0.01)
    assert checksums.seconds > checksums.read_bytes / MI300X.memory_bandwidth
    assert replay.repetition_seconds == 1.0
    assert not checksums.is_enabled
    assert not replay.is_enabled


def test_only_an_enabled_replay_takes_memory():
    plain, checks, replay = (
        sum(memory_by_kind(load_config("configs/zaya1_8b.py", words), 1024).values())
        for words in ([], CHECKSUMS, REPLAY)
    )
    assert plain == checks < replay
