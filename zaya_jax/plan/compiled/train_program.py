"""The train step as a program for a described cluster, compiled by `zaya plan --compile`."""

from collections.abc import Sequence
from typing import Any

from jax.stages import Lowered

from pallas_kernels.choice import platform_of
from zaya_jax.config import Config
from zaya_jax.parallel.mesh import batch_sharding, check_batch_size, data_mesh
from zaya_jax.pytree import abstract
from zaya_jax.train.compiled_programs import abstract_batch, compiled_step
from zaya_jax.train.step.state import abstract_state, make_setup


def lower_train_step(devices: Sequence[Any], *, config: Config) -> Lowered:
    """Lowers the step of `zaya train` for the given devices.

    Args:
      devices: devices of the cluster, which may be abstract.
      config: config of the run.

    Raises:
      UserError: if the batch cannot be divided among the devices.
    """
    num_microbatches = config.execution.num_microbatches
    ranks = config.execution.context_devices
    check_batch_size(config.data.batch_size, num_microbatches, len(devices), ranks)
    # The default implementations must be those for the described GPUs, not for this machine.
    setup = make_setup(config, len(devices), platform=platform_of(devices[0]))
    mesh = data_mesh(devices, context_devices=ranks, node_devices=config.execution.node_devices)
    state = abstract_state(config, setup, mesh)
    step: Any = compiled_step(state, setup=setup, mesh=mesh, num_microbatches=num_microbatches)
    return step.lower(state, abstract(abstract_batch(config, config.data.batch_size), batch_sharding(mesh)))
