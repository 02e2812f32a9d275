"""`zaya bench optimizer-share`: how much of a step is the optimiser, partitioned and replicated.

Eight devices on one CPU share its cores, so that work that is done eight times takes eight times as
long: the saving is that of a cluster, in FLOPs, though not what is sent.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.measure import best_seconds
from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig, TrainConfig
from zaya_jax.data.batch import Batch, make_example
from zaya_jax.data.borders import NO_BORDERS
from zaya_jax.model.weights import Weight, count_parameters, declare, map_weights
from zaya_jax.optim.matrices import matrix_axes
from zaya_jax.parallel.mesh import data_mesh, replicated, sharded
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.tables import name_column, number_column
from zaya_jax.train.programs import compiled_step
from zaya_jax.train.state import init_state, make_setup, shardings

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
    """Measures in a process of its own, which has eight devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-m", __name__, str(rounds)], env=environment, check=True)


def measure(rounds: int) -> None:
    """Prints seconds of the step without an optimiser, and what each optimiser adds."""
    functions = {
        "no optimiser": _step(optimizer=optax.set_to_zero()),
        "partitioned": _step(),
        "replicated": _replicated_optimizer(),
    }
    times = best_seconds(functions, rounds=rounds)
    alone = times["no optimiser"]
    columns = map(number_column, ("step, s", "optimiser, s", "share of the step"))
    table = Table(name_column("optimiser"), *columns)
    table.add_row("none", f"{alone:.3f}", "", "")
    for label, seconds in (
        ("ours, each device its own matrices", times["partitioned"] - alone),
        ("optax.contrib.muon, each device all", times["replicated"]),
    ):
        table.add_row(label, f"{alone + seconds:.3f}", f"{seconds:.3f}", f"{seconds / (alone + seconds):.1%}")
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{count_parameters(MODEL):,} parameters, {DEVICES} devices on {os.cpu_count()} cores, "
        f"{CONFIG.data.batch_size} x {CONFIG.data.sequence_length} tokens a step, best of {rounds}"
    )
    console.print(table)


def _step(optimizer: optax.GradientTransformation | None = None) -> Any:
    """A call of the step, with the config's optimiser or another one."""
    mesh = data_mesh()
    setup = make_setup(CONFIG, mesh.size)
    setup = dataclasses.replace(setup, optimizer=optimizer or setup.optimizer)
    start = init_state(CONFIG, setup)
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
    return make_example(tokens, borders=NO_BORDERS)


def _optax_axes(weight: Weight) -> optax.contrib.MuonDimensionNumbers | None:
    return optax.contrib.MuonDimensionNumbers(*matrix_axes(weight)) if weight.matrix else None


def _replicated_optimizer() -> Any:
    """A call of optax's Muon on all devices, each with all weights: the same split of the weights."""
    mesh = data_mesh()
    axes = map_weights(_optax_axes, declare(MODEL))
    optimizer = optax.contrib.muon(
        CONFIG.optimizer.learning_rate,
        beta=CONFIG.optimizer.momentum,
        weight_decay=CONFIG.optimizer.weight_decay,
        muon_weight_dimension_numbers=axes,
        consistent_rms=0.2,
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=compiler_options())
    def move(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, whole = init_state(CONFIG, make_setup(CONFIG)).params, replicated(mesh)
    gradients = jax.device_put(jax.tree.map(jnp.ones_like, params), whole)
    state = [jax.device_put((params, optimizer.init(params)), whole)]

    def call() -> Any:
        state[0] = move(*state[0], gradients)
        return state[0][0]

    return call


if __name__ == "__main__":
    measure(int(sys.argv[1]))
