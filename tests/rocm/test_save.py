"""The computation of a save of ZAYA1-8B on 1,024 MI300X, as compiled by XLA."""

import dataclasses

from zaya_jax.model.weights import count_parameters
from zaya_jax.options import load_config
from zaya_jax.plan.compiled.hlo import Program
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.output.plan import train_step_job
from zaya_jax.plan.rocm.compiler import compile_program

CLUSTER = Cluster(device=MI300X, nodes=128, gpus_per_node=8)


def test_a_save_moves_the_weights_alone():
    """The optimizer's two thirds are copied to the host as stored; resharded arrays need little memory."""
    config = load_config("configs/zaya1_8b.py", [])
    job = dataclasses.replace(train_step_job(config, CLUSTER), program="programs:save")
    compilation = compile_program(job)
    share = 4 * count_parameters(config.model) / CLUSTER.num_gpus
    # Its arguments: a GPU's shard of the float32 weights with little padding, without the optimizer state.
    assert share < compilation.memory.arguments < 1.15 * share
    sent = sum(each.runs * each.num_bytes for each in Program(compilation.hlo).collectives)
    assert sent < 200e6
    assert compilation.memory.outputs + compilation.memory.temporaries < 200e6
