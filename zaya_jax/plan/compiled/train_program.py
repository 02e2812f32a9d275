"""The train step as a program for a described cluster, compiled by `zaya plan --compile`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.stages import Lowered

from pallas_kernels.choice import platform_of
from zaya_jax.config import Config
from zaya_jax.parallel.mesh import batch_sharding, check_batch_size, data_mesh
from zaya_jax.pytree import abstract
from zaya_jax.train.compiled_programs import abstract_batch, compiled_step, saved_weights
from zaya_jax.train.step.state import abstract_state, make_setup


def lower_train_step(devices: Sequence[Any], *, config: Mapping) -> Lowered:
    """Lowers the step of `zaya train` for the given devices.

    Args:
      devices: devices of the cluster, which may be abstract.
      config: config of the run as plain values.

    Raises:
      UserError: if the batch cannot be divided among the devices.
    """
    run = Config.from_dict(dict(config))
    num_microbatches = run.execution.num_microbatches
    ranks = run.execution.context_devices
    check_batch_size(run.data.batch_size, num_microbatches, len(devices), ranks)
    # The default implementations must be those for the described GPUs, not for this machine.
    setup = make_setup(run, len(devices), platform=platform_of(devices[0]))
    mesh = data_mesh(devices, context_devices=ranks, node_devices=run.execution.node_devices)
    state = abstract_state(run, setup, mesh)
    step: Any = compiled_step(state, setup=setup, mesh=mesh, num_microbatches=num_microbatches)
    return step.lower(state, abstract(abstract_batch(run, run.data.batch_size), batch_sharding(mesh)))


def lower_save(devices: Sequence[Any], *, config: Mapping) -> Lowered:
    """Lowers the computation of saving the state of `zaya train` for the given devices."""
    run = Config.from_dict(dict(config))
    mesh = data_mesh(devices, node_devices=run.execution.node_devices)
    state = abstract_state(run, make_setup(run, len(devices), platform=platform_of(devices[0])), mesh)
    program: Any = saved_weights(state, mesh)
    return program.lower(state)
