"""`residual_rms_norm` in Pallas for Triton: one pass over the rows in each direction.

A program holds whole rows in registers. Backward, each program loops over a run of rows and keeps its partial
sums of the weights' gradients in registers too; a second kernel adds the partial sums in a fixed order, so
that a gradient has the same bits in every run.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import from_start, launch, load, store
from pallas_kernels.blocks import KernelSettings, check_counts
from pallas_kernels.choice import WIDEST
from pallas_kernels.errors import ArgumentError
from pallas_kernels.shares import sum_shares


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(KernelSettings):
    """Settings of the kernels.

    Attributes:
      rows: rows that a program of the forward pass holds at once.
      run: rows that a program of the backward pass processes one after the other.
    """

    rows: int = 1
    run: int = 32


def check(width: int, blocks: Blocks) -> None:
    """Checks that the kernel can hold the rows and that settings can be compiled.

    Args:
      width: channels of a row.
      blocks: block sizes of the kernels.

    Raises:
      ArgumentError: with the wrong value and the values that are accepted.
    """
    blocks.check("residual_rms_norm", "rows", min_side=1)
    check_counts("residual_rms_norm", {"run": blocks.run})
    if width > WIDEST["residual_rms_norm"]:
        raise ArgumentError(
            f"residual_rms_norm: rows are {width} wide; the kernel supports up to "
            f'{WIDEST["residual_rms_norm"]}, implementation="xla" any width'
        )


def forward(
    output_PD: jax.Array,
    residual_PD: jax.Array,
    scaling: tuple[jax.Array, ...],
    scale_D: jax.Array,
    *,
    eps: float,
    dtype: jnp.dtype,
    blocks: Blocks,
) -> tuple[jax.Array, jax.Array]:
    """Returns the new stream, float32, and its norm in `dtype`."""
    num_rows, width = output_PD.shape
    # Triton's blocks have powers of 2 as sides; a row that is shorter is masked.
    padded = pl.next_power_of_2(width)

    def kernel(output, residual, *references):
        *vectors, scale, stream, norm = references
        index, mask = _rows(pl.program_id(0) * blocks.rows, blocks.rows, num_rows, padded, width)
        row = [_load_vector(vector, padded, pl.program_id(0))[None] for vector in (*vectors, scale)]
        # Statistics in float32, whatever the dtype of the output.
        merged = _merge(_load(output, index, mask), _load(residual, index, mask), row)
        # Biases and scales read as zeros beyond the width too, so that the padding of a row adds nothing.
        mean_square = jnp.sum(merged * merged, axis=1, keepdims=True) / width
        store(stream.at[index], merged, mask)
        normed = row[4] * (merged * lax.rsqrt(mean_square + eps))
        store(norm.at[index], normed, mask)

    grid = (pl.cdiv(num_rows, blocks.rows),)
    operands = output_PD, residual_PD, *scaling, scale_D
    results = [jax.ShapeDtypeStruct((num_rows, width), kind) for kind in (jnp.float32, dtype)]
    stream_PD, norm_PD = launch(kernel, operands, results, blocks, grid=grid, name="residual_rms_norm")
    return stream_PD, norm_PD


def backward(
    output_PD: jax.Array,
    residual_PD: jax.Array,
    scaling: tuple[jax.Array, ...],
    scale_D: jax.Array,
    grad_stream_PD: jax.Array,
    grad_norm_PD: jax.Array,
    *,
    eps: float,
    blocks: Blocks,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], jax.Array]:
    """Returns the gradients of all arguments. Recomputing the stream is cheaper than reading it back."""
    num_rows, width = output_PD.shape
    padded, num_runs = pl.next_power_of_2(width), pl.cdiv(num_rows, blocks.run)

    def kernel(output, residual, *references):
        *vectors, scale, grad_stream, grad_norm, grad_output, grad_residual, shares = references
        run = pl.program_id(0)
        row = [_load_vector(vector, padded, run)[None] for vector in (*vectors, scale)]

        def where(i):
            # One row at a time: four sums of the weights' gradients occupy registers already.
            return _rows(run * blocks.run + i, 1, num_rows, padded, width)

        def read(i):
            index, mask = where(i)
            return tuple(load(x.at[index], mask) for x in (output, residual, grad_stream, grad_norm))

        def step(i, carry):
            values, sums = carry
            # Read ahead, so that memory is not idle while the sums over this row are computed. After the last
            # row it is read again, from a cache.
            following = read(jnp.minimum(i + 1, blocks.run - 1))
            out, before, towards_stream, gradient = (x.astype(jnp.float32) for x in values)
            merged = _merge(out, before, row)
            inverse = lax.rsqrt(jnp.sum(merged * merged, axis=1, keepdims=True) / width + eps)
            unit = merged * inverse
            towards = gradient * row[4]
            # The norm does not depend on the length of a row: the gradient's component along it is removed.
            shared = jnp.sum(towards * unit, axis=1, keepdims=True) / width
            total = towards_stream + inverse * (towards - unit * shared)
            index, mask = where(i)
            store(grad_output.at[index], total * row[1], mask)
            store(grad_residual.at[index], total * row[3], mask)
            # Rows and channels that do not exist read as zeros, so that `total` is zero there.
            terms = total, total * (out + row[0]), total * (before + row[2]), gradient * unit
            return following, tuple(a + b for a, b in zip(sums, terms, strict=True))

        zeros = jnp.zeros((1, padded), jnp.float32)
        # One row of sums for each of the four weights' gradients that need a sum over tokens.
        _, sums = lax.fori_loop(0, blocks.run, step, (read(run * 0), (zeros,) * 4))
        mask = (jnp.arange(padded) < width)[None]
        for number, share in enumerate(sums):
            # The partial sums of one weight are neighbours: `sum_shares` reads the array as [4, runs, D].
            at = shares.at[pl.ds(number * num_runs + run, 1), from_start(padded, run)]
            store(at, share, mask)

    operands = (output_PD, residual_PD, *scaling, scale_D, grad_stream_PD, grad_norm_PD)
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (output_PD, residual_PD)]
    shares = jax.ShapeDtypeStruct((4 * num_runs, width), jnp.float32)
    grad_output_PD, grad_residual_PD, shares = launch(
        kernel, operands, [*out, shares], blocks, grid=(num_runs,), name="residual_rms_norm_backward"
    )
    sums_SD = sum_shares(shares.reshape(4, num_runs, width), name="residual_rms_norm_sums")
    total_D, output_scale_D, residual_scale_D, grad_scale_D = sums_SD
    # A bias is added before scaling, so that its gradient is multiplied by the scale.
    scaling_gradients = (total_D * scaling[1], output_scale_D, total_D * scaling[3], residual_scale_D)
    return grad_output_PD, grad_residual_PD, scaling_gradients, grad_scale_D


def _rows(first: jax.Array, size: int, num_rows: int, padded: int, width: int):
    """Returns the address of a block of whole rows and the mask of its valid entries."""
    row, channel = first + jnp.arange(size), jnp.arange(padded)
    return (
        (pl.ds(first, size), from_start(padded, first)),
        (row < num_rows)[:, None] & (channel < width)[None, :],
    )


def _load(reference, index, mask) -> jax.Array:
    return load(reference.at[index], mask).astype(jnp.float32)


def _load_vector(reference, padded: int, number: jax.Array) -> jax.Array:
    mask = jnp.arange(padded) < reference.shape[0]
    return load(reference.at[from_start(padded, number)], mask).astype(jnp.float32)


def _merge(output: jax.Array, residual: jax.Array, row: list[jax.Array]) -> jax.Array:
    # [ZAYA1-8B] eq. 6, but with the biases added before scaling, as in all released code.
    return (output + row[0]) * row[1] + (residual + row[2]) * row[3]
