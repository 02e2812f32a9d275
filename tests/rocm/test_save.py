"""The computations of a save and a resume of ZAYA1-8B on MI300X, as compiled by XLA."""

import dataclasses

from zaya_jax.model.weights import count_parameters
from zaya_jax.options import load_config
from zaya_jax.plan.compiled.hlo import Program
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.output.plan import train_step_job
from zaya_jax.plan.rocm.compiler import compile_program


def compiled(what: str, nodes: int):
    """Returns a compiled computation, the number of GPUs and the bytes of the float32 weights."""
    cluster = Cluster(device=MI300X, nodes=nodes, gpus_per_node=8)
    config = load_config("configs/zaya1_8b.py", [])
    job = dataclasses.replace(train_step_job(config, cluster), program=f"programs:{what}")
    return compile_program(job), cluster.num_gpus, 4 * count_parameters(config.model)


def test_a_save_moves_the_weights_alone():
    """The optimizer's two thirds are copied to the host as stored; resharded arrays need little memory."""
    compilation, num_gpus, weights = compiled("save", 128)
    share = weights / num_gpus
    # Its arguments: a GPU's shard of the float32 weights with little padding, without the optimizer state.
    assert share < compilation.memory.arguments < 1.15 * share
    sent = sum(each.runs * each.num_bytes for each in Program(compilation.hlo).collectives)
    assert sent < 200e6
    assert compilation.memory.outputs + compilation.memory.temporaries < 200e6


def test_a_save_of_nodes_that_divide_no_dimension_needs_little_memory():
    """Three nodes share each part; in between a GPU has the whole embedding, but never all weights."""
    compilation, num_gpus, weights = compiled("save", 96)
    assert compilation.memory.outputs < 1.5 * 3 * weights / num_gpus
    assert compilation.memory.temporaries < 2.5e9 < weights / 10


def test_a_resume_of_nodes_that_divide_no_dimension_needs_little_memory():
    compilation, _, weights = compiled("resume", 96)
    # A 256th of the weights and of the optimizer state (1.14 times as large); some arrays are divided less.
    assert compilation.memory.arguments < 1.3 * 2.14 * weights / 256
    assert compilation.memory.temporaries < 4e9 < weights / 8
