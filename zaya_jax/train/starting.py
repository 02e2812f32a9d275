"""The state that a run goes on from: its newest checkpoint's, another run's weights, or a fresh one."""

import dataclasses
import functools

import jax

from zaya_jax.aegis.heartbeats import RESTORE, Heartbeats
from zaya_jax.checkpoint import SavedStep, devices_of, has_training, load_weights, restore
from zaya_jax.parallel import hosts
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.pytree import abstract
from zaya_jax.train.opening import OpenRun
from zaya_jax.train.state import (
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


def starting_state(run: OpenRun, heartbeats: Heartbeats) -> TrainState:
    """The newest checkpoint's state, or a fresh one, on the devices.

    Args:
      run: that is to begin or go on.
      heartbeats: of this process.

    Raises:
      ValueError: if the newest checkpoint has weights only.
    """
    start = run.start
    if start is None or start.run_folder != run.config.run_folder:
        return _fresh_state(run, heartbeats)
    if not has_training(start.run_folder, start.step):
        raise hosts.shared(
            f"{run.config.run_folder} holds weights only; train from them in a folder of its own: "
            f"--config.train.init_from={run.config.run_folder} --config.run_folder=ANOTHER"
        )
    # Apart from making a state: that waits for a compiler, and this for disks.
    with heartbeats.within(RESTORE):
        return restored_state(run, start)


def _fresh_state(run: OpenRun, heartbeats: Heartbeats) -> TrainState:
    """Initial weights, or those of another run if one is given."""
    setup = _setup(run)
    placed = shardings(abstract_state(run.config, setup, run.mesh), run.mesh)
    # One program: calls one by one would put all weights on the first device before they are sharded.
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
    return jax.jit(with_variables, out_shardings=placed, donate_argnums=0)(state, saved.variables)


def _setup(run: OpenRun) -> TrainSetup:
    # Any phase's setup would do: what a state is made of is the same in all of them.
    return run.setup(run.config.phase_at(1).config)


def restored_state(run: OpenRun, start: SavedStep) -> TrainState:
    """The state that a checkpoint holds, on the run's devices."""
    setup = _setup(run)
    state = abstract_state(run.config, setup, run.mesh)
    # One opens the arrays for it; of a thousand processes each would list all of their parts.
    written_by = hosts.from_first("devices", hosts.first_does("opening", lambda: devices_of(start)))
    written = _state_of_devices(run, *written_by)
    # Read evenly sharded, whoever wrote it, then partitioned for the devices that there are.
    shapes = jax.eval_shape(to_checkpoint, written)
    saved = abstract(shapes, checkpoint_shardings(shapes, run.mesh, setup.partition))
    weights, training = restore(start.run_folder, start.step, **saved)
    partition = jax.jit(
        functools.partial(from_checkpoint, like=state, written=written),
        out_shardings=shardings(state, run.mesh),
    )
    return partition({"weights": weights, "training": training})


def _state_of_devices(run: OpenRun, num_devices: int, node_devices: int) -> TrainState:
    """Shapes and types of the run's state on other devices, so many in a node."""
    config = run.config.phase_at(1).config
    # Who shares a sequence has no part in it, and need not fit to such nodes.
    execution = dataclasses.replace(config.execution, node_devices=node_devices, context_devices=1)
    config = dataclasses.replace(config, execution=execution)
    setup = make_setup(config, num_devices, run.schedule, optimizer=run.extensions.optimizer)
    return jax.eval_shape(lambda: init_state(run.config, setup))
