"""The backward pass of `cca` in Pallas for Triton.

Nothing is kept but the arguments. A first kernel computes the heads again and turns the gradients of
queries and keys into those of the second convolution's result, called mixed; it writes them, because
the others, which own other tokens, need them at a distance: a token's latent is seen by the W tokens behind
it. Another sums products over the tokens for the joined kernel (`joined.py`), from whose gradient those
of both convolutions follow.

Letters as in the package and in `rows.py`; R is shares of a sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, launch, store
from pallas_kernels.blocks import block_mask
from pallas_kernels.cca.joined import grad_join
from pallas_kernels.cca.paths import distances
from pallas_kernels.cca.reference import SHORTEST, CcaWeights
from pallas_kernels.cca.rows import Rows, both, matrix, over_paths
from pallas_kernels.cca.triton import (
    Blocks,
    Operands,
    Tile,
    launch_by_head,
    mixed_with_means,
    place_of_head,
    plus_means,
    rotate,
    rotation_of,
    scale_of,
    temperature_of,
)
from pallas_kernels.shares import sum_shares


def backward(
    given: Operands, weights: CcaWeights, grad_q_BTX: jax.Array, grad_k_BTY: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array | None, CcaWeights]:
    """Gradients of the latent, of the tail (None without one) and of the weights."""
    grad_mixed_BTC, bias_RC, temperature_RK = grad_mixed(given, grad_q_BTX, grad_k_BTY, blocks.grad_mixed)
    given = given.with_array("grad_mixed", grad_mixed_BTC)
    kernel_RX = grad_kernel(given, blocks.grad_kernel, blocks.run)
    grad_latent_BTC, grad_tail_BWC = grad_latent(given, blocks.grad_latent)
    total = functools.partial(sum_shares, name="cca_sums")
    kernel_AZHX = total(kernel_RX[None]).reshape(given.arrays["kernel"].shape)
    joined = grad_join(weights, given.layout, kernel_AZHX, total(bias_RC[None])[0])
    grad_temperature_K = total(temperature_RK[None])[0].astype(weights.temperature_K.dtype)
    return grad_latent_BTC, grad_tail_BWC, CcaWeights(*joined, grad_temperature_K)


def grad_mixed(
    given: Operands, grad_q_BTX: jax.Array, grad_k_BTY: jax.Array, tile: Tile
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradient of what the second convolution gave [B, T, C], in the latent's dtype.

    And shares of the gradients of the joined bias [R, C] and of the temperature [R, K].
    """
    layout = given.layout
    num_shares = layout.batch * pl.cdiv(layout.time, tile.rows)

    def kernel(rows, head, share, grad, bias_shares, temperature_shares):
        is_key, of_result = place_of_head(layout, head)
        pieces = [piece.behind(of_result * layout.width) for piece in layout.pieces]
        mixed = mixed_with_means(rows, head, tile.contracted)
        towards = lax.cond(
            is_key,
            lambda: [rows.load("grad_k", piece) for piece in pieces],
            lambda: [rows.load("grad_q", piece) for piece in pieces],
        )
        towards = rotate([x.astype(jnp.float32) for x in towards], rotation_of(rows, back=True))
        scale_I1, squared_I1 = scale_of(layout, mixed)
        along = [jnp.sum(a * b, axis=1) for a, b in zip(towards, mixed, strict=True)]
        # A vector of fixed length does not move along itself: that part of its gradient comes off.
        along_I1 = functools.reduce(jnp.add, along)[:, None] * scale_I1

        @pl.when(is_key)
        def _():
            temperature_shares[share, of_result] = jnp.sum(along_I1)

        # A vector that was too short was scaled by a constant.
        part_I1 = jnp.where(squared_I1 > SHORTEST**2, along_I1 * scale_I1 / layout.width, 0)
        factor_I1 = scale_I1 * temperature_of(rows, head)
        for piece, towards_IX, mixed_IX in zip(layout.pieces, towards, mixed, strict=True):
            grad_IX = factor_I1 * (towards_IX - mixed_IX * part_I1)
            columns = piece.behind(head * layout.width)
            rows.store(grad, columns, grad_IX)
            store(bias_shares.at[share, columns.channel_X], jnp.sum(grad_IX, axis=0), columns.there_X)

    given = given.with_array("grad_q", grad_q_BTX).with_array("grad_k", grad_k_BTY)
    results = [
        _like_latent(given),
        jax.ShapeDtypeStruct((num_shares, layout.channels), jnp.float32),
        jax.ShapeDtypeStruct((num_shares, layout.key_heads), jnp.float32),
    ]
    grad_BTC, bias_RC, temperature_RK = launch_by_head(kernel, given, results, tile, "cca_grad_mixed")
    return grad_BTC, bias_RC, temperature_RK


def _like_latent(given: Operands) -> jax.ShapeDtypeStruct:
    """Shape and type of the latent's channels, without what is behind them in the array."""
    layout = given.layout
    shape = (layout.batch, layout.time, layout.channels)
    return jax.ShapeDtypeStruct(shape, given.arrays["latent"].dtype)


def grad_latent(given: Operands, tile: Tile) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of the latent and of the tail.

    What stands in the tail is seen too, so that the first block begins with it.
    """
    layout = given.layout
    num_blocks = pl.cdiv(layout.time + layout.before, tile.rows)
    tail_BWC = given.arrays.get("tail")
    arrays = given.some("grad_mixed", "kernel", "segments")

    def kernel(*references):
        named = dict(zip(arrays, references, strict=False))
        grad, *grad_tail = references[len(named) :]
        block, head, row = (pl.program_id(axis) for axis in range(3))
        inside = not layout.before and layout.time % tile.rows == 0
        rows = Rows(named, layout, row, block * tile.rows - layout.before, tile.rows, inside=inside)
        whole = layout.whole
        # A key head is in the means of all its query heads, a query head in that of its key head.
        mean_IX = plus_means(0.0, rows, "grad_mixed", head, whole, of_query=1 / layout.group)
        sum_IX = _through_convolutions(rows, mean_IX, head, tile.contracted)
        columns = whole.behind(head * layout.width)
        there_I = rows.not_padding()
        rows.store(grad, columns, sum_IX if there_I is None else jnp.where(there_I[:, None], sum_IX, 0))
        if not grad_tail:
            return

        @pl.when(rows.first < 0)
        def _():  # the tail counts, whatever document it belongs to
            rows.store(grad_tail[0], columns, sum_IX, is_tail=True)

    results = [_like_latent(given)]
    if tail_BWC is not None:
        results.append(jax.ShapeDtypeStruct(tail_BWC.shape, tail_BWC.dtype))
    grid = num_blocks, layout.heads, layout.batch
    grads = launch(kernel, tuple(arrays.values()), results, tile, grid=grid, name="cca_grad_latent")
    return grads[0], grads[1] if grads[1:] else None


def _through_convolutions(rows: Rows, sum_IX: jax.Array, head: jax.Array, contracted: int) -> jax.Array:
    """Adds what the results of later tokens, and of these, give to a head's latents."""
    layout = rows.layout

    def add(sum_IX, step):
        columns = step.chunk.behind(head * layout.width)
        grad_IY = rows.load("grad_mixed", columns, -step.far, only_I=step.seen_I)
        kernel_YX = matrix(rows.references["kernel"], (head, step.path), step.chunk, layout.whole)
        return sum_IX + dot(grad_IY, kernel_YX)

    # Seen from the latent: the token that sees it is ahead, and so are those that the path passes.
    same = [rows.of_one_document(*(passed - path.far for passed in path.passed)) for path in layout.paths]
    return over_paths(layout, contracted, same, add, sum_IX)


def grad_kernel(given: Operands, tile: Tile, run: int) -> jax.Array:
    """Shares of the joined kernel's gradient, [R, A*Z*H*H]."""
    layout = given.layout
    num_runs, width, paths = pl.cdiv(layout.time, run), layout.width, layout.paths
    arrays = given.some("latent", "tail", "grad_mixed", "segments")

    def kernel(*references):
        *inputs, shares = references
        named = dict(zip(arrays, inputs, strict=True))
        number, head, number_of_path = (pl.program_id(axis) for axis in range(3))
        row, first = number // num_runs, number % num_runs * run
        whole = layout.whole
        columns = whole.behind(head * width)
        middle, far = distances(paths, number_of_path)

        def add(name, first, sum_XY):
            rows = Rows(named, layout, row, first, tile.rows, inside=layout.time % run == 0)
            seen_I = rows.of_one_document(0, middle, far)
            if name == "latent":
                seen_I = both(seen_I, rows.not_padding())
            seen_IX, grad_IY = rows.load(name, columns, far, only_I=seen_I), rows.load("grad_mixed", columns)
            return sum_XY + dot(seen_IX.T, grad_IY)

        zeros_XY = jnp.zeros(whole.channel_X.shape * 2, jnp.float32)
        num_steps = pl.cdiv(run, tile.rows)
        sum_XY = lax.fori_loop(0, num_steps, lambda i, x: add("latent", first + i * tile.rows, x), zeros_XY)
        if "tail" in named:
            num_steps = pl.cdiv(jnp.clip(layout.before - first, 0, run), tile.rows)
            sum_XY = lax.fori_loop(0, num_steps, lambda i, x: add("tail", first + i * tile.rows, x), sum_XY)
        at = shares.at[number, head, number_of_path, whole.channel_X[:, None], whole.channel_X[None, :]]
        store(at, sum_XY, block_mask(whole.there_X, whole.there_X, sum_XY.shape))

    # Paths last, so that those which read the same tokens share an L2 cache: see `launch_by_head`.
    grid = layout.batch * num_runs, layout.heads, len(paths)
    shape = (layout.batch * num_runs, layout.heads, len(paths), width, width)
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    (shares,) = launch(kernel, tuple(arrays.values()), [result], tile, grid=grid, name="cca_grad_kernel")
    return shares.reshape(shape[0], -1)
