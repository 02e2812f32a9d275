"""`cca` in Pallas for Triton.

A program of the forward pass owns a block of tokens of one head. For the mean it reads latents of other
heads too, which other programs read at the same time: they come from a cache. The rotation takes two
halves of a head against each other, so that a head is computed in pieces: its columns in the product are
cut there.
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
from pallas_kernels.cca.reference import SHORTEST, CcaWeights
from pallas_kernels.cca.rows import MOST_PATHS, Columns, Layout, Rows, vector


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(KernelSettings):
    """Settings of one kernel.

    Attributes:
      rows: tokens of a block.
      contracted: channels that are multiplied in one step of a loop.
    """

    rows: int
    contracted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Settings of the kernels.

    Attributes:
      forward: queries and keys.
      grad_mixed: gradient of what both convolutions gave.
      grad_latent: gradient of what went into them.
      grad_kernel: gradient of the joined kernel; `contracted` is not used.
      run: tokens that a program of `grad_kernel` adds up, block by block.
    """

    forward: Tile
    grad_mixed: Tile
    grad_latent: Tile
    grad_kernel: Tile
    run: int


@dataclasses.dataclass(frozen=True)
class Operands:
    """What every kernel reads; its arrays by the names that they have in kernels, and the sizes."""

    arrays: dict[str, jax.Array]
    layout: Layout

    def with_array(self, name: str, array: jax.Array) -> "Operands":
        """These operands and one more array, which kernels find by its name."""
        return Operands(self.arrays | {name: array}, self.layout)

    def some(self, *names: str) -> dict[str, jax.Array]:
        """The arrays of these names, without those that are not there."""
        return {name: self.arrays[name] for name in names if name in self.arrays}


def operands(
    latent_BTC: jax.Array,
    tail_BWC: jax.Array,
    weights: CcaWeights,
    rotation: tuple[jax.Array, jax.Array],
    segments_BT: jax.Array | None,
) -> Operands:
    """Names all arrays, without those that are empty. Both convolutions are one, in the latent's dtype."""
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
    """Refuses settings that cannot be compiled or do not fit local memory, and more taps than a mask holds.

    Args:
      taps: of both convolutions.
      width: H.
      itemsize: bytes of an entry of the latent.
      blocks: settings.

    Raises:
      ValueError: with what is wrong and what would be right.
    """
    if len(paths(*taps)) > MOST_PATHS:
        raise ValueError(
            f"cca: with {taps[0]} and {taps[1]} taps there are {len(paths(*taps))} paths through both "
            f"convolutions; the kernels take {MOST_PATHS}"
        )
    channels = padded(width)
    for name in ("forward", "grad_mixed", "grad_latent", "grad_kernel"):
        tile = getattr(blocks, name)
        # Both sides of a product lie in local memory.
        entries = (tile.rows + channels) * tile.contracted * max(tile.num_stages - 1, 1)
        entries = 2 * tile.rows * channels if name == "grad_kernel" else entries
        tile.check("cca", "rows", "contracted", part=name, lds_bytes=entries * itemsize)
    if blocks.run < 1 or blocks.run % blocks.grad_kernel.rows:
        raise ValueError(f"cca: run is {blocks.run}; it must be a multiple of {blocks.grad_kernel.rows} rows")


def forward(given: Operands, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Queries [B, T, N*H] and keys [B, T, K*H], in the latent's dtype."""
    layout = given.layout

    def kernel(rows, head, share, q, k):
        mixed = mixed_with_means(rows, head, tile.contracted)
        # Before the rotation, which leaves lengths as they are.
        scale_I1 = scale_of(layout, mixed)[0] * temperature_of(rows, head)
        turned = rotate([x * scale_I1 for x in mixed], rotation_of(rows))
        is_key, of_result = place_of_head(layout, head)

        def write(reference):
            for piece, turned_IX in zip(layout.pieces, turned, strict=True):
                rows.store(reference, piece.behind(of_result * layout.width), turned_IX)

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
    """Runs `kernel(rows, head, number, *results)` for each block of tokens and each head.

    The number is the block's among those of all sequences.
    """
    layout = given.layout
    num_blocks = pl.cdiv(layout.time, tile.rows)

    def start(*references):
        named = dict(zip(given.arrays, references, strict=False))
        block, head, row = (pl.program_id(axis) for axis in range(3))
        inside = layout.time % tile.rows == 0
        rows = Rows(named, layout, row, block * tile.rows, tile.rows, inside=inside)
        kernel(rows, head, row * num_blocks + block, *references[len(named) :])

    # Programs go to the XCDs in turn, each of which has an L2 cache ([CK-XCD]): heads of one block, which
    # read each other's latents, to the same one where the number of blocks is a multiple of those 8.
    grid = num_blocks, layout.heads, layout.batch
    return launch(start, tuple(given.arrays.values()), results, tile, grid=grid, name=name)


def mixed_with_means(rows: Rows, head: jax.Array, contracted: int) -> list[jax.Array]:
    """The convolutions' result plus the mean of queries and keys, in pieces.

    A query head takes the mean of itself and its key head, a key head that of itself and the mean of its
    query heads: [CCA] section II-B.
    """
    layout = rows.layout
    there_I = rows.not_padding()

    def start(piece):
        bias_X = vector(rows.references["bias"], piece.behind(head * layout.width))
        return plus_means(
            bias_X[None, :], rows, "latent", head, piece, of_key=1 / layout.group, only_I=there_I
        )

    # Products are added to the means, not the other way round, so that both lie in the same registers.
    return rows.convolved([start(piece) for piece in layout.pieces], head, contracted)


def plus_means(
    sum_IX: Any,
    rows: Rows,
    name: str,
    head: jax.Array,
    columns: Columns,
    *,
    of_query: float = 1.0,
    of_key: float = 1.0,
    only_I: jax.Array | None = None,
) -> jax.Array:
    """Adds half of a head's channels, and of those of the heads it shares a mean with, times a factor.

    Args:
      sum_IX: to be added to.
      rows: tokens.
      name: of an array [B, T, C].
      head: whose.
      columns: of a head.
      of_query: factor for a query head, which shares with its key head.
      of_key: for a key head, which shares with its query heads.
      only_I: rows that count; None for all.
    """
    layout = rows.layout
    is_key, place = place_of_head(layout, head)
    first = jnp.where(is_key, place * layout.group, layout.query_heads + place // layout.group)
    # Triton takes a choice between two literals for one between truth values, hence the products.
    is_key = is_key.astype(jnp.int32)
    num_others, factor = 1 + is_key * (layout.group - 1), of_query + is_key * (of_key - of_query)

    def plus(sum_IX, head, factor):
        more_IX = rows.load(name, columns.behind(head * layout.width), only_I=only_I)
        return sum_IX + more_IX.astype(jnp.float32) * factor

    sum_IX, half = plus(sum_IX, head, 0.5), 0.5 * factor
    return lax.fori_loop(0, num_others, lambda i, sum_IX: plus(sum_IX, first + i, half), sum_IX)


def place_of_head(layout: Layout, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether it is a key head, and its number among those of its kind."""
    is_key = head >= layout.query_heads
    return is_key, head - is_key.astype(jnp.int32) * layout.query_heads


def temperature_of(rows: Rows, head: jax.Array) -> jax.Array:
    """What a head's channels are multiplied with: 1 for queries."""
    is_key, place = place_of_head(rows.layout, head)
    key = place * is_key.astype(jnp.int32)
    return jnp.where(is_key, rows.references["temperature"][key], 1.0)


def scale_of(layout: Layout, mixed: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """What makes a head's channels sqrt(H) long, [I, 1], and their squared length."""
    squared_I = sum(jnp.sum(x * x, axis=1) for x in mixed)
    assert isinstance(squared_I, jax.Array)
    inverse_I = lax.rsqrt(jnp.maximum(squared_I, SHORTEST**2))
    return (layout.width**0.5 * inverse_I)[:, None], squared_I[:, None]


def rotation_of(rows: Rows, *, back: bool = False) -> tuple[jax.Array, jax.Array] | None:
    """Cosines and sines of these tokens, or of the way back; None where nothing is rotated."""
    if not rows.layout.rotated:
        return None
    angles = rows.layout.angles
    # Channels that are not rotated stand behind those that are: they turn by nothing.
    cos_IX = rows.load("cos", angles, other=1.0).astype(jnp.float32)
    sin_IX = rows.load("sin", angles).astype(jnp.float32)
    return cos_IX, -sin_IX if back else sin_IX


def rotate(pieces: list[jax.Array], rotation: tuple[jax.Array, jax.Array] | None) -> list[jax.Array]:
    """Each channel of the first piece against the one at its place in the second."""
    if rotation is None:
        return pieces
    cos_IX, sin_IX = rotation
    first, second = pieces
    return [first * cos_IX - second * sin_IX, second * cos_IX + first * sin_IX]
