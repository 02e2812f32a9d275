"""Samples tokens from logits: temperature, top-k, nucleus (top-p), all as data of one compiled program.

Letters: B batch, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.pytree import pytree

_ONE_AS_BITS, _INFINITY_AS_BITS = 0x3F80_0000, 0x7F80_0000
"""Bits of the float32 values 1 and infinity. Non-negative floats are ordered as their bits are."""


@pytree
class RowSampling:
    """Sampling parameters of each row as arrays, so that one compiled program serves all settings."""

    seed_B: UInt[Array, " B"]
    num_generated_B: Int[Array, " B"]
    """Number of tokens generated so far; it selects the random key of the next one."""
    stream_B: Int[Array, " B"]
    """Index of the row's random stream among rows of one seed; 0 for a row with its own seed."""
    temperature_B: Float[Array, " B"]
    """0 selects the most likely token."""
    top_k_B: Int[Array, " B"]
    """V or above disables the filter."""
    top_p_B: Float[Array, " B"]
    """1 disables the filter."""
    wants_top: Bool[Array, ""]
    """Whether any row reports its most likely tokens."""


def row_sampling(
    params: Sequence[SamplingParams],
    vocab_size: int,
    *,
    num_generated: Sequence[int] | None = None,
    streams: Sequence[int] | None = None,
) -> RowSampling:
    """Returns the parameters of rows as arrays.

    Args:
      params: parameters of each row.
      vocab_size: V.
      num_generated: number of tokens that each row has generated; None for 0.
      streams: random stream of each row; None for 0.
    """
    zeros = [0] * len(params)

    def column(values: Any, dtype: Any) -> jax.Array:
        return jnp.asarray(np.array(values, dtype))

    return RowSampling(
        seed_B=column([each.seed for each in params], np.uint32),
        num_generated_B=column(zeros if num_generated is None else num_generated, np.int32),
        stream_B=column(zeros if streams is None else streams, np.int32),
        temperature_B=column([each.temperature for each in params], np.float32),
        # top_k and top_p have neutral values, so that "no filter" needs no program.
        top_k_B=column([min(each.top_k or vocab_size, vocab_size) for each in params], np.int32),
        top_p_B=column([each.top_p or 1 for each in params], np.float32),
        wants_top=column(any(each.num_top_logprobs for each in params), np.bool_),
    )


def sample(logits_BV: Float[Array, "B V"], rows: RowSampling) -> Int[Array, " B"]:
    """Samples the next token of each row.

    A row's draw depends on its seed, its stream, its number of tokens and its logits alone: not on the other
    rows of the batch, and not on how many tokens one call generates.

    Args:
      logits_BV: logits of the next token.
      rows: sampling parameters.

    Returns:
      Token ids, int32.
    """
    # Greedy rows and sampling rows can share a batch, so the argmax is always computed; it is one pass over
    # the logits.
    greedy_B = lax.platform_dependent(logits_BV, cpu=argmax_of_few, default=_argmax)

    def draw(*, is_filtered: bool) -> jax.Array:
        key_B = jax.vmap(_key)(rows.seed_B, rows.num_generated_B, rows.stream_B)
        scaled_BV = scaled_logits(logits_BV, rows, is_filtered=is_filtered)
        return jax.vmap(jax.random.categorical)(key_B, scaled_BV).astype(jnp.int32)

    # The filters read all logits dozens of times: run them only when some row wants one.
    has_filter = jnp.any(rows.top_k_B < logits_BV.shape[1]) | jnp.any(rows.top_p_B < 1)
    kind = jnp.where(jnp.any(rows.temperature_B > 0), 1 + has_filter, 0)
    branches = [lambda: greedy_B, lambda: draw(is_filtered=False), lambda: draw(is_filtered=True)]
    # A batch may have greedy rows next to rows that sample.
    return jnp.where(rows.temperature_B > 0, lax.switch(kind, branches), greedy_B)


def _argmax(logits_BV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def argmax_of_few(logits_BV: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Returns the argmax of each row by two passes that XLA vectorizes on a CPU.

    It doesn't vectorize the single pass of `jnp.argmax`, which took 377 us for 8 rows of 8,192 and 4.9 ms for
    8 rows of 262,272; this takes 148 us and 1.4 ms. For 512 rows it is not faster (2 cores of an AMD EPYC).
    As with `jnp.argmax`, the first of equal logits counts, and the first NaN before all others.

    Args:
      logits_BV: logits.
    """
    vocab_size = logits_BV.shape[1]
    index_V = jnp.arange(vocab_size, dtype=jnp.int32)
    is_top_BV = logits_BV == logits_BV.max(axis=-1, keepdims=True)
    place_BV = jnp.where(is_top_BV, index_V, vocab_size)
    # Negative numbers precede all indices. The maximum above may or may not ignore NaN.
    first_B = jnp.where(jnp.isnan(logits_BV), index_V - vocab_size, place_BV).min(axis=-1)
    return jnp.where(first_B < 0, first_B + vocab_size, first_B)


def _key(seed: jax.Array, num_generated: jax.Array, stream: jax.Array) -> jax.Array:
    # The key is folded from the token's index rather than split along the way, so that the same token gets
    # the same key whether tokens come one at a time or a thousand per call.
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), num_generated), stream)


def scaled_logits(
    logits_BV: Float[Array, "B V"], rows: RowSampling, *, is_filtered: bool
) -> Float[Array, "B V"]:
    """Returns logits divided by the temperature; minus infinity where a filter removes a token.

    Args:
      logits_BV: logits of the next token.
      rows: sampling parameters.
      is_filtered: whether any row has a filter.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    # Shift the maximum to 0 first: a tiny temperature then gives -inf for the other tokens, never NaN.
    logits_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
    if is_filtered:
        logits_BV = jnp.where(top_k_mask(logits_BV, rows.top_k_B), logits_BV, -jnp.inf)
    logits_BV = logits_BV / jnp.maximum(rows.temperature_B[:, None], jnp.finfo(jnp.float32).tiny)
    if is_filtered:
        # A probability of 1 may be reached before the last tokens, which rounding loses; 2 never is.
        top_p_B = jnp.where(rows.top_p_B >= 1, 2, rows.top_p_B)
        logits_BV = jnp.where(nucleus(jax.nn.softmax(logits_BV, axis=-1), top_p_B), logits_BV, -jnp.inf)
    return logits_BV


def top_k_mask(logits_BV: Float[Array, "B V"], top_k_B: Int[Array, " B"]) -> Bool[Array, "B V"]:
    """Selects the `top_k_B` largest logits of each row; of equal ones the first.

    It bisects, as `nucleus` does, so that the number may be traced.

    Args:
      logits_BV: logits, none above 0.
      top_k_B: number of tokens to keep.
    """
    top_k_B = jnp.minimum(top_k_B, logits_BV.shape[1])
    bits_BV = lax.bitcast_convert_type(jnp.abs(logits_BV.astype(jnp.float32)), jnp.int32)  # distance below 0
    last_B = _smallest_bound(lambda bits_B1: bits_BV <= bits_B1, top_k_B, _INFINITY_AS_BITS)
    # Logits equal to the k-th largest may be more than fit: of these keep the first ones, as `lax.top_k`
    # does.
    is_above_BV, is_last_BV = bits_BV < last_B[:, None], bits_BV == last_B[:, None]
    num_tied_B = top_k_B - is_above_BV.sum(axis=-1, dtype=jnp.int32)
    index_V = jnp.arange(logits_BV.shape[1])
    end_B = _smallest_bound(
        lambda end_B1: is_last_BV & (index_V <= end_B1), num_tied_B, logits_BV.shape[1] - 1
    )
    return is_above_BV | (is_last_BV & (index_V <= end_B[:, None]))


def _smallest_bound(
    selects: Callable[[jax.Array], jax.Array], number_B: jax.Array, largest: int
) -> Int[Array, " B"]:
    """Returns the smallest integer up to `largest` with which `selects` selects `number_B` of a row."""

    def halve(_, bounds):
        too_few_B, enough_B = bounds
        # Bisect without the sum of the bounds, which would overflow int32 for the bits of infinity.
        middle_B = too_few_B + (enough_B - too_few_B) // 2
        is_enough_B = selects(middle_B[:, None]).sum(axis=-1, dtype=jnp.int32) >= number_B
        return jnp.where(is_enough_B, too_few_B, middle_B), jnp.where(is_enough_B, middle_B, enough_B)

    # The lower bound never selects enough, and the smallest integer that may is 0.
    bounds = jnp.full_like(number_B, -1), jnp.full_like(number_B, largest)
    return lax.fori_loop(0, (largest + 1).bit_length(), halve, bounds)[1]


def nucleus(probs_BV: Float[Array, "B V"], top_p: float | Float[Array, " B"]) -> Bool[Array, "B V"]:
    """Selects the smallest set of most likely tokens that reaches `top_p`: [Nucleus] section 3.1.

    The most likely token is always selected, and so are tokens exactly as likely as the last selected one.
    """
    # Bisect the bits of the smallest probability that stays, which is exact after 30 steps. On a CPU that is
    # 25 times faster than sorting a vocabulary of 262,272 tokens.
    bits_BV = lax.bitcast_convert_type(probs_BV.astype(jnp.float32), jnp.int32)

    def halve(_, bounds):
        enough_B, too_much_B = bounds
        middle_B = (enough_B + too_much_B) // 2
        is_enough_B = jnp.sum(jnp.where(bits_BV >= middle_B[:, None], probs_BV, 0), axis=-1) >= top_p
        return jnp.where(is_enough_B, middle_B, enough_B), jnp.where(is_enough_B, too_much_B, middle_B)

    bounds = (jnp.zeros_like(bits_BV[:, 0]), jnp.full_like(bits_BV[:, 0], _ONE_AS_BITS + 1))
    smallest_B, _ = lax.fori_loop(0, _ONE_AS_BITS.bit_length(), halve, bounds)
    return bits_BV >= smallest_B[:, None]
