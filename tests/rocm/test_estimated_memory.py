"""Memory of a step by arithmetic, compared with the memory of the step compiled for MI300X."""

import pytest

from zaya_jax.options import load_config
from zaya_jax.plan.command import config_of_phase
from zaya_jax.plan.compiled.search import with_micro_batch
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.plan.output.plan import train_step_job
from zaya_jax.plan.rocm.compiler import lay_out_program
from zaya_jax.plan.shares import for_platform, with_execution


def by_campaign(*values):
    return pytest.param(*values, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    ("preset", "nodes", "rows", "remat"),
    [
        ("zaya1_8b", 128, 4, "products"),
        by_campaign("zaya1_8b", 128, 4, "block"),
        by_campaign("zaya1_8b", 128, 4, "layer"),
        by_campaign("zaya1_8b", 1, 2, "none"),
        by_campaign("zaya1_74b", 128, 4, "layer"),
        by_campaign("zaya1_8b_sft", 1, 2, "attention_and_experts"),
        by_campaign("zaya1_8b_lora", 1, 2, "attention_and_experts"),
    ],
)
def test_the_arithmetic_is_close_to_the_compiler(preset, nodes, rows, remat):
    cluster = Cluster(device=MI300X, nodes=nodes, gpus_per_node=8)
    config = config_of_phase(load_config(f"configs/{preset}.py", []))
    config = with_execution(with_micro_batch(config, rows, cluster.num_gpus), remat=remat)
    named = for_platform(config, MI300X.platform)
    ratio = sum(memory_by_kind(named, cluster.num_gpus).values()) / lay_out_program(
        train_step_job(config, cluster)
    )
    print(f"{preset} on {nodes} nodes, {rows} sequences, remat {remat}: {ratio:.2f}")
    assert 1 < ratio < 1.25
