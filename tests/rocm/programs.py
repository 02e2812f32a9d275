"""Small programs that the tests compile: functions of abstract devices that return a lowered program."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.backend import dot, from_start, launch, load, store
from pallas_kernels.blocks import KernelSettings
from pallas_kernels.choice import platform_of
from zaya_jax.parallel.mesh import data_mesh, on_each_device
from zaya_jax.pytree import abstract
from zaya_jax.train.compiled_programs import saved_weights
from zaya_jax.train.step.state import (
    abstract_state,
    checkpoint_shardings,
    from_checkpoint,
    make_setup,
    shardings,
    to_checkpoint,
)


def product_of_rows(devices, *, rows):
    """The gradient of a mean over rows sharded over all devices."""
    mesh = Mesh(np.array(devices), ("data",))
    by_rows, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    gradient = jax.jit(
        jax.grad(lambda w, x: jax.nn.gelu(x @ w).mean()),
        in_shardings=(replicated, by_rows),
        out_shardings=replicated,
    )
    return gradient.lower(
        jax.ShapeDtypeStruct((256, 512), jnp.bfloat16), jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
    )


def triton_product(devices, *, block):
    """A Pallas kernel: the product of two square matrices, one block per program."""
    size = 2 * block
    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)

    def kernel(x, y, out):
        rows, columns = (pl.ds(pl.program_id(axis) * block, block) for axis in range(2))
        all_there = from_start(size, pl.program_id(0))
        store(out.at[rows, columns], dot(load(x.at[rows, all_there]), load(y.at[all_there, columns])))

    def multiply(x, y):
        return launch(kernel, (x, y), [matrix], KernelSettings(), grid=(2, 2), name="triton_product")

    # Pallas lowers for the device of the current mesh.
    replicated = PartitionSpec()
    on_device = on_each_device(multiply, data_mesh(devices[:1]), in_specs=replicated, out_specs=replicated)
    return jax.jit(on_device).lower(matrix, matrix)


def save(devices, *, config):
    """The computation of saving the state of `zaya train`."""
    mesh = data_mesh(devices, node_devices=config.execution.node_devices)
    state = abstract_state(config, make_setup(config, len(devices), platform=platform_of(devices[0])), mesh)
    return saved_weights(state, mesh).lower(state)


def resume(devices, *, config):
    """The computation of a resume: the state of the arrays that a checkpoint has."""
    mesh = data_mesh(devices, node_devices=config.execution.node_devices)
    setup = make_setup(config, len(devices), platform=platform_of(devices[0]))
    state = abstract_state(config, setup, mesh)
    shapes = jax.eval_shape(to_checkpoint, state)
    saved = abstract(shapes, checkpoint_shardings(shapes, mesh, setup.partition))
    restored = functools.partial(from_checkpoint, like=state, written=state)
    return jax.jit(restored, out_shardings=shardings(state, mesh)).lower(saved)


def abort(devices):
    """Aborts like a failed check in the compiler."""
    os.abort()


def refuse(devices):
    """Fails like a bug in a program, while jax traces it."""

    def function(x):
        raise ValueError("no such program")

    return jax.jit(function).lower(1)
