"""What a run compiles: the step, the evaluation and the checkpoint's arrays, on the run's devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zaya_jax.config import Config
from zaya_jax.data.batch import Batch
from zaya_jax.parallel.layouts import by_columns
from zaya_jax.parallel.mesh import node_size, of_batch, replicated, with_context
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.pytree import abstract
from zaya_jax.train.replicas import Checksums, checksum_program
from zaya_jax.train.state import TrainSetup, TrainState, checkpoint_shardings, shardings, training_of
from zaya_jax.train.step import Metrics, Sums, evaluate_step, reference_step, train_step

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Programs:
    """What makes the steps of a range; each is compiled when it is first called."""

    step: Step
    evaluate: Callable[[TrainState, Batch], Sums]
    checkpoint: Callable[[TrainState], dict[str, Any]]
    checksums: Checksums


def make_programs(state: TrainState, *, setup: TrainSetup, mesh: Mesh, num_microbatches: int = 1) -> Programs:
    """The programs of a setup; the arguments are those of `compiled_step`.

    Equal ones are made once a process, so that a second run in a notebook compiles nothing.
    """
    leaves, structure = jax.tree.flatten(abstract(state, shardings(state, mesh)))
    return _make_programs(tuple(leaves), structure, setup, mesh, num_microbatches)


@functools.lru_cache(maxsize=8)  # what is compiled stays in memory: the phases and ramps of a run or two
def _make_programs(
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    structure: Any,
    setup: TrainSetup,
    mesh: Mesh,
    num_microbatches: int,
) -> Programs:
    state = jax.tree.unflatten(structure, leaves)
    return Programs(
        step=compiled_step(state, setup=setup, mesh=mesh, num_microbatches=num_microbatches),
        evaluate=jax.jit(
            functools.partial(evaluate_step, setup=setup, mesh=mesh),
            in_shardings=(shardings(state, mesh), of_batch(mesh)),
            out_shardings=replicated(mesh),
            compiler_options=_options(mesh),
        ),
        # As if no sequence were shared: over one axis each array is cut once, and moves as little as it can.
        checkpoint=_checkpoint(state, with_context(mesh, 1)),
        checksums=checksum_program(state, setup=setup, mesh=mesh),
    )


def _options(mesh: Mesh) -> dict[str, int] | None:
    return compiler_options(mesh, gathers=node_size(mesh) > 1)


def abstract_batch(config: Config, batch_size: int) -> Batch:
    """Shapes and types of the global batch of a step.

    Args:
      config: of the run, or of the phase.
      batch_size: B.
    """
    shape = (batch_size, config.data.sequence_length)

    def zeros() -> Batch:
        whole, real = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        return Batch(whole, whole, real, whole, whole, real if config.dpo.beta else None)

    return jax.eval_shape(zeros)


def reference_program(
    state: TrainState, *, setup: TrainSetup, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """`reference_step` under `jax.jit`; the arguments are those of `compiled_step`."""
    return jax.jit(
        functools.partial(reference_step, setup=setup, mesh=mesh),
        in_shardings=(shardings(state, mesh), of_batch(mesh)),
        out_shardings=replicated(mesh),
        compiler_options=_options(mesh),
    )


def _checkpoint(state: TrainState, mesh: Mesh) -> Callable[[TrainState], dict[str, Any]]:
    """`to_checkpoint`, of which the weights alone are computed: the rest is the state's own arrays."""
    weights_of = saved_weights(state, mesh)
    return lambda state: {"weights": weights_of(state), "training": training_of(state)}


def saved_weights(state: TrainState, mesh: Mesh) -> Callable[[TrainState], dict[str, Any]]:
    """The program that gives a checkpoint its weights: the only arrays of a save that devices exchange."""
    shapes = jax.eval_shape(lambda state: state.stored, state)
    placed = checkpoint_shardings(shapes, mesh, state.partition)
    # Not donated: training goes on with the state that is saved.
    return jax.jit(lambda state: _by_columns(state, mesh).stored, out_shardings=placed)


def _by_columns(state: TrainState, mesh: Mesh) -> TrainState:
    # A weight's matrices lie on few nodes, and a checkpoint's array on all: left to itself XLA would give
    # every device all of a pool on the way.
    layouts = state.partition.layouts
    buckets = {name: by_columns(x, layouts[name], mesh) for name, x in state.buckets.items()}
    return dataclasses.replace(state, buckets=buckets)


def whole_variables(state: TrainState, mesh: Mesh) -> dict[str, Any]:
    """What `Zaya.apply` takes, on every device, by one program.

    Operation by operation each would exchange what it needs by itself, in an order that processes do not
    agree on, and wait for the others for ever.
    """
    return jax.jit(lambda state: state.variables, out_shardings=replicated(mesh))(state)


def compiled_step(state: TrainState, *, setup: TrainSetup, mesh: Mesh, num_microbatches: int = 1) -> Step:
    """`train_step` under `jax.jit`: the state is donated, and lies where it belongs.

    Args:
      state: one like those that will come, or its shapes.
      setup: as for `train_step`.
      mesh: as for `train_step`.
      num_microbatches: as for `train_step`.
    """
    placed = shardings(state, mesh)
    # In and out alike, so that a step's result is the next one's argument and nothing is moved between.
    return jax.jit(
        functools.partial(train_step, setup=setup, mesh=mesh, num_microbatches=num_microbatches),
        in_shardings=(placed, of_batch(mesh)),
        out_shardings=(placed, replicated(mesh)),
        # The new state takes the old one's memory: two would not fit beside each other.
        donate_argnames=("state",),
        compiler_options=_options(mesh),
    )
