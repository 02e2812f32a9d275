"""Compiled programs of a run: the step, the evaluation, the arrays of a checkpoint and checksums."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zaya_jax.config import Config, DistillationConfig, StepRange, step_ranges
from zaya_jax.data.reading.batch import Batch
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.parallel.bucket_layouts import reshard_to_columns
from zaya_jax.parallel.mesh import (
    SHARDED,
    batch_sharding,
    node_size,
    on_each_device,
    replicated,
    sharded,
    with_context,
)
from zaya_jax.platform.compile_thread import start_compiling
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.pytree import abstract
from zaya_jax.train.extensions import NO_EXTENSIONS, Extensions
from zaya_jax.train.step.integrity import state_checksums
from zaya_jax.train.step.replica_checksums import Checksums, checksum_program
from zaya_jax.train.step.state import (
    TrainSetup,
    TrainState,
    abstract_state,
    average_of,
    checkpoint_shardings,
    make_setup,
    partition_specs,
    shardings,
    training_of,
)
from zaya_jax.train.step.train_step import (
    Metrics,
    Sums,
    Tamper,
    evaluate_step,
    reference_step,
    teacher_step,
    train_step,
)

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Programs:
    """Compiled programs of a range of steps; each is compiled at its first call.

    Attributes:
      step: maps a state and a batch to the next state and metrics; it donates the state.
      evaluate: returns the sums of a held-out batch.
      checkpoint: returns the arrays of a checkpoint.
      checksums: returns checksums of each device's values.
      state_checksums: returns the checksums of the arrays that each device owns, [devices, arrays].
    """

    step: Step
    evaluate: Callable[[TrainState, Batch], Sums]
    checkpoint: Callable[[TrainState], dict[str, Any]]
    checksums: Checksums
    state_checksums: Callable[[TrainState], jax.Array]


def make_programs(state: TrainState, *, setup: TrainSetup, mesh: Mesh, num_microbatches: int = 1) -> Programs:
    """Returns the programs of a setup; the arguments are those of `compiled_step`.

    They are cached in the process, so that a second run in a notebook compiles nothing.
    """
    leaves, structure = jax.tree.flatten(abstract(state, shardings(state, mesh)))
    return _make_programs(tuple(leaves), structure, setup, mesh, num_microbatches)


@functools.lru_cache(maxsize=8)  # compiled programs stay in memory: enough for the phases of a run or two
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
            in_shardings=(shardings(state, mesh), batch_sharding(mesh)),
            out_shardings=replicated(mesh),
            compiler_options=_options(mesh),
        ),
        # Without a context axis: over one axis each array is sharded once, and moves as little as possible.
        checkpoint=_checkpoint(state, with_context(mesh, 1)),
        checksums=checksum_program(state, setup=setup, mesh=mesh),
        state_checksums=state_checksum_program(state, mesh),
    )


def _options(mesh: Mesh) -> dict[str, int] | None:
    return compiler_options(mesh, gathers=node_size(mesh) > 1)


def abstract_batch(config: Config, batch_size: int) -> Batch:
    """Returns shapes and types of the global batch of a step.

    Args:
      config: config of the run or phase.
      batch_size: number of rows B.
    """
    shape = (batch_size, config.data.sequence_length)

    predictions = (*shape, config.distillation.top_k)

    def zeros() -> Batch:
        whole, real = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        batch = Batch(whole, whole, real, whole, whole)
        if config.dpo.has_reference:
            batch = dataclasses.replace(batch, reference_BT=real)
        if config.dpo.is_unpaired:
            batch = dataclasses.replace(batch, labels_BT=real)
        if config.distillation.teacher is not None:
            tokens, log_probs = jnp.zeros(predictions, jnp.int32), jnp.zeros(predictions, jnp.float32)
            batch = dataclasses.replace(batch, teacher_tokens_BTK=tokens, teacher_log_probs_BTK=log_probs)
        if config.watch.checksums:
            origin_BC2 = jnp.zeros((batch_size, config.execution.context_devices, 2), jnp.uint32)
            batch = dataclasses.replace(batch, origin_BC2=origin_BC2)
        return batch

    return jax.eval_shape(zeros)


def reference_program(
    state: TrainState, *, setup: TrainSetup, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """`reference_step` under `jax.jit`; the arguments are those of `compiled_step`."""
    return jax.jit(
        functools.partial(reference_step, setup=setup, mesh=mesh),
        in_shardings=(shardings(state, mesh), batch_sharding(mesh)),
        out_shardings=replicated(mesh),
        compiler_options=_options(mesh),
    )


def teacher_program(
    state: TrainState, *, setup: TrainSetup, mesh: Mesh, config: DistillationConfig
) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """`teacher_step` under `jax.jit`; the arguments are those of `compiled_step` and of the step."""
    return jax.jit(
        functools.partial(teacher_step, setup=setup, mesh=mesh, config=config),
        in_shardings=(shardings(state, mesh), batch_sharding(mesh)),
        out_shardings=replicated(mesh),
        compiler_options=_options(mesh),
    )


def _checkpoint(state: TrainState, mesh: Mesh) -> Callable[[TrainState], dict[str, Any]]:
    """Returns the program of `to_checkpoint`. It computes weights; the rest are the state's arrays."""
    weights_of = saved_weights(state, mesh)
    # Two programs: one for both would hold the collected weights and their average at once.
    if state.ema is None:
        return lambda state: {"weights": weights_of(state), "training": training_of(state)}
    ema_of = saved_average(state, mesh)
    return lambda state: {"weights": weights_of(state), "training": training_of(state), "ema": ema_of(state)}


def saved_weights(state: TrainState, mesh: Mesh) -> Callable[[TrainState], dict[str, Any]]:
    """Compiles the program that collects a checkpoint's weights: the only arrays that devices exchange."""
    shapes = jax.eval_shape(lambda state: state.stored, state)
    placed = checkpoint_shardings(shapes, mesh, state.partition)
    there = jax.tree.leaves(placed)[0].mesh
    # Not donated: training continues with the state that is saved.
    return jax.jit(lambda state: _by_columns(state, there).stored, out_shardings=placed)


def saved_average(state: TrainState, mesh: Mesh) -> Callable[[TrainState], dict[str, Any]]:
    """Compiles the program that collects a checkpoint's average of the weights, like `saved_weights`."""
    placed = checkpoint_shardings(jax.eval_shape(average_of, state), mesh, state.partition)
    there = jax.tree.leaves(placed)[0].mesh

    def collect(state: TrainState) -> dict[str, Any]:
        assert state.ema is not None, "compiled only for a run with an average"
        # Resharded as the weights are: their way to a checkpoint moves as little as possible.
        buckets = _by_columns(state.averaged, there).buckets
        return average_of(dataclasses.replace(state, ema=dataclasses.replace(state.ema, buckets=buckets)))

    return jax.jit(collect, out_shardings=placed)


def _by_columns(state: TrainState, mesh: Mesh) -> TrainState:
    # A weight's matrices are on few nodes, and a checkpoint's array is on all: by default XLA would gather a
    # whole pool on every device in between.
    layouts = state.partition.layouts
    buckets = {name: reshard_to_columns(x, layouts[name], mesh) for name, x in state.buckets.items()}
    return dataclasses.replace(state, buckets=buckets)


def whole_variables(state: TrainState, mesh: Mesh) -> dict[str, Any]:
    """Returns the variables for `Zaya.apply`, replicated on every device, by one program.

    Separate operations would each run their own collectives, in an order that processes do not agree on, and
    deadlock.
    """
    return jax.jit(lambda state: state.variables, out_shardings=replicated(mesh))(state)


def state_checksum_program(state: TrainState, mesh: Mesh) -> Callable[[TrainState], jax.Array]:
    """Compiles the program that computes the checksums of the arrays that each device owns."""
    specs = partition_specs(state)
    local = on_each_device(
        lambda state: state_checksums(state)[None], mesh, in_specs=(specs,), out_specs=SHARDED
    )
    return jax.jit(local, in_shardings=(shardings(state, mesh),), out_shardings=sharded(mesh))


def sealed(state: TrainState, mesh: Mesh) -> TrainState:
    """Returns a created or restored state with the checksums of its arrays, if its run has checksums."""
    if state.integrity is None:
        return state
    integrity = dataclasses.replace(state.integrity, state_DK=state_checksum_program(state, mesh)(state))
    return dataclasses.replace(state, integrity=integrity)


def compiled_step(
    state: TrainState,
    *,
    setup: TrainSetup,
    mesh: Mesh,
    num_microbatches: int = 1,
    tamper: Tamper | None = None,
) -> Step:
    """Returns `train_step` under `jax.jit` with a donated state and fixed shardings.

    Args:
      state: a state, or its shapes.
      setup: network, optimizer and balancer.
      mesh: all devices.
      num_microbatches: number of parts in which each device processes its rows.
      tamper: injects a fault, as in `train_step`; None for none.
    """
    placed = shardings(state, mesh)
    # The same shardings in and out: a step's result is the next step's argument, and nothing is moved.
    return jax.jit(
        functools.partial(
            train_step, setup=setup, mesh=mesh, num_microbatches=num_microbatches, tamper=tamper
        ),
        in_shardings=(placed, batch_sharding(mesh)),
        out_shardings=(placed, replicated(mesh)),
        # The new state reuses the memory of the old one: two would not fit. But a step that is to be repeated
        # needs the old one.
        donate_argnames=() if setup.replay else ("state",),
        compiler_options=_options(mesh),
    )


class RunPrograms:
    """Compiles and caches the programs of a run: a replay and the run itself use the same ones.

    Args:
      mesh: all devices.
      extensions: custom optimizer of the run.
    """

    def __init__(self, mesh: Mesh, extensions: Extensions = NO_EXTENSIONS):
        self._mesh, self._extensions = mesh, extensions
        self._made: dict[tuple[int, int], Programs] = {}
        self._thread: threading.Thread | None = None

    def of(self, config: Config, step_range: StepRange) -> Programs:
        """Returns the programs of a range; each batch size is another shape, which compiles separately.

        Args:
          config: config of the run.
          step_range: steps that share a program.
        """
        # Not the phase itself, which is not hashable.
        key = step_range.phase.first_step, step_range.num_microbatches
        if key not in self._made:
            setup, mesh = self._setup(config, step_range), self._mesh_of(step_range)
            state = abstract_state(config, setup, mesh)
            microbatches = step_range.num_microbatches
            self._made[key] = make_programs(state, setup=setup, mesh=mesh, num_microbatches=microbatches)
        return self._made[key]

    def start_compiling(self, config: Config, first_step: int) -> None:
        """Starts to compile the first step in a thread; once, and not if all steps are done.

        Args:
          config: config of the run.
          first_step: number of completed steps.
        """
        # From the config alone: the sizes of the corpora are known only when they are built.
        ranges = (step_range.after(first_step) for step_range in step_ranges(config))
        first = next((step_range for step_range in ranges if step_range.num_steps > 0), None)
        if self._thread is None and first is not None:
            # Compilation releases the interpreter lock, so that it overlaps with other work.
            self._thread = start_compiling(functools.partial(self._compile, config, first))

    @contextlib.contextmanager
    def compiling_in_background(self, config: Config, first_step: int) -> Iterator[None]:
        """Compiles the first step in a thread during a block that restores the state, which waits for disks.

        Args:
          config: config of the run.
          first_step: number of completed steps.
        """
        self.start_compiling(config, first_step)
        try:
            yield
        except (KeyboardInterrupt, SystemExit):  # do not wait; `leave_compiler` ends such a process
            raise
        except BaseException:
            # A process that exits while it compiles is aborted, with the exit code of an abort.
            self._wait()
            raise
        self._wait()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _compile(self, config: Config, step_range: StepRange) -> None:
        mesh, phase = self._mesh_of(step_range), step_range.phase.config
        state = abstract_state(config, self._setup(config, step_range), mesh)
        rows = abstract(abstract_batch(phase, step_range.batch_size), batch_sharding(mesh))
        program: Any = self.of(config, step_range).step
        # A failure here is raised again when the step is called. jax caches the compiled program.
        with contextlib.suppress(Exception):
            program.lower(state, rows).compile()

    def _mesh_of(self, step_range: StepRange) -> Mesh:
        return with_context(self._mesh, step_range.phase.config.execution.context_devices)

    def _setup(self, config: Config, step_range: StepRange) -> TrainSetup:
        schedule, optimizer = learning_rate_schedule(config), self._extensions.optimizer
        return make_setup(step_range.phase.config, self._mesh.size, schedule, optimizer=optimizer)
