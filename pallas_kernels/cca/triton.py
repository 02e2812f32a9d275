"""`cca` in Pallas for Triton.

A program of the forward pass owns a block of tokens of one key head and of its query heads, which
need each other's latents for the mean. The rotation takes two halves of a head against each other,
so that a head is computed in pieces: its columns in the product are cut there.
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
from pallas_kernels.cca.reference import SHORTEST, CcaWeights
from pallas_kernels.cca.rows import Layout, Rows


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
      grad_kernel: gradient of the second one's kernel; `contracted` is not used.
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


def operands(
    latent_BTC: jax.Array,
    tail_BWC: jax.Array,
    weights: CcaWeights,
    rotation: tuple[jax.Array, jax.Array],
    segments_BT: jax.Array | None,
) -> Operands:
    """Names all arrays, without those that are empty. The grouped kernel takes the latent's dtype."""
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
    arrays = {
        "latent": latent_BTC,
        "tail": tail_BWC,
        "depthwise_kernel": weights.depthwise_kernel_IC,
        "depthwise_bias": weights.depthwise_bias_C,
        "grouped_kernel": weights.grouped_kernel_AJHH.astype(latent_BTC.dtype),
        "grouped_bias": weights.grouped_bias_C,
        "temperature": weights.temperature_K,
        "cos": rotation[0],
        "sin": rotation[1],
    }
    arrays = {name: array for name, array in arrays.items() if array.size}
    return Operands(arrays if segments_BT is None else arrays | {"segments": segments_BT}, layout)


def check(width: int, itemsize: int, blocks: Blocks) -> None:
    """Refuses settings that cannot be compiled or do not fit local memory.

    Raises:
      ValueError: with what is wrong and what would be right.
    """
    channels = padded(width)
    for name in ("forward", "grad_mixed", "grad_latent", "grad_kernel"):
        tile = getattr(blocks, name)
        # Both sides of a product lie in local memory.
        entries = (tile.rows + channels) * tile.contracted
        entries = 2 * tile.rows * channels if name == "grad_kernel" else entries
        tile.check("cca", "rows", "contracted", part=name, lds_bytes=entries * itemsize)
    if blocks.run < 1 or blocks.run % blocks.grad_kernel.rows:
        raise ValueError(f"cca: run is {blocks.run}; it must be a multiple of {blocks.grad_kernel.rows} rows")


def forward(given: Operands, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Queries [B, T, N*H] and keys [B, T, K*H], in the latent's dtype."""
    layout = given.layout

    def kernel(rows, key, share, q, k):
        rotation = rotation_of(rows)
        temperature = rows.references["temperature"][key]

        def finish(head, mixed, *, is_key):
            out, first = (k, key * layout.width) if is_key else (q, head * layout.width)
            scale = scale_of(layout, mixed)[0] * (temperature if is_key else 1)
            for piece, turned in zip(
                layout.pieces, rotate([x * scale for x in mixed], rotation), strict=True
            ):
                rows.store(out, piece.behind(first), turned)

        for_heads(rows, key, tile.contracted, finish)

    dtype = given.arrays["latent"].dtype
    results = [
        jax.ShapeDtypeStruct((layout.batch, layout.time, heads * layout.width), dtype)
        for heads in (layout.query_heads, layout.key_heads)
    ]
    q_BTX, k_BTY = launch_by_key_head(kernel, given, results, tile, "cca")
    return q_BTX, k_BTY


def launch_by_key_head(
    kernel: Callable[..., None], given: Operands, results: list[Any], tile: Tile, name: str
) -> tuple[jax.Array, ...]:
    """Runs `kernel(rows, key head, number, *results)` for each block of tokens and each key head.

    The number is the block's among those of all sequences.
    """
    layout = given.layout
    num_blocks = pl.cdiv(layout.time, tile.rows)

    def start(*references):
        named = dict(zip(given.arrays, references, strict=False))
        key, block, row = (pl.program_id(axis) for axis in range(3))
        rows = Rows(named, layout, row, block * tile.rows + jnp.arange(tile.rows))
        kernel(rows, key, row * num_blocks + block, *references[len(named) :])

    grid = layout.key_heads, num_blocks, layout.batch
    return launch(start, tuple(given.arrays.values()), results, tile, grid=grid, name=name)


def for_heads(rows: Rows, key: jax.Array, contracted: int, finish: Callable[..., None]) -> None:
    """Calls `finish(head, mixed, is_key=)` with each of a key head's query heads, then with itself.

    `mixed` is the convolutions' result plus the mean of queries and keys, in pieces.
    """
    layout = rows.layout
    key_head = layout.query_heads + key

    def latent(head):
        return [rows.latent(0, piece.behind(head * layout.width)) for piece in layout.pieces]

    of_key = latent(key_head)

    def for_query(i, sums):
        head = key * layout.group + i
        own = latent(head)
        mixed = rows.mixed(head, contracted)
        finish(head, [x + (a + b) * 0.5 for x, a, b in zip(mixed, own, of_key, strict=True)], is_key=False)
        return [a + b for a, b in zip(sums, own, strict=True)]

    sums = lax.fori_loop(0, layout.group, for_query, [jnp.zeros_like(x) for x in of_key])
    mixed = rows.mixed(key_head, contracted)
    means = [(a * (1 / layout.group) + b) * 0.5 for a, b in zip(sums, of_key, strict=True)]
    finish(key_head, [x + mean for x, mean in zip(mixed, means, strict=True)], is_key=True)


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
    half = rows.layout.pieces[0]
    sin_IX = rows.load("sin", half)
    return rows.load("cos", half), -sin_IX if back else sin_IX


def rotate(pieces: list[jax.Array], rotation: tuple[jax.Array, jax.Array] | None) -> list[jax.Array]:
    """Channel i against channel i + O of a head."""
    if rotation is None:
        return pieces
    cos_IX, sin_IX = rotation
    first, second, *rest = pieces
    return [first * cos_IX - second * sin_IX, second * cos_IX + first * sin_IX, *rest]
