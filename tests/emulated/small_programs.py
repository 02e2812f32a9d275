"""A program with all that a train step's runtime does, for the worker that compiles and for the CPU."""

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

SIZE = 16


def compute(weights, x, order):
    """Products in a loop, a branch, a sort and a sum at given rows."""
    gradient = jax.grad(_loss)(weights, x)
    norm = jnp.sqrt((gradient**2).sum())
    # Small branches become a selection: these have a product each.
    weights = jax.lax.cond(norm < 1e3, lambda: weights - _product(gradient), lambda: _product(weights))
    keys, places = jax.lax.sort((order, jnp.arange(len(order))), num_keys=1)
    # Rows meet: that is a sum by atomic instructions.
    sums = jnp.zeros((SIZE, SIZE)).at[order % SIZE].add(x)
    return weights, norm, keys, places, sums[2:5]


def _product(matrices):
    return jnp.einsum("nij,nkj->nik", matrices, matrices, precision="highest")


def _loss(weights, x):
    def layer(y, w):
        return jnp.tanh(jnp.dot(y, w, precision="highest")), None

    return jax.lax.scan(layer, x, weights)[0].mean()


def shapes(sharding=None):
    """Types of the arguments."""
    f32, s32 = jnp.float32, jnp.int32
    return (
        jax.ShapeDtypeStruct((3, SIZE, SIZE), f32, sharding=sharding),
        jax.ShapeDtypeStruct((2 * SIZE, SIZE), f32, sharding=sharding),
        jax.ShapeDtypeStruct((2 * SIZE,), s32, sharding=sharding),
    )


def lower(devices):
    """Lowers the program for the first of the devices; the weights are donated, as a step's state is."""
    there = SingleDeviceSharding(devices[0])
    return jax.jit(compute, out_shardings=there, donate_argnums=0).lower(*shapes(there))
