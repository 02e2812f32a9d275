"""The train step as a program for a described cluster: what `zaya plan --compile` compiles."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.stages import Lowered

from pallas_kernels.choice import platform_of
from zaya_jax.config import Config
from zaya_jax.parallel.mesh import check_batch_size, data_mesh, of_batch
from zaya_jax.pytree import abstract
from zaya_jax.train.programs import abstract_batch, compiled_step, saved_weights
from zaya_jax.train.state import abstract_state, make_setup


def lower_train_step(devices: Sequence[Any], *, config: Mapping) -> Lowered:
    """The step that `zaya train` runs, written down for the given devices.

    Args:
      devices: of the cluster; abstract ones will do.
      config: of the run, as plain values.

    Raises:
      ValueError: if the batch cannot be shared evenly by the devices.
    """
    run = Config.from_dict(dict(config))
    num_microbatches = run.execution.num_microbatches
    ranks = run.execution.context_devices
    check_batch_size(run.data.batch_size, num_microbatches, len(devices), ranks)
    setup = make_setup(run, len(devices), platform=platform_of(devices[0]))
    mesh = data_mesh(devices, context_devices=ranks, node_devices=run.execution.node_devices)
    state = abstract_state(run, setup, mesh)
    step: Any = compiled_step(state, setup=setup, mesh=mesh, num_microbatches=num_microbatches)
    return step.lower(state, abstract(abstract_batch(run, run.data.batch_size), of_batch(mesh)))


def lower_save(devices: Sequence[Any], *, config: Mapping) -> Lowered:
    """What devices compute when `zaya train` saves its state, written down for the given ones."""
    run = Config.from_dict(dict(config))
    mesh = data_mesh(devices, node_devices=run.execution.node_devices)
    state = abstract_state(run, make_setup(run, len(devices), platform=platform_of(devices[0])), mesh)
    program: Any = saved_weights(state, mesh)
    return program.lower(state)
