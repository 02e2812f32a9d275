"""Small programs that the tests compile: functions of abstract devices that give a lowered program."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas
from jax.experimental.pallas import triton
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def product_of_rows(devices, *, rows):
    """The gradient of a mean over rows that lie on all devices."""
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
    """A Pallas kernel: one product of two square matrices, a block a program."""

    def kernel(x, y, out):
        out[...] = triton.dot(x[...], y[...]).astype(out.dtype)

    size = 2 * block
    multiply = pallas.pallas_call(
        kernel,
        name="triton_product",
        out_shape=jax.ShapeDtypeStruct((size, size), jnp.bfloat16),
        grid=(2, 2),
        in_specs=[
            pallas.BlockSpec((block, size), lambda i, j: (i, 0)),
            pallas.BlockSpec((size, block), lambda i, j: (0, j)),
        ],
        out_specs=pallas.BlockSpec((block, block), lambda i, j: (i, j)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
    )
    replicated = NamedSharding(Mesh(np.array(devices[:1]), ("data",)), PartitionSpec())
    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    return jax.jit(multiply, in_shardings=replicated, out_shardings=replicated).lower(matrix, matrix)


def abort(devices):
    """What a failed check in the compiler does."""
    os.abort()


def refuse(devices):
    """What a mistake in a program does."""
    raise ValueError("no such program")
