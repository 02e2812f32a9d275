"""The backward pass of `cca` in Pallas for Triton.

Nothing is kept but the arguments. A first kernel computes the heads again and turns the gradients of
queries and keys into those of the second convolution's result, called mixed; it writes them, because
the second kernel, which owns other tokens, needs them at a distance: a token's latent is seen by the W
tokens behind it. A third sums products over the tokens for the grouped kernel.

Letters as in the package and in `rows.py`; R is shares of a sum.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, launch, store
from pallas_kernels.cca.reference import SHORTEST, CcaWeights
from pallas_kernels.cca.rows import Rows
from pallas_kernels.cca.triton import (
    Blocks,
    Operands,
    Tile,
    for_heads,
    launch_by_key_head,
    rotate,
    rotation_of,
    scale_of,
)
from pallas_kernels.shares import sum_shares


def backward(
    given: Operands, weights: CcaWeights, grad_q_BTX: jax.Array, grad_k_BTY: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array | None, CcaWeights]:
    """Gradients of the latent, of the tail (None without one) and of the weights."""
    heads, num_taps, width, _ = weights.grouped_kernel_AJHH.shape
    grad_mixed_BTC, bias_RC, temperature_RK = grad_mixed(given, grad_q_BTX, grad_k_BTY, blocks.grad_mixed)
    given = given.with_array("grad_mixed", grad_mixed_BTC)
    grad_latent_BTC, grad_tail_BWC, kernel_IRC = grad_latent(given, blocks.grad_latent)
    kernel_RX = grad_kernel(given, blocks.grad_kernel, blocks.run)
    total = functools.partial(sum_shares, name="cca_sums")
    grad_bias_C = total(bias_RC[None])[0]
    # Each tap of the second convolution holds the first one's bias, also where it finds another document.
    grad_first_bias_AH = jnp.einsum(
        "ajhx,ax->ah",
        given.arrays["grouped_kernel"].astype(jnp.float32),
        grad_bias_C.reshape(heads, width),
        precision=lax.Precision.HIGHEST,
    )
    gradients = CcaWeights(
        depthwise_kernel_IC=total(kernel_IRC),
        depthwise_bias_C=grad_first_bias_AH.reshape(-1),
        grouped_kernel_AJHH=total(kernel_RX[None]).reshape(heads, num_taps, width, width),
        grouped_bias_C=grad_bias_C,
        temperature_K=total(temperature_RK[None])[0],
    )
    gradients = jax.tree.map(lambda gradient, weight: gradient.astype(weight.dtype), gradients, weights)
    return grad_latent_BTC, grad_tail_BWC, gradients


def grad_mixed(
    given: Operands, grad_q_BTX: jax.Array, grad_k_BTY: jax.Array, tile: Tile
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradient of what the second convolution gave [B, T, C], in the latent's dtype.

    And shares of the gradients of its bias [R, C] and of the temperature [R, K].
    """
    layout = given.layout
    num_shares = layout.batch * pl.cdiv(layout.time, tile.rows)

    def kernel(rows, key, share, grad, bias_shares, temperature_shares):
        rotation = rotation_of(rows, back=True)
        temperature = rows.references["temperature"][key]

        def finish(head, mixed, *, is_key):
            name, of_result = ("grad_k", key) if is_key else ("grad_q", head)
            pieces = [piece.behind(of_result * layout.width) for piece in layout.pieces]
            towards = rotate([rows.load(name, piece) for piece in pieces], rotation)
            scale_I1, squared_I1 = scale_of(layout, mixed)
            along = [jnp.sum(a * b, axis=1) for a, b in zip(towards, mixed, strict=True)]
            along_I1 = functools.reduce(jnp.add, along)[:, None] * scale_I1
            if is_key:
                temperature_shares[share, key] = jnp.sum(along_I1)
                towards, along_I1 = [x * temperature for x in towards], along_I1 * temperature
            # A vector that was too short was scaled by a constant.
            along_I1 = jnp.where(squared_I1 > SHORTEST**2, along_I1 * scale_I1 / layout.width, 0)
            for piece, grad_IX, mixed_IX in zip(layout.pieces, towards, mixed, strict=True):
                grad_IX = scale_I1 * (grad_IX - mixed_IX * along_I1)
                columns = piece.behind(head * layout.width)
                rows.store(grad, columns, grad_IX)
                _store_share(bias_shares, share, columns, jnp.sum(grad_IX, axis=0))

        for_heads(rows, key, tile.contracted, finish)

    given = given.with_array("grad_q", grad_q_BTX).with_array("grad_k", grad_k_BTY)
    latent_BTC = given.arrays["latent"]
    results = [
        jax.ShapeDtypeStruct(latent_BTC.shape, latent_BTC.dtype),
        jax.ShapeDtypeStruct((num_shares, latent_BTC.shape[2]), jnp.float32),
        jax.ShapeDtypeStruct((num_shares, layout.key_heads), jnp.float32),
    ]
    grad_BTC, bias_RC, temperature_RK = launch_by_key_head(kernel, given, results, tile, "cca_grad_mixed")
    return grad_BTC, bias_RC, temperature_RK


def grad_latent(given: Operands, tile: Tile) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Gradients of the latent and of the tail, and shares of the depthwise kernel's [I, R, C].

    What stands in the tail is seen too, so that the first block begins with it.
    """
    layout = given.layout
    num_blocks = pl.cdiv(layout.time + layout.before, tile.rows)
    num_shares, num_taps = layout.batch * num_blocks, layout.depthwise_taps

    def kernel(*references):
        named = dict(zip(given.arrays, references, strict=False))
        grad, shares, *grad_tail = references[len(named) :]
        head, block, row = (pl.program_id(axis) for axis in range(3))
        rows = Rows(named, layout, row, block * tile.rows - layout.before + jnp.arange(tile.rows))
        whole = layout.whole.behind(head * layout.width)
        latent_IX, sum_IX = rows.latent(0, whole), _grad_means(rows, head)
        for i, grad_IX in enumerate(_grad_taps(rows, head, tile.contracted)):
            sum_IX = sum_IX + rows.vector("depthwise_kernel", whole, i) * grad_IX
            share = i * num_shares + row * num_blocks + block
            _store_share(shares, share, whole, jnp.sum(latent_IX * grad_IX, axis=0))
        for reference in grad_tail:
            rows.store(reference, whole, sum_IX, shift=layout.before)
        segments_I1 = rows.segments(0)
        if segments_I1 is not None:
            sum_IX = jnp.where(segments_I1 == 0, 0, sum_IX)
        rows.store(grad, whole, sum_IX)

    latent_BTC, tail_BWC = given.arrays["latent"], given.arrays.get("tail")
    shares = jax.ShapeDtypeStruct((num_taps * num_shares, latent_BTC.shape[2]), jnp.float32)
    results = [jax.ShapeDtypeStruct(latent_BTC.shape, latent_BTC.dtype), shares]
    if tail_BWC is not None:
        results.append(jax.ShapeDtypeStruct(tail_BWC.shape, tail_BWC.dtype))
    grid, operands = (layout.heads, num_blocks, layout.batch), tuple(given.arrays.values())
    grad_BTC, shares_XC, *grad_tail = launch(
        kernel, operands, results, tile, grid=grid, name="cca_grad_latent"
    )
    shares_IRC = shares_XC.reshape(num_taps, num_shares, -1)
    return grad_BTC, (grad_tail[0] if grad_tail else None), shares_IRC


def _grad_taps(rows: Rows, head: jax.Array, contracted: int) -> list[jax.Array]:
    """What reaches these tokens' latents through each tap of the first convolution, before its kernel."""
    layout, dtype = rows.layout, rows.references["grouped_kernel"].dtype
    whole = layout.whole

    def step(number, sums):
        chunk = layout.chunk(number, contracted)
        columns = chunk.behind(head * layout.width)
        grads = functools.cache(lambda ahead: rows.load("grad_mixed", columns, rows.place_I + ahead))
        kernels = [rows.matrix("grouped_kernel", (head, j), whole, chunk) for j in range(layout.grouped_taps)]
        found = []
        for i, sum_IX in enumerate(sums):
            # The first convolution's tap i brings a latent to a token so far ahead, the second's to another.
            first = layout.depthwise_taps - 1 - i
            for j, kernel_XY in enumerate(kernels):
                second = first + layout.grouped_taps - 1 - j
                grad_IY = _of_one_document(rows, (0, first, second), grads(second)).astype(dtype)
                sum_IX = sum_IX + dot(grad_IY, kernel_XY.T)
            found.append(sum_IX)
        return found

    zeros = [jnp.zeros((rows.place_I.shape[0], whole.there_X.shape[0]), jnp.float32)] * layout.depthwise_taps
    return lax.fori_loop(0, pl.cdiv(layout.width, contracted), step, zeros)


def _of_one_document(rows: Rows, ahead: tuple[int, ...], block_IX: jax.Array) -> jax.Array:
    """Zeros where tokens so far ahead are not of one document."""
    segments = [rows.segments(-distance) for distance in ahead]
    for one, other in itertools.pairwise(segments):
        if one is not None:
            block_IX = jnp.where(one == other, block_IX, 0)
    return block_IX


def _grad_means(rows: Rows, head: jax.Array) -> jax.Array:
    """What reaches a head's latents through the means of queries and keys."""
    layout = rows.layout
    whole = layout.whole
    is_key = head >= layout.query_heads
    key = jnp.where(is_key, head - layout.query_heads, head // layout.group)
    first = jnp.where(is_key, key * layout.group, layout.query_heads + key)
    # Triton takes a choice between two literals for one between truth values, hence the product.
    num_others = 1 + is_key.astype(jnp.int32) * (layout.group - 1)

    def add(i, sum_IX):
        return sum_IX + rows.load("grad_mixed", whole.behind((first + i) * layout.width))

    own_IX = rows.load("grad_mixed", whole.behind(head * layout.width))
    others_IX = lax.fori_loop(0, num_others, add, jnp.zeros_like(own_IX))
    return 0.5 * (own_IX + jnp.where(is_key, others_IX, others_IX * (1 / layout.group)))


def grad_kernel(given: Operands, tile: Tile, run: int) -> jax.Array:
    """Shares of the grouped kernel's gradient, [R, A*J*H*H]."""
    layout = given.layout
    num_runs, width, num_taps = pl.cdiv(layout.time, run), layout.width, layout.grouped_taps

    def kernel(*references):
        *inputs, shares = references
        named = dict(zip(given.arrays, inputs, strict=True))
        tap, head, number = (pl.program_id(axis) for axis in range(3))
        row, first = number // num_runs, number % num_runs * run
        whole = layout.whole
        columns = whole.behind(head * width)

        def step(i, sum_XY):
            rows = Rows(named, layout, row, first + i * tile.rows + jnp.arange(tile.rows))
            distance = num_taps - 1 - tap
            seen_IX = rows.depthwise(distance, columns, lambda distance: rows.latent(distance, columns))
            grad_IY = rows.load("grad_mixed", columns)
            dtype = named["grouped_kernel"].dtype
            return sum_XY + dot(seen_IX.astype(dtype).T, grad_IY.astype(dtype))

        zeros_XY = jnp.zeros(whole.there_X.shape * 2, jnp.float32)
        sum_XY = lax.fori_loop(0, pl.cdiv(run, tile.rows), step, zeros_XY)
        at = shares.at[number, head, tap, whole.channel_X[:, None], whole.channel_X[None, :]]
        mask = whole.there_X[:, None] & whole.there_X[None, :]
        store(at, sum_XY, mask)

    grid, operands = (num_taps, layout.heads, layout.batch * num_runs), tuple(given.arrays.values())
    shape = (layout.batch * num_runs, layout.heads, num_taps, width, width)
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    (shares,) = launch(kernel, operands, [result], tile, grid=grid, name="cca_grad_kernel")
    return shares.reshape(shape[0], -1)


def _store_share(shares: Any, number: jax.Array, columns: Any, values_X: jax.Array) -> None:
    store(shares.at[number, columns.channel_X], values_X, columns.there_X)
