"""Memory of logits, of the optimizer and of peer copies, by hand and compared with the state of a run."""

import dataclasses

import pytest
from small_runs import small_config

from zaya_jax.options import load_config
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.plan.command import config_of_phase
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.memory import (
    HOST_BANDWIDTH,
    logits_bytes,
    memory_by_kind,
    orthogonalization_bytes,
    peer_copy_cost,
    state_bytes,
)
from zaya_jax.plan.shares import for_platform, with_execution
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


@pytest.mark.parametrize(
    ("platform", "implementation", "dtype", "num_bytes"),
    [
        ("rocm", None, "bfloat16", 2 * 2 * 4096 * 262_272),  # exponentials of logits, and gradients
        ("rocm", None, "float32", 2 * 4 * 4096 * 262_272),
        ("cuda", None, "bfloat16", (4 + 2) * 4096 * 262_272),  # float32 logits, and gradients
        ("rocm", "xla", "bfloat16", (4 + 2) * 4096 * 262_272),
        ("cuda", None, "float32", (4 + 4) * 4096 * 262_272),
        ("cuda", "pallas", "bfloat16", 2 * 10_000 * 8192),  # gradients of a part of the vocabulary
    ],
)
def test_logits_take_the_bytes_of_the_platforms_implementation(platform, implementation, dtype, num_bytes):
    execution = {"loss_implementation": implementation, "dtype": dtype, "loss_chunk": 4096}
    words = [f"--config.execution.{name}={value}" for name, value in execution.items() if value]
    config = for_platform(load_config("configs/zaya1_8b.py", words), platform)
    assert logits_bytes(config, 10_000) == num_bytes
    assert logits_bytes(config, 1000) <= num_bytes / 4


def test_matrices_in_the_optimizer_count_where_nothing_else_was_as_large():
    """On one GPU they exceed what the backward pass has left, on 8 they do not."""
    words = ["--config.execution.num_microbatches=16", "--config.execution.remat=layer"]
    config = load_config("configs/zaya1_8b_sft.py", words)
    matrices = (
        8_840_488_784 - 262_272 * 2048
    )  # without the embedding, which AdamW updates, as it does vectors
    assert orthogonalization_bytes(config, 1) == pytest.approx(2 * 4 * matrices, rel=0.01)
    for words_of_sharing in ([], ["--config.execution.node_devices=8"]):
        shared = load_config("configs/zaya1_8b_sft.py", words_of_sharing)
        assert orthogonalization_bytes(shared, 8) == pytest.approx(matrices, rel=0.01)
    memory = memory_by_kind(config, 1)
    free = sum(
        num_bytes
        for kind, num_bytes in memory.items()
        if kind.startswith(("weights, bfloat16", "activations", "temporary arrays", "logits"))
    )
    assert memory["matrices in the optimizer"] == orthogonalization_bytes(config, 1) - free > 20 * 2**30
    assert "matrices in the optimizer" not in memory_by_kind(config, 8)
    adamw = load_config("configs/zaya1_8b_sft.py", [*words, "--config.optimizer.name=adamw"])
    assert "matrices in the optimizer" not in memory_by_kind(adamw, 1)


def test_a_single_device_sums_gradients_where_logits_were():
    """Compiled for one H200, this step takes 51.3 GiB with XLA's loss and 38.6 with the kernels' alone."""
    words = ["--config.model.num_hidden_layers=8", "--config.execution.node_devices=1"]
    config = config_of_phase(load_config("configs/zaya1_8b.py", words))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=4))
    name, sizes = "gradients, shard of this device", {}
    for implementation, compiled in ((None, 51.34), ("pallas", 38.57)):
        named = for_platform(with_execution(config, implementation=implementation), "cuda")
        memory = memory_by_kind(named, 1)
        sizes[implementation] = memory.get(name, 0)
        assert 1 < sum(memory.values()) / 2**30 / compiled < 1.25
    assert sizes[None] == 0
    assert sizes["pallas"] == state_bytes(config, 1).own_gradients
