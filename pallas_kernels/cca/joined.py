"""Both convolutions of `cca` as one: a kernel that makes what the others multiply by, and its gradient.

Nothing lies between the two ([CCA] section II-B, Listing 1): what they make of a token is a sum over the
latents that it sees, each times a matrix, which is the first convolution's kernel times the second's. Those
matrices are small, a few for each head, and what the first convolution gives is large: a kernel that
multiplies latents as they lie in memory computes, rounds and masks nothing between reading and product.

XLA makes six kernels of `join`, and starting them takes longer than what they do.

Letters as in the package and in `paths.py`; X are the output channels of a head.
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
"""Of a head that a program of `join` makes, or takes the gradient of."""


def join(weights: CcaWeights, layout: Layout, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The matrix of each path [A, Z, X, H] in a type, and the constant [C] that both biases make, float32.

    Where the second convolution looks to before a document it finds the first one's bias, which thus
    reaches every token.

    Outputs lead in a matrix: a lane gives the matrix units a few inputs of one output, and where these lie
    side by side it reads them at once.
    """
    width = layout.width

    def kernel(head, outputs, depthwise, first_bias, grouped, second_bias, joined, bias):
        inputs = layout.whole
        taps_JHX = [matrix(grouped, (head, j), inputs, outputs, jnp.float32) for j in _taps(layout)]
        of_head = inputs.behind(head * width)
        for z, path in enumerate(layout.paths):
            made_HX = _sum(vector(depthwise, of_head, i)[:, None] * taps_JHX[j] for i, j in path.taps)
            _store_matrix(joined, (head, z), outputs, inputs, made_HX.T)
        first_X = jnp.sum(vector(first_bias, of_head)[:, None] * _sum(taps_JHX), axis=0)
        columns = outputs.behind(head * width)
        store(bias.at[columns.channel_X], first_X + vector(second_bias, columns), columns.there_X)

    results = [
        jax.ShapeDtypeStruct((layout.heads, len(layout.paths), width, width), dtype),
        jax.ShapeDtypeStruct((layout.heads * width,), jnp.float32),
    ]
    kernel_AZXH, bias_C = _launch(kernel, layout, weights[:4], results, "cca_join")
    return kernel_AZXH, bias_C


def grad_join(
    weights: CcaWeights, layout: Layout, kernel_AZHX: jax.Array, bias_C: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of the weights that are joined, in their order and dtypes.

    Args:
      weights: that were joined.
      layout: sizes.
      kernel_AZHX: gradient of the joined kernel, inputs first, float32.
      bias_C: gradient of the joined bias, float32.
    """
    width = layout.width

    def kernel(head, inputs, depthwise, first_bias, grouped, joined, bias, *results):
        grad_depthwise, grad_first_bias, grad_grouped = results
        outputs = layout.whole
        grad_ZHX = [matrix(joined, (head, z), inputs, outputs) for z, _ in enumerate(layout.paths)]
        of_taps = {taps: grad_ZHX[z] for z, path in enumerate(layout.paths) for taps in path.taps}
        grad_1X = vector(bias, outputs.behind(head * width))[None, :]
        columns = inputs.behind(head * width)
        firsts_IH = [vector(depthwise, columns, i) for i in range(layout.depthwise_taps)]
        first_bias_H1 = vector(first_bias, columns)[:, None]
        taps_JHX = [matrix(grouped, (head, j), inputs, outputs, jnp.float32) for j in _taps(layout)]
        for j in _taps(layout):
            parts = [first_H[:, None] * of_taps[i, j] for i, first_H in enumerate(firsts_IH)]
            _store_matrix(grad_grouped, (head, j), inputs, outputs, _sum([first_bias_H1 * grad_1X, *parts]))
        for i, _ in enumerate(firsts_IH):
            parts = [tap_HX * of_taps[i, j] for j, tap_HX in enumerate(taps_JHX)]
            store(grad_depthwise.at[i, columns.channel_X], jnp.sum(_sum(parts), axis=1), columns.there_X)
        to_bias_H = jnp.sum(_sum(taps_JHX) * grad_1X, axis=1)
        store(grad_first_bias.at[columns.channel_X], to_bias_H, columns.there_X)

    operands = *weights[:3], kernel_AZHX, bias_C
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights[:3]]
    first_IC, first_bias_C, grouped_AJHX = _launch(kernel, layout, operands, results, "cca_join_grad")
    return first_IC, first_bias_C, grouped_AJHX, bias_C.astype(weights.grouped_bias_C.dtype)


def _launch(
    kernel: Callable[..., None], layout: Layout, operands: tuple[Any, ...], results: list[Any], name: str
) -> tuple[jax.Array, ...]:
    """Runs `kernel(head, channels, *operands, *results)` for each few channels of each head."""

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
    store(at, block_XY, block_mask(rows.there_X, columns.there_X, shape))
