"""The train step as a program for a described cluster: what `zaya plan --compile` compiles."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from zaya_jax.config import Config
from zaya_jax.data.batch import Batch
from zaya_jax.parallel.mesh import by_rows, check_batch_size, data_mesh, replicated
from zaya_jax.train.state import init_state, make_rules
from zaya_jax.train.step import train_step


def lower_train_step(devices: Sequence[Any], *, config: Mapping) -> Lowered:
    """The step that `zaya train` runs, written down for the given devices.

    Args:
      devices: of the cluster; abstract ones will do.
      config: of the run, as plain values.

    Raises:
      ValueError: if the batch cannot be dealt out to the devices.
    """
    run = Config.from_dict(dict(config))
    check_batch_size(run.data.batch_size, run.train.num_microbatches, len(devices))
    rules, mesh = make_rules(run), data_mesh(devices)
    step = functools.partial(train_step, rules=rules, mesh=mesh, num_microbatches=run.train.num_microbatches)
    whole, rows = replicated(mesh), by_rows(mesh)
    jitted = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole, donate_argnums=0)
    return jitted.lower(jax.eval_shape(lambda: init_state(run, rules)), abstract_batch(run))


def abstract_batch(config: Config) -> Batch:
    """Shapes and types of the global batch of a step."""
    shape = (config.data.batch_size, config.data.sequence_length)
    whole, real = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    leaves = {"tokens_BT": whole, "targets_BT": whole, "weights_BT": real, "positions_BT": whole}
    structure = jax.tree.structure(Batch(*[0] * 5))
    return jax.tree.unflatten(structure, [*leaves.values(), whole])
