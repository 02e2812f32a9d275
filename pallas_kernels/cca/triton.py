"""`cca` in Pallas for Triton.

A program of the forward pass owns a block of tokens of one head. For the mean it also reads latents of other
heads, which other programs read at the same time, so that they come from a cache. The rotation combines two
halves of a head. Therefore a head is computed in two pieces, each a product with half of the columns.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import launch
from pallas_kernels.blocks import KernelSettings, padded
from pallas_kernels.cca.joined import join
from pallas_kernels.cca.paths import paths
from pallas_kernels.cca.reference import MIN_NORM, CcaWeights
from pallas_kernels.cca.rows import MAX_PATHS, Columns, Layout, TokenBlock, vector
from pallas_kernels.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(KernelSettings):
    """Settings of one kernel.

    Attributes:
      rows: tokens of a block.
      contracted: input channels of one product, the step of the loop over channels.
    """

    rows: int
    contracted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Settings of the kernels.

    Attributes:
      forward: settings of the kernel for queries and keys.
      grad_mixed: settings of the kernel for the gradient of the convolutions' result.
      grad_latent: settings of the kernel for the gradient of the latent.
      grad_kernel: settings of the kernel for the gradient of the joint matrices; `contracted` is not used.
      run: tokens that one program of `grad_kernel` adds up, block by block.
    """

    forward: Tile
    grad_mixed: Tile
    grad_latent: Tile
    grad_kernel: Tile
    run: int


@dataclasses.dataclass(frozen=True)
class Operands:
    """Inputs of the kernels: arrays by name, and the sizes of the call."""

    arrays: dict[str, jax.Array]
    layout: Layout

    def with_array(self, name: str, array: jax.Array) -> "Operands":
        """Returns these operands and one more array."""
        return Operands(self.arrays | {name: array}, self.layout)

    def some(self, *names: str) -> dict[str, jax.Array]:
        """Returns the arrays of these names that exist."""
        return {name: self.arrays[name] for name in names if name in self.arrays}


def operands(
    latent_BTC: jax.Array,
    tail_BWC: jax.Array,
    weights: CcaWeights,
    rotation: tuple[jax.Array, jax.Array],
    segments_BT: jax.Array | None,
) -> Operands:
    """Returns the kernels' inputs, without empty arrays and with both convolutions joined."""
    batch, time, _ = latent_BTC.shape
    heads, grouped_taps, width, _ = weights.grouped_kernel_AJHH.shape
    layout = Layout(
        batch=batch,
        time=time,
        heads=heads,
        key_heads=weights.temperature_K.shape[0],
        width=width,
        depthwise_taps=weights.depthwise_kernel_IC.shape[0],
        grouped_taps=grouped_taps,
        rotated=rotation[0].shape[2],
    )
    kernel_AZXH, bias_C = join(weights, layout, latent_BTC.dtype)
    arrays = {
        "latent": latent_BTC,
        "tail": tail_BWC,
        "kernel": kernel_AZXH,
        "bias": bias_C,
        "temperature": weights.temperature_K,
        "cos": rotation[0],
        "sin": rotation[1],
    }
    arrays = {name: array for name, array in arrays.items() if array.size}
    return Operands(arrays if segments_BT is None else arrays | {"segments": segments_BT}, layout)


def check(taps: tuple[int, int], width: int, itemsize: int, blocks: Blocks) -> None:
    """Checks that settings can be compiled and fit local memory, and that masks have a bit for each path.

    Args:
      taps: numbers of taps of both convolutions.
      width: channels of a head, H.
      itemsize: bytes of an entry of the latent.
      blocks: settings of the kernels.

    Raises:
      ArgumentError: with the wrong value and the values that are accepted.
    """
    if len(paths(*taps)) > MAX_PATHS:
        raise ArgumentError(
            f"cca: with {taps[0]} and {taps[1]} taps there are {len(paths(*taps))} paths through both "
            f'convolutions; the kernels support {MAX_PATHS}; use implementation="xla"'
        )
    channels = padded(width)
    for name in ("forward", "grad_mixed", "grad_latent", "grad_kernel"):
        tile = getattr(blocks, name)
        # Both operands of a product are in local memory, once for each stage of the pipeline.
        entries = (tile.rows + channels) * tile.contracted * max(tile.num_stages - 1, 1)
        # The gradient of the matrices contracts over tokens: its operands are two blocks of whole heads.
        entries = 2 * tile.rows * channels if name == "grad_kernel" else entries
        tile.check("cca", "rows", "contracted", part=name, lds_bytes=entries * itemsize)
    if blocks.run < 1 or blocks.run % blocks.grad_kernel.rows:
        raise ArgumentError(
            f"cca: run is {blocks.run}; it must be a multiple of {blocks.grad_kernel.rows} rows"
        )


def forward(given: Operands, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Returns queries [B, T, N*H] and keys [B, T, K*H], in the latent's dtype."""
    layout = given.layout

    def kernel(rows, head, share, q, k):
        mixed = mixed_with_means(rows, head, tile.contracted)
        # Scaled before the rotation, which does not change lengths.
        scale_I1 = scale_of(layout, mixed)[0] * temperature_of(rows, head)
        turned = rotate([x * scale_I1 for x in mixed], rotation_of(rows))
        is_key, of_result = place_of_head(layout, head)

        def write(reference):
            for piece, turned_IX in zip(layout.pieces, turned, strict=True):
                rows.store(reference, piece.shifted(of_result * layout.width), turned_IX)

        # Two masked stores would have the same effect, but every program would execute both.
        lax.cond(is_key, lambda: write(k), lambda: write(q))

    dtype = given.arrays["latent"].dtype
    results = [
        jax.ShapeDtypeStruct((layout.batch, layout.time, heads * layout.width), dtype)
        for heads in (layout.query_heads, layout.key_heads)
    ]
    q_BTX, k_BTY = launch_by_head(kernel, given, results, tile, "cca")
    return q_BTX, k_BTY


def launch_by_head(
    kernel: Callable[..., None], given: Operands, results: list[Any], tile: Tile, name: str
) -> tuple[jax.Array, ...]:
    """Launches `kernel(rows, head, number, *results)` for each block of tokens and each head.

    `number` is the index of the block among the blocks of all sequences.
    """
    layout = given.layout
    num_blocks = pl.cdiv(layout.time, tile.rows)

    def start(*references):
        # The references to the results come after those to the operands, so that the lengths differ.
        named = dict(zip(given.arrays, references, strict=False))
        block, head, row = (pl.program_id(axis) for axis in range(3))
        inside = layout.time % tile.rows == 0
        rows = TokenBlock(named, layout, row, block * tile.rows, tile.rows, inside=inside)
        kernel(rows, head, row * num_blocks + block, *references[len(named) :])

    # Programs are assigned to the 8 XCDs in turn, each of which has an L2 cache ([CK-XCD]). If the number of
    # blocks is a multiple of 8, the heads of one block, which read each other's latents, share an XCD.
    grid = num_blocks, layout.heads, layout.batch
    return launch(start, tuple(given.arrays.values()), results, tile, grid=grid, name=name)


def mixed_with_means(rows: TokenBlock, head: jax.Array, contracted: int) -> list[jax.Array]:
    """Returns the convolutions' result plus the mean of queries and keys, in pieces.

    For a query head it is the mean of itself and its key head, for a key head the mean of itself and the
    average of its query heads: [CCA] section II-B.
    """
    layout = rows.layout
    valid_I = rows.not_padding()

    def start(piece):
        bias_X = vector(rows.references["bias"], piece.shifted(head * layout.width))
        return plus_means(
            bias_X[None, :], rows, "latent", head, piece, of_key=1 / layout.group, only_I=valid_I
        )

    # The means are the initial value of the products' accumulator, so that both share registers.
    return rows.convolved([start(piece) for piece in layout.pieces], head, contracted)


def plus_means(
    sum_IX: Any,
    rows: TokenBlock,
    name: str,
    head: jax.Array,
    columns: Columns,
    *,
    of_query: float = 1.0,
    of_key: float = 1.0,
    only_I: jax.Array | None = None,
) -> jax.Array:
    """Adds half of a head's channels, and half of those of the heads that it shares a mean with.

    Args:
      sum_IX: running sum, [I, X].
      rows: block of tokens.
      name: name of the array [B, T, C].
      head: index of the head.
      columns: channels of the head.
      of_query: factor of the key head in the mean of a query head.
      of_key: factor of the query heads in the mean of a key head.
      only_I: mask of the rows to read, [I]; None for all.
    """
    layout = rows.layout
    is_key, place = place_of_head(layout, head)
    first = jnp.where(is_key, place * layout.group, layout.query_heads + place // layout.group)
    # Triton treats a choice between two literals as one between booleans; products avoid that.
    is_key = is_key.astype(jnp.int32)
    num_others, factor = 1 + is_key * (layout.group - 1), of_query + is_key * (of_key - of_query)

    def plus(sum_IX, head, factor):
        more_IX = rows.load(name, columns.shifted(head * layout.width), only_I=only_I)
        return sum_IX + more_IX.astype(jnp.float32) * factor

    sum_IX, half = plus(sum_IX, head, 0.5), 0.5 * factor
    return lax.fori_loop(0, num_others, lambda i, sum_IX: plus(sum_IX, first + i, half), sum_IX)


def place_of_head(layout: Layout, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether a head is a key head, and its index among the heads of its kind."""
    is_key = head >= layout.query_heads
    return is_key, head - is_key.astype(jnp.int32) * layout.query_heads


def temperature_of(rows: TokenBlock, head: jax.Array) -> jax.Array:
    """Returns the temperature of a key head; 1 for query heads."""
    is_key, place = place_of_head(rows.layout, head)
    # Query heads read entry 0, which exists, and do not use it.
    key = place * is_key.astype(jnp.int32)
    return jnp.where(is_key, rows.references["temperature"][key], 1.0)


def scale_of(layout: Layout, mixed: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the factors that scale a head to length sqrt(H), and its squared lengths, both [I, 1]."""
    squared_I = sum(jnp.sum(x * x, axis=1) for x in mixed)
    assert isinstance(squared_I, jax.Array)
    # The bound applies to the squared length, as in `normalize`, so that the gradient of zeros is finite.
    inverse_I = lax.rsqrt(jnp.maximum(squared_I, MIN_NORM**2))
    return (layout.width**0.5 * inverse_I)[:, None], squared_I[:, None]


def rotation_of(rows: TokenBlock, *, back: bool = False) -> tuple[jax.Array, jax.Array] | None:
    """Returns cosines and sines for these tokens, or of the inverse rotation; None without rotation."""
    if not rows.layout.rotated:
        return None
    angles = rows.layout.angles
    # Channels after the rotated ones are rotated by zero: cosine 1 and sine 0.
    cos_IX = rows.load("cos", angles, other=1.0).astype(jnp.float32)
    sin_IX = rows.load("sin", angles).astype(jnp.float32)
    return cos_IX, -sin_IX if back else sin_IX


def rotate(pieces: list[jax.Array], rotation: tuple[jax.Array, jax.Array] | None) -> list[jax.Array]:
    """Rotates each channel of the first piece with the channel of the same index in the second."""
    if rotation is None:
        return pieces
    cos_IX, sin_IX = rotation
    first, second = pieces
    return [first * cos_IX - second * sin_IX, second * cos_IX + first * sin_IX]
