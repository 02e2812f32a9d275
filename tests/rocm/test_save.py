"""What a save of ZAYA1-8B has 1,024 MI300X do, by XLA's compiler for them."""

import dataclasses

from zaya_jax.model.weights import count_parameters
from zaya_jax.options import load_config
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.hlo import Program
from zaya_jax.plan.report import train_step_job
from zaya_jax.plan.rocm.compiler import compile_program

CLUSTER = Cluster(device=MI300X, nodes=128, gpus_per_node=8)


def test_a_save_moves_the_weights_alone():
    """The optimiser's two thirds go to the host as they lie, and what is moved needs little room."""
    config = load_config("configs/zaya1_8b.py", [])
    job = dataclasses.replace(
        train_step_job(config, CLUSTER), program="zaya_jax.plan.train_program:lower_save"
    )
    compilation = compile_program(job)
    share = 4 * count_parameters(config.model) / CLUSTER.num_gpus
    # Its arguments: a GPU's shard of the float32 weights, padded a little, and nothing of the optimiser.
    assert share < compilation.memory.arguments < 1.15 * share
    sent = sum(each.runs * each.num_bytes for each in Program(compilation.hlo).collectives)
    assert sent < 200e6
    assert compilation.memory.outputs + compilation.memory.temporaries < 200e6
