"""The backward pass of `cca` in Pallas for Triton.

Only the arguments are kept from the forward pass. The first kernel recomputes the heads and turns the
gradients of queries and keys into gradients of the second convolution's result ("mixed"). It stores them,
because the next kernels read them at other tokens: the latent of a token contributes to the W tokens after
it. Another kernel sums products over tokens for the joined kernel (`joined.py`), from whose gradient those of
both convolutions follow.

Letters are those of the package and of `rows.py`; R counts the partial sums of a sum.
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
from pallas_kernels.cca.reference import MIN_NORM, CcaWeights
from pallas_kernels.cca.rows import TokenBlock, both, matrix, over_paths
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
    """Returns the gradients of the latent, of the tail (None if there is none) and of the weights.

    Args:
      given: operands of the forward pass.
      weights: weights of the forward pass.
      grad_q_BTX: gradient of the queries, [B, T, N*H].
      grad_k_BTY: gradient of the keys, [B, T, K*H].
      blocks: block sizes of the kernels.
    """
    grad_mixed_BTC, bias_RC, temperature_RK = grad_mixed(given, grad_q_BTX, grad_k_BTY, blocks.grad_mixed)
    given = given.with_array("grad_mixed", grad_mixed_BTC)
    # Each kernel writes partial sums, which are added in a fixed order instead of with atomics.
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
    """Computes the gradient of the second convolution's result, [B, T, C], in the latent's dtype.

    Returns it with partial sums of the gradients of the joined bias, [R, C], and of the temperature, [R, K].
    """
    layout = given.layout
    num_shares = layout.batch * pl.cdiv(layout.time, tile.rows)

    def kernel(rows, head, share, grad, bias_shares, temperature_shares):
        is_key, of_result = place_of_head(layout, head)
        pieces = [piece.shifted(of_result * layout.width) for piece in layout.pieces]
        mixed = mixed_with_means(rows, head, tile.contracted)
        # A choice between two loaded values would read both arrays; a condition reads one of them.
        towards = lax.cond(
            is_key,
            lambda: [rows.load("grad_k", piece) for piece in pieces],
            lambda: [rows.load("grad_q", piece) for piece in pieces],
        )
        towards = rotate([x.astype(jnp.float32) for x in towards], rotation_of(rows, back=True))
        scale_I1, squared_I1 = scale_of(layout, mixed)
        along = [jnp.sum(a * b, axis=1) for a, b in zip(towards, mixed, strict=True)]
        # The length of a normalized vector is fixed: the part of the gradient along the vector is removed.
        along_I1 = functools.reduce(jnp.add, along)[:, None] * scale_I1

        @pl.when(is_key)
        def _():
            # Before the rotation a key is temperature * scale * mixed: the sum of its gradient times the last
            # two is that of the temperature. `towards` was rotated back.
            temperature_shares[share, of_result] = jnp.sum(along_I1)

        # A vector below the minimum length was scaled by a constant, so that nothing is removed.
        part_I1 = jnp.where(squared_I1 > MIN_NORM**2, along_I1 * scale_I1 / layout.width, 0)
        factor_I1 = scale_I1 * temperature_of(rows, head)
        for piece, towards_IX, mixed_IX in zip(layout.pieces, towards, mixed, strict=True):
            grad_IX = factor_I1 * (towards_IX - mixed_IX * part_I1)
            columns = piece.shifted(head * layout.width)
            rows.store(grad, columns, grad_IX)
            # Tokens after the end of the chunk add nothing: `towards` reads as zeros there.
            store(bias_shares.at[share, columns.channel_X], jnp.sum(grad_IX, axis=0), columns.valid_X)

    given = given.with_array("grad_q", grad_q_BTX).with_array("grad_k", grad_k_BTY)
    results = [
        _like_latent(given),
        jax.ShapeDtypeStruct((num_shares, layout.channels), jnp.float32),
        jax.ShapeDtypeStruct((num_shares, layout.key_heads), jnp.float32),
    ]
    grad_BTC, bias_RC, temperature_RK = launch_by_head(kernel, given, results, tile, "cca_grad_mixed")
    return grad_BTC, bias_RC, temperature_RK


def _like_latent(given: Operands) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the first C channels of the latent."""
    layout = given.layout
    shape = (layout.batch, layout.time, layout.channels)
    return jax.ShapeDtypeStruct(shape, given.arrays["latent"].dtype)


def grad_latent(given: Operands, tile: Tile) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of the latent and of the tail.

    The tail contributes to the first tokens; therefore the first block starts at the tail's first token.
    """
    layout = given.layout
    num_blocks = pl.cdiv(layout.time + layout.before, tile.rows)
    tail_BWC = given.arrays.get("tail")
    arrays = given.some("grad_mixed", "kernel", "segments")

    def kernel(*references):
        # Without a tail there is one result less.
        named = dict(zip(arrays, references, strict=False))
        grad, *grad_tail = references[len(named) :]
        block, head, row = (pl.program_id(axis) for axis in range(3))
        # The first block starts before the chunk, and the last one may end after it.
        inside = not layout.before and layout.time % tile.rows == 0
        rows = TokenBlock(named, layout, row, block * tile.rows - layout.before, tile.rows, inside=inside)
        whole = layout.whole
        # A key head is part of the means of all its query heads, a query head of that of its key head.
        mean_IX = plus_means(0.0, rows, "grad_mixed", head, whole, of_query=1 / layout.group)
        sum_IX = _through_convolutions(rows, mean_IX, head, tile.contracted)
        columns = whole.shifted(head * layout.width)
        # Latents of padding count as zeros in the forward pass, so that their gradient is zero.
        valid_I = rows.not_padding()
        rows.store(grad, columns, sum_IX if valid_I is None else jnp.where(valid_I[:, None], sum_IX, 0))
        if not grad_tail:
            return

        @pl.when(rows.first < 0)
        def _():  # tokens of the tail are never padding
            rows.store(grad_tail[0], columns, sum_IX, is_tail=True)

    results = [_like_latent(given)]
    if tail_BWC is not None:
        results.append(jax.ShapeDtypeStruct(tail_BWC.shape, tail_BWC.dtype))
    grid = num_blocks, layout.heads, layout.batch
    grads = launch(kernel, tuple(arrays.values()), results, tile, grid=grid, name="cca_grad_latent")
    return grads[0], grads[1] if grads[1:] else None


def _through_convolutions(rows: TokenBlock, sum_IX: jax.Array, head: jax.Array, contracted: int) -> jax.Array:
    """Adds the gradients that reach a head's latents from the results of these and of later tokens."""
    layout = rows.layout

    def add(sum_IX, step):
        columns = step.chunk.shifted(head * layout.width)
        # The token that reads this latent along the path is `far` tokens later.
        grad_IY = rows.load("grad_mixed", columns, -step.far, only_I=step.seen_I)
        kernel_YX = matrix(rows.references["kernel"], (head, step.path), step.chunk, layout.whole)
        return sum_IX + dot(grad_IY, kernel_YX)

    # Distances are negated: from the latent, the token that reads it is ahead, as are those on the path.
    same = [rows.of_one_document(*(passed - path.far for passed in path.passed)) for path in layout.paths]
    return over_paths(layout, contracted, same, add, sum_IX)


def grad_kernel(given: Operands, tile: Tile, run: int) -> jax.Array:
    """Returns partial sums of the joined kernel's gradient, [R, A*Z*H*H]."""
    layout = given.layout
    num_runs, width, paths = pl.cdiv(layout.time, run), layout.width, layout.paths
    arrays = given.some("latent", "tail", "grad_mixed", "segments")

    def kernel(*references):
        *inputs, shares = references
        named = dict(zip(arrays, inputs, strict=True))
        number, head, number_of_path = (pl.program_id(axis) for axis in range(3))
        row, first = number // num_runs, number % num_runs * run
        whole = layout.whole
        columns = whole.shifted(head * width)
        middle, far = distances(paths, number_of_path)

        def add(name, first, sum_XY):
            rows = TokenBlock(named, layout, row, first, tile.rows, inside=layout.time % run == 0)
            seen_I = rows.of_one_document(0, middle, far)
            # Tokens of the tail are never padding.
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
        store(at, sum_XY, block_mask(whole.valid_X, whole.valid_X, sum_XY.shape))

    # Paths are the last axis, so that programs that read the same tokens share an L2 cache
    # (`launch_by_head`).
    grid = layout.batch * num_runs, layout.heads, len(paths)
    shape = (layout.batch * num_runs, layout.heads, len(paths), width, width)
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    (shares,) = launch(kernel, tuple(arrays.values()), [result], tile, grid=grid, name="cca_grad_kernel")
    return shares.reshape(shape[0], -1)
