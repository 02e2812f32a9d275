"""`zaya bench optimizer-share`: the optimizer's share of a step, partitioned and replicated.

Eight devices on one CPU share its cores, so work that all eight repeat takes eight times as long: the ratio
of FLOPs is that of a cluster, but not the cost of communication.
"""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.interleaved import run_module
from zaya_jax.bench.measure import best_seconds
from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig, TrainConfig
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import Batch, make_example
from zaya_jax.model.weights import Weight, count_parameters, declare, map_weights
from zaya_jax.optim.matrices import matrix_axes
from zaya_jax.parallel.mesh import data_mesh, replicated, sharded
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.text_tables import name_column, number_column
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import init_state, make_setup, shardings

DEVICES = 8
MODEL = ModelConfig(
    vocab_size=264,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    moe_intermediate_size=256,
    num_experts=8,
    router_hidden_size=64,
    max_position_embeddings=256,
)
CONFIG = Config(
    model=MODEL,
    data=DataConfig(sequence_length=128, batch_size=16),
    optimizer=OptimizerConfig(warmup_steps=0),
    train=TrainConfig(num_steps=1000),
    execution=ExecutionConfig(dtype="float32"),
)


def run(*, rounds: int) -> None:
    """Measures in a separate process, which has eight CPU devices, and prints the results."""
    # XLA reads its flags once, when the backend starts: another number of devices needs another process.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    report(run_module(__name__, str(rounds), environment=environment), rounds=rounds)


def measure(rounds: int) -> dict[str, float]:
    """Returns the seconds of a step without an optimizer and with ours, and of optax's Muon alone."""
    functions = {
        "no optimizer": _step(optimizer=optax.set_to_zero()),
        "partitioned": _step(),
        "replicated": _replicated_optimizer(),
    }
    return best_seconds(functions, rounds=rounds)


def report(times: Mapping[str, float], *, rounds: int) -> None:
    """Prints the times of `measure` and the optimizers' shares."""
    alone = times["no optimizer"]
    columns = map(number_column, ("step, s", "optimizer, s", "share of the step"))
    table = Table(name_column("optimizer"), *columns)
    table.add_row("none", f"{alone:.3f}", "", "")
    for label, seconds in (
        # The step without an optimizer has everything else that a step does.
        ("ours, matrices partitioned", times["partitioned"] - alone),
        ("optax.contrib.muon, replicated", times["replicated"]),
    ):
        table.add_row(label, f"{alone + seconds:.3f}", f"{seconds:.3f}", f"{seconds / (alone + seconds):.1%}")
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{count_parameters(MODEL):,} parameters, {DEVICES} devices on {os.cpu_count()} cores, "
        f"{CONFIG.data.batch_size} x {CONFIG.data.sequence_length} tokens per step, best of {rounds}"
    )
    console.print(table)


def _step(optimizer: optax.GradientTransformation | None = None) -> Any:
    """Returns a call of the step, with the config's optimizer or another one."""
    mesh = data_mesh()
    setup = make_setup(CONFIG, mesh.size)
    setup = dataclasses.replace(setup, optimizer=optimizer or setup.optimizer)
    start = init_state(CONFIG, setup)
    # A list, because the step donates its state: each call needs the latest one.
    states = [jax.device_put(start, shardings(start, mesh))]
    step = compiled_step(start, setup=setup, mesh=mesh)
    batch = jax.device_put(_batch(), sharded(mesh))

    def call() -> jax.Array:
        states[0], metrics = step(states[0], batch)
        return metrics.loss

    return call


def _batch() -> Batch:
    shape = CONFIG.data.batch_size, CONFIG.data.sequence_length
    tokens = np.random.default_rng(0).integers(1, MODEL.vocab_size, shape)
    return make_example(tokens, delimiters=NO_DELIMITERS)


def _optax_axes(weight: Weight) -> optax.contrib.MuonDimensionNumbers | None:
    # optax orthogonalizes what has dimension numbers, and gives everything else to AdamW.
    return optax.contrib.MuonDimensionNumbers(*matrix_axes(weight)) if weight.matrix else None


def _replicated_optimizer() -> Any:
    """Returns a call of optax's Muon on all devices, each with all weights; the same weights go to Muon."""
    mesh = data_mesh()
    axes = map_weights(_optax_axes, declare(MODEL))
    optimizer = optax.contrib.muon(
        CONFIG.optimizer.learning_rate,
        beta=CONFIG.optimizer.momentum,
        weight_decay=CONFIG.optimizer.weight_decay,
        muon_weight_dimension_numbers=axes,
        # Updates of the size that ours have ([Moonlight] section 2.2).
        consistent_rms=0.2,
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=compiler_options())
    def move(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, whole = init_state(CONFIG, make_setup(CONFIG)).params, replicated(mesh)
    # The time of an update does not depend on the values of the gradients.
    gradients = jax.device_put(jax.tree.map(jnp.ones_like, params), whole)
    state = [jax.device_put((params, optimizer.init(params)), whole)]

    def call() -> Any:
        state[0] = move(*state[0], gradients)
        return state[0][0]

    return call


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
