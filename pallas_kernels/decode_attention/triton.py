"""`decode_attention` in Pallas for Triton: the cache is split over programs ("split-K").

There is one query per sequence, so that the work is to read the cache once. A program owns the query heads of
one key head and an equal share of the blocks of slots with visible tokens. The results of the shares are
combined by their logsumexp. The online softmax is that of FlashAttention (arXiv 2205.14135, section 3.1).

Letters are those of the package; Y counts shares, G query heads of a key head, J slots of a block.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import dot, from_start, launch, load, store
from pallas_kernels.blocks import EMPTY_MAX, MASKED_SCORE, KernelSettings, check_counts, padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(KernelSettings):
    """Settings of the kernel.

    Attributes:
      slots: slots of a block.
      shares: number of programs that share the cache of one key head of one sequence.
    """

    slots: int = 64
    shares: int = 32


def check(width: int, itemsize: int, blocks: Blocks) -> None:
    """Checks that settings can be compiled and fit local memory.

    Args:
      width: channels of a head.
      itemsize: bytes of an entry of the operands.
      blocks: block sizes of the kernel.

    Raises:
      ArgumentError: with the wrong setting and the values that are accepted.
    """
    # The pipeline keeps blocks of keys and values that it reads ahead in local memory. Without a pipeline, a
    # block is there while Triton converts its layout.
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
    """Returns the output [B, Y, N, H] and the logsumexp [B, Y, N] of each share, float32."""
    batch, heads, width = q_BNH.shape
    num_slots, group = k_BSKH.shape[1], heads // k_BSKH.shape[2]
    spans_B2 = _visible_slots(lengths_B, first_B, window, num_slots)
    # Four heads fill a quarter of a tile of matrix instructions. That costs no time: reading the cache does.
    rows, channels = padded(group), padded(width)
    limits_B4 = jnp.stack([lengths_B, jnp.maximum(first_B, lengths_B - window), *spans_B2.T], axis=1)

    def kernel(q, k, v, limits, out, logsumexp):
        share, key_head, sequence = (pl.program_id(axis) for axis in range(3))
        # The index 0 is computed so that it is not a constant, for the reason in `from_start`.
        length, oldest, begin, end = (limits[sequence, sequence * 0 + i] for i in range(4))
        first_block = begin // blocks.slots
        num_blocks = (end + blocks.slots - 1) // blocks.slots - first_block
        # Blocks in use are shared, not the whole cache: a short sequence in a long cache occupies all
        # programs.
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
            is_valid = (slot_J < num_slots)[:, None] & is_channel[None, :]
            at = sequence, pl.ds(slot, blocks.slots), key_head, from_start(channels, slot)
            k_JH, v_JH = (load(x.at[at], is_valid) for x in (k, v))
            scores_GJ = dot(q_GH, k_JH.T) * width**-0.5
            token_J = _token(slot_J, length, num_slots)
            is_visible_J = (token_J >= oldest) & (token_J >= 0) & (slot_J < num_slots)
            scores_GJ = jnp.where(is_visible_J[None, :], scores_GJ, MASKED_SCORE)
            new_top_G = jnp.maximum(top_G, jnp.max(scores_GJ, axis=1))
            exp_GJ = jnp.exp(scores_GJ - new_top_G[:, None])
            shrink_G = jnp.exp(top_G - new_top_G)
            sum_GH = sum_GH * shrink_G[:, None] + dot(exp_GJ.astype(v_JH.dtype), v_JH)
            return sum_GH, new_top_G, total_G * shrink_G + jnp.sum(exp_GJ, axis=1)

        zeros_G = jnp.zeros((rows,), jnp.float32)
        carry = jnp.zeros((rows, channels), jnp.float32), zeros_G + EMPTY_MAX, zeros_G
        sum_GH, top_G, total_G = lax.fori_loop(start, stop, step, carry)
        # A program without visible slots stores zeros and minus infinity, to which `combine` gives no weight.
        out_GH = sum_GH / jnp.where(total_G > 0, total_G, 1)[:, None]
        store(out.at[(sequence, share, *here)], out_GH, is_query)
        logsumexp_G = jnp.where(total_G > 0, top_G + jnp.log(total_G), -jnp.inf)
        store(logsumexp.at[sequence, share, here[0]], logsumexp_G, is_row)

    grid = blocks.shares, heads // group, batch
    operands = q_BNH, k_BSKH, v_BSKH, limits_B4
    # Float32, because `combine` adds the results of the shares before they are rounded.
    shapes = (batch, blocks.shares, heads, width), (batch, blocks.shares, heads)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    out_BYNH, logsumexp_BYN = launch(kernel, operands, results, blocks, grid=grid, name="decode_attention")
    return out_BYNH, logsumexp_BYN


def _visible_slots(lengths_B: jax.Array, first_B: jax.Array, window: jax.Array, num_slots: int) -> jax.Array:
    """Returns begin and end of the slots that may have a visible token, [B, 2]: all once the ring wrapped."""
    # In a ring that has wrapped, the visible tokens may be at both ends, which no single span describes.
    has_wrapped_B = lengths_B > num_slots
    begin_B = jnp.clip(jnp.maximum(first_B, lengths_B - window), 0, num_slots)
    end_B = jnp.clip(lengths_B, 0, num_slots)
    begin_B = jnp.where(has_wrapped_B, 0, jnp.minimum(begin_B, end_B))
    return jnp.stack([begin_B, end_B], axis=1)


def _token(slot_J: jax.Array, length: jax.Array, num_slots: int) -> jax.Array:
    """Returns the index of the token in each slot: the newest that a ring buffer writes there."""
    # This is -1 without tokens: all slots then get negative numbers, which are not visible.
    last = length - 1
    round_ = jnp.maximum(last, 0) // num_slots
    token_J = round_ * num_slots + slot_J
    # A slot that this round of the ring has not reached yet holds a token of the previous round.
    return jnp.where(token_J > last, token_J - num_slots, token_J)
