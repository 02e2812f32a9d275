"""Both convolutions of `cca` as one: a kernel that computes their joint matrices, and its gradient.

There is no nonlinearity between the two ([CCA] section II-B, Listing 1): together they are a sum over the
latents that a token reads, each times a matrix, the product of the two convolutions' kernels. These matrices
are small, a few for each head, while the result of the first convolution is large: a kernel that multiplies
latents directly neither computes, rounds nor masks anything between the load and the product.

XLA makes six kernels of `join`, whose launches take longer than their work.

Letters are those of the package and of `paths.py`; X are the output channels of a head.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import launch, store
from pallas_kernels.blocks import KernelSettings, block_mask
from pallas_kernels.cca.reference import CcaWeights
from pallas_kernels.cca.rows import Columns, Layout, matrix, vector

CHANNELS = 32
"""Channels of a head that one program of `join`, or of its gradient, computes."""


def join(weights: CcaWeights, layout: Layout, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the matrix of each path, [A, Z, X, H], in `dtype`, and the joint bias, [C], float32.

    Before the start of a document the second convolution reads the first one's bias, so that the bias is the
    same for every token.

    Output channels are the first axis of a matrix: a lane of the matrix unit needs a few inputs of one
    output, and reads them with one instruction if they are contiguous.
    """
    width = layout.width

    def kernel(head, outputs, depthwise, first_bias, grouped, second_bias, joined, bias):
        inputs = layout.whole
        taps_JHX = [matrix(grouped, (head, j), inputs, outputs, jnp.float32) for j in _taps(layout)]
        of_head = inputs.shifted(head * width)
        for z, path in enumerate(layout.paths):
            # Paths over the same tokens add their products of taps.
            made_HX = _sum(vector(depthwise, of_head, i)[:, None] * taps_JHX[j] for i, j in path.taps)
            _store_matrix(joined, (head, z), outputs, inputs, made_HX.T)
        # The first bias goes through all taps of the second convolution.
        first_X = jnp.sum(vector(first_bias, of_head)[:, None] * _sum(taps_JHX), axis=0)
        columns = outputs.shifted(head * width)
        store(bias.at[columns.channel_X], first_X + vector(second_bias, columns), columns.valid_X)

    results = [
        # Only what is multiplied is rounded; the bias is added to sums, which are float32.
        jax.ShapeDtypeStruct((layout.heads, len(layout.paths), width, width), dtype),
        jax.ShapeDtypeStruct((layout.heads * width,), jnp.float32),
    ]
    kernel_AZXH, bias_C = _launch(kernel, layout, weights[:4], results, "cca_join")
    return kernel_AZXH, bias_C


def grad_join(
    weights: CcaWeights, layout: Layout, kernel_AZHX: jax.Array, bias_C: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of both convolutions' kernels and biases, in their order and dtypes.

    Args:
      weights: weights of both convolutions.
      layout: sizes of the call.
      kernel_AZHX: gradient of the joint matrices, input channels first, float32.
      bias_C: gradient of the joint bias, float32.
    """
    width = layout.width

    def kernel(head, inputs, depthwise, first_bias, grouped, joined, bias, *results):
        grad_depthwise, grad_first_bias, grad_grouped = results
        outputs = layout.whole
        grad_ZHX = [matrix(joined, (head, z), inputs, outputs) for z, _ in enumerate(layout.paths)]
        # Taps of one path share the gradient of its matrix: their products were added up.
        of_taps = {taps: grad_ZHX[z] for z, path in enumerate(layout.paths) for taps in path.taps}
        grad_1X = vector(bias, outputs.shifted(head * width))[None, :]
        columns = inputs.shifted(head * width)
        firsts_IH = [vector(depthwise, columns, i) for i in range(layout.depthwise_taps)]
        first_bias_H1 = vector(first_bias, columns)[:, None]
        taps_JHX = [matrix(grouped, (head, j), inputs, outputs, jnp.float32) for j in _taps(layout)]
        for j in _taps(layout):
            parts = [first_H[:, None] * of_taps[i, j] for i, first_H in enumerate(firsts_IH)]
            _store_matrix(grad_grouped, (head, j), inputs, outputs, _sum([first_bias_H1 * grad_1X, *parts]))
        for i, _ in enumerate(firsts_IH):
            parts = [tap_HX * of_taps[i, j] for j, tap_HX in enumerate(taps_JHX)]
            store(grad_depthwise.at[i, columns.channel_X], jnp.sum(_sum(parts), axis=1), columns.valid_X)
        # The bias of the first convolution feeds every tap of the second.
        to_bias_H = jnp.sum(_sum(taps_JHX) * grad_1X, axis=1)
        store(grad_first_bias.at[columns.channel_X], to_bias_H, columns.valid_X)

    operands = *weights[:3], kernel_AZHX, bias_C
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights[:3]]
    first_IC, first_bias_C, grouped_AJHX = _launch(kernel, layout, operands, results, "cca_join_grad")
    return first_IC, first_bias_C, grouped_AJHX, bias_C.astype(weights.grouped_bias_C.dtype)


def _launch(
    kernel: Callable[..., None], layout: Layout, operands: tuple[Any, ...], results: list[Any], name: str
) -> tuple[jax.Array, ...]:
    """Launches `kernel(head, channels, *operands, *results)` for each block of channels of each head."""

    def start(*references):
        kernel(pl.program_id(0), layout.chunk(pl.program_id(1), CHANNELS), *references)

    grid = layout.heads, pl.cdiv(layout.width, CHANNELS)
    return launch(start, operands, results, KernelSettings(), grid=grid, name=name)


def _taps(layout: Layout) -> range:
    return range(layout.grouped_taps)


def _sum(parts: Any) -> jax.Array:
    return functools.reduce(operator.add, parts)


def _store_matrix(
    reference: Any, first: tuple[Any, ...], rows: Columns, columns: Columns, block_XY: jax.Array
) -> None:
    at = reference.at[(*first, rows.channel_X[:, None], columns.channel_X[None, :])]
    shape = (rows.channel_X.shape[0], columns.channel_X.shape[0])
    store(at, block_XY, block_mask(rows.valid_X, columns.valid_X, shape))
