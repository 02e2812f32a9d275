"""`decode_attention` in Pallas for Triton: the cache is dealt out among programs.

There is one query a sequence, so that the work is to read the cache once. A program owns the query
heads of one key head and an even share of the blocks of slots that hold something to see. The shares'
results are put together by their logsumexp.

Letters as in the package; Y shares, G query heads of a key head, J slots of a block.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, from_start, launch, load, store
from pallas_kernels.blocks import BLIND, HIDDEN, KernelSettings, check_counts, padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(KernelSettings):
    """Settings of the kernel.

    Attributes:
      slots: of a block.
      shares: programs among which the cache of a key head of a sequence is dealt out.
    """

    slots: int = 64
    shares: int = 32


def check(width: int, itemsize: int, blocks: Blocks) -> None:
    """Refuses settings that cannot be compiled or do not fit local memory.

    Raises:
      ValueError: with what is wrong and what would be right.
    """
    # The pipeline keeps blocks of keys and of values ahead of the loop; without one, a block is there
    # while it changes its layout.
    held = blocks.slots * max(1, 2 * (blocks.num_stages - 1))
    blocks.check("decode_attention", "slots", lds_bytes=held * padded(width) * itemsize)
    check_counts("decode_attention", {"shares": blocks.shares})


def forward(
    q_BNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    lengths_B: jax.Array,
    first_B: jax.Array,
    window: jax.Array,
    blocks: Blocks,
) -> tuple[jax.Array, jax.Array]:
    """Each share's output [B, Y, N, H] and logsumexp [B, Y, N], in float32."""
    batch, heads, width = q_BNH.shape
    num_slots, group = k_BSKH.shape[1], heads // k_BSKH.shape[2]
    spans_B2 = _visible_slots(lengths_B, first_B, window, num_slots)
    rows, channels = padded(group), padded(width)
    limits_B4 = jnp.stack([lengths_B, jnp.maximum(first_B, lengths_B - window), *spans_B2.T], axis=1)

    def kernel(q, k, v, limits, out, logsumexp):
        share, key_head, sequence = (pl.program_id(axis) for axis in range(3))
        length, oldest, begin, end = (limits[sequence, sequence * 0 + i] for i in range(4))
        first_block = begin // blocks.slots
        num_blocks = (end + blocks.slots - 1) // blocks.slots - first_block
        each = (num_blocks + blocks.shares - 1) // blocks.shares
        start = jnp.minimum(share * each, num_blocks)
        stop = jnp.minimum(start + each, num_blocks)
        is_row, is_channel = jnp.arange(rows) < group, jnp.arange(channels) < width
        here = pl.ds(key_head * group, rows), from_start(channels, key_head)
        is_query = is_row[:, None] & is_channel[None, :]
        q_GH = load(q.at[(sequence, *here)], is_query)

        def step(i, carry):
            sum_GH, top_G, total_G = carry
            slot = (first_block + i) * blocks.slots
            slot_J = slot + jnp.arange(blocks.slots)
            is_there = (slot_J < num_slots)[:, None] & is_channel[None, :]
            at = sequence, pl.ds(slot, blocks.slots), key_head, from_start(channels, slot)
            k_JH, v_JH = (load(x.at[at], is_there) for x in (k, v))
            scores_GJ = dot(q_GH, k_JH.T) * width**-0.5
            token_J = _token(slot_J, length, num_slots)
            is_seen_J = (token_J >= oldest) & (token_J >= 0) & (slot_J < num_slots)
            scores_GJ = jnp.where(is_seen_J[None, :], scores_GJ, HIDDEN)
            new_top_G = jnp.maximum(top_G, jnp.max(scores_GJ, axis=1))
            exp_GJ = jnp.exp(scores_GJ - new_top_G[:, None])
            shrink_G = jnp.exp(top_G - new_top_G)
            sum_GH = sum_GH * shrink_G[:, None] + dot(exp_GJ.astype(v_JH.dtype), v_JH)
            return sum_GH, new_top_G, total_G * shrink_G + jnp.sum(exp_GJ, axis=1)

        zeros_G = jnp.zeros((rows,), jnp.float32)
        carry = jnp.zeros((rows, channels), jnp.float32), zeros_G + BLIND, zeros_G
        sum_GH, top_G, total_G = lax.fori_loop(start, stop, step, carry)
        out_GH = sum_GH / jnp.where(total_G > 0, total_G, 1)[:, None]
        store(out.at[(sequence, share, *here)], out_GH, is_query)
        logsumexp_G = jnp.where(total_G > 0, top_G + jnp.log(total_G), -jnp.inf)
        store(logsumexp.at[sequence, share, here[0]], logsumexp_G, is_row)

    grid = blocks.shares, heads // group, batch
    operands = q_BNH, k_BSKH, v_BSKH, limits_B4
    shapes = (batch, blocks.shares, heads, width), (batch, blocks.shares, heads)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    out_BYNH, logsumexp_BYN = launch(kernel, operands, results, blocks, grid=grid, name="decode_attention")
    return out_BYNH, logsumexp_BYN


def _visible_slots(lengths_B: jax.Array, first_B: jax.Array, window: jax.Array, num_slots: int) -> jax.Array:
    """Begin and end of the slots that can hold a visible token, [B, 2]: all, once the ring has wrapped."""
    has_wrapped_B = lengths_B > num_slots
    begin_B = jnp.clip(jnp.maximum(first_B, lengths_B - window), 0, num_slots)
    end_B = jnp.clip(lengths_B, 0, num_slots)
    begin_B = jnp.where(has_wrapped_B, 0, jnp.minimum(begin_B, end_B))
    return jnp.stack([begin_B, end_B], axis=1)


def _token(slot_J: jax.Array, length: jax.Array, num_slots: int) -> jax.Array:
    """Number of the token in each slot: the newest that a ring of this many slots puts there."""
    last = length - 1
    round_ = jnp.maximum(last, 0) // num_slots
    token_J = round_ * num_slots + slot_J
    return jnp.where(token_J > last, token_J - num_slots, token_J)
