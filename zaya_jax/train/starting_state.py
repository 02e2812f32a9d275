"""The state that training starts from: the newest checkpoint, another run's weights, or fresh weights."""

import dataclasses
import functools

import jax

from zaya_jax.checkpoint import (
    SavedStep,
    devices_of,
    has_average,
    has_training,
    load_weights,
    restore,
    restore_average,
)
from zaya_jax.parallel.processes import hosts
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.pytree import abstract
from zaya_jax.train.compiled_programs import sealed
from zaya_jax.train.heartbeats import RESTORE, Heartbeats
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.step.state import (
    TrainSetup,
    TrainState,
    abstract_state,
    checkpoint_shardings,
    from_checkpoint,
    init_state,
    make_setup,
    shardings,
    to_checkpoint,
    with_variables,
)


def starting_state(run: PreparedRun, heartbeats: Heartbeats) -> TrainState:
    """Restores the newest checkpoint, or creates a fresh state, on the run's devices.

    Args:
      run: the run to start or resume.
      heartbeats: heartbeats of this process.

    Raises:
      UserError: if the newest checkpoint contains weights only.
    """
    start = run.start
    if run.copy is not None:
        with heartbeats.within(RESTORE):
            return sealed(run.copy.place(run.config.run_folder), run.mesh)
    if start is None or start.run_folder != run.config.run_folder:
        return sealed(fresh_state(run, heartbeats), run.mesh)
    if not has_training(start.run_folder, start.step):
        raise hosts.collective_error(
            f"{run.config.run_folder} contains weights only; to train from them, use another folder: "
            f"--config.train.init_from={run.config.run_folder} --config.run_folder=ANOTHER"
        )
    # A separate section: a restore waits for disks, and a fresh state for the compiler.
    with heartbeats.within(RESTORE):
        return restored_state(run, start)


def fresh_state(run: PreparedRun, heartbeats: Heartbeats) -> TrainState:
    """Creates a state with fresh weights, or with those of another run.

    Args:
      run: run whose `start` is the checkpoint of another run, or None for fresh weights.
      heartbeats: heartbeats of this process.
    """
    setup = _setup(run)
    placed = shardings(abstract_state(run.config, setup, run.mesh), run.mesh)
    # One program: separate calls would put all weights on the first device before they are sharded.
    init = jax.jit(
        functools.partial(init_state, run.config, setup),
        out_shardings=placed,
        compiler_options=compiler_options(run.mesh, once=True),
    )
    state = init()
    if run.start is None:
        return state
    with heartbeats.within(RESTORE):
        saved = load_weights(run.start, functools.partial(checkpoint_shardings, mesh=run.mesh))
    # Donated: a fresh state and the loaded weights need not fit in memory together.
    return jax.jit(with_variables, out_shardings=placed, donate_argnums=0)(state, saved.variables)


def _setup(run: PreparedRun) -> TrainSetup:
    # Any phase's setup: the structure of the state is the same in all of them.
    return run.setup(run.config.phase_at(1).config)


def restored_state(run: PreparedRun, start: SavedStep) -> TrainState:
    """Restores the state of a checkpoint on the run's devices."""
    setup = _setup(run)
    state = abstract_state(run.config, setup, run.mesh)
    # One process reads the device count: a thousand would each list all parts of the arrays.
    *written_by, is_averaged = hosts.broadcast_from_first(
        "devices", hosts.run_on_first("opening", lambda: _contents_of(start))
    )
    written = _state_of_devices(run, *written_by)
    # Read evenly sharded, independently of the writers, then repartitioned for the current devices.
    shapes = jax.eval_shape(to_checkpoint, written)
    saved = abstract(shapes, checkpoint_shardings(shapes, run.mesh, setup.partition))
    average = saved.pop("ema", None)
    weights, training = restore(start.run_folder, start.step, **saved)
    restored = {"weights": weights, "training": training}
    # An average that a resume disables is not read, and one that it enables starts from the weights.
    if average is not None and is_averaged:
        restored["ema"] = restore_average(start.run_folder, start.step, average)
    elif average is not None and hosts.is_first():
        print(f"the average of the weights starts from those of step {start.step}, which has none")
    partition = jax.jit(
        functools.partial(from_checkpoint, like=state, written=written),
        out_shardings=shardings(state, run.mesh),
    )
    return sealed(partition(restored), run.mesh)


def _contents_of(start: SavedStep) -> tuple[int, int, bool]:
    """Returns the numbers of devices and of devices per node that wrote a step; whether it has an average."""
    return *devices_of(start), has_average(start.run_folder, start.step)


def _state_of_devices(run: PreparedRun, num_devices: int, node_devices: int) -> TrainState:
    """Returns shapes and types of the run's state on another number of devices and devices per node."""
    config = run.config.phase_at(1).config
    # The context axis has no effect on the state, and might not fit the writer's nodes.
    execution = dataclasses.replace(config.execution, node_devices=node_devices, context_devices=1)
    config = dataclasses.replace(config, execution=execution)
    setup = make_setup(config, num_devices, run.schedule, optimizer=run.extensions.optimizer)
    return jax.eval_shape(lambda: init_state(run.config, setup))
