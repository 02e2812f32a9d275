"""The compiled functions of decoding: `prefill_chunk` reads prompts, `decode_steps` generates tokens.

Both the static batches of `generate` and the continuous batching of `Engine` call them. What differs is the
cache: rows of one length padded on the left, or rows that each have a length; on one device, or shared by the
devices of a context mesh. The functions read that from the cache.

Letters: B rows, T tokens of a chunk, V vocabulary, D model width, L layers, J top tokens, M decode steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.embedding import QuantizedTable
from pallas_kernels.product import QuantizedMatrix
from zaya_jax.inference.engine.cache_rows import rows_at, rows_of, with_rows, with_rows_at
from zaya_jax.inference.engine.sampling import RowSampling, sample
from zaya_jax.inference.engine.sampling_params import MAX_TOP_LOGPROBS
from zaya_jax.model.cache import Cache
from zaya_jax.model.weights import Weight, declare, map_weights
from zaya_jax.model.zaya import HiddenStates, Zaya, head, hidden_states
from zaya_jax.parallel.mesh import REPLICATED, SLOTS, context_mesh, on_each_device
from zaya_jax.platform.compiler import WIDE_VECTORS
from zaya_jax.pytree import pytree


@pytree
class PromptChunk:
    """A chunk of the prompts of B rows."""

    tokens_BT: Int[Array, "B T"]
    segments_BT: Int[Array, "B T"]
    """0 for padding, 1 for tokens. Padding is on the side that the cache says."""
    row_B: Int[Array, " B"]
    """Rows of the cache that the chunk belongs to: all rows in order with padding on the left. One out of
    range belongs to no prompt."""
    length: Int[Array, "*B"]
    """Tokens of the rows before the chunk, shaped as `Cache.length`; 0 resets the rows."""
    is_last: Bool[Array, ""]
    """Whether the prompts end with this chunk, so that their next tokens are sampled."""


@pytree
class DecodeRows:
    """Decode state of the first B rows of a cache."""

    newest_B: Int[Array, " B"]
    """Newest token of each row, which is not in the cache yet."""
    num_left_B: Int[Array, " B"]
    """Steps that each row still takes; a row with 0 is inactive."""
    end_tokens_BJ: Int[Array, "B J"]
    """End tokens of each row, as `pad_end_tokens` returns them."""


@pytree
class SampledTokens:
    """The next token of each row. After `decode_steps` each field has a leading axis M."""

    token_B: Int[Array, "*M B"]
    logprob_B: Float[Array, "*M B"]
    """Natural logarithm of the model's probability, before temperature and filters."""
    is_finite_B: Bool[Array, "*M B"]
    """Whether the logits are finite; otherwise the token is meaningless."""
    top_tokens_BJ: Int[Array, "*M B J"]
    """Most likely tokens first; zeros if no row reports them. J is 0 without details."""
    top_logprobs_BJ: Float[Array, "*M B J"]


@pytree
class DecodedSteps:
    """The results of M decode steps; meaningless where a row was inactive."""

    is_active_MB: Bool[Array, "*M B"]
    sampled: SampledTokens
    experts_LB: Int[Array, "*M L B"] | None
    """Router class of the token that the step read, which is the one before the sampled token."""
    probabilities_LB: Float[Array, "*M L B"] | None
    """Router probability of that class."""


def cast_matrices(model: Zaya, variables: Mapping) -> dict:
    """Casts matrices to the compute dtype once, instead of at every token. Quantized ones stay as they are.

    It is not compiled: a compiled function would copy what has that dtype already.
    """
    dtype = model.execution.dtype

    def cast(weight: Weight, value: Any) -> Any:
        is_dense = not isinstance(value, QuantizedMatrix | QuantizedTable)
        return value.astype(dtype) if weight.std is not None and is_dense else value

    params = map_weights(cast, declare(model.config), variables["params"])
    return {**variables, "params": params}


def pad_end_tokens(end_tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the end tokens of each row as int32 [B, J], padded with -1, which no token equals."""
    # The width is a shape of the compiled programs: a multiple of 8, so that a few more tokens change
    # nothing.
    width = -(-max(1, *map(len, end_tokens), 1) // 8) * 8
    return np.array([[*row, *[-1] * (width - len(row))] for row in end_tokens], np.int32)


@functools.partial(
    jax.jit,
    static_argnames=("model", "with_details"),
    donate_argnames="cache",
    compiler_options=WIDE_VECTORS,
)
def prefill_chunk(
    model: Zaya,
    variables: Mapping,
    cache: Cache,
    chunk: PromptChunk,
    sampling: RowSampling,
    *,
    with_details: bool = False,
) -> tuple[Cache, SampledTokens, Float[Array, "B V"]]:
    """Reads a chunk of prompts into rows of the cache; samples the next tokens after the last chunk.

    Args:
      model: the model.
      variables: its weights, on every device that shares the cache.
      cache: from `make_cache`; it is donated, and its memory is updated in place.
      chunk: tokens and their rows.
      sampling: sampling parameters of these rows.
      with_details: whether the results have room for top log-probabilities.

    Returns:
      The cache, the sampled tokens, and the logits that they were sampled from. Tokens and logits are zeros
      unless the chunk is the last one.
    """

    def run(cache: Cache, variables: Mapping, chunk: PromptChunk, sampling: RowSampling):
        cache, hidden = read_hidden(model, variables, cache, chunk)

        def sample_next() -> tuple[SampledTokens, jax.Array]:
            time = chunk.tokens_BT.shape[1]
            # Index of the last token of each row: T - 1 if padding is on the left, and the number of tokens
            # minus 1 if it is on the right.
            last_B = time - 1 - jnp.argmax(chunk.segments_BT[:, ::-1] != 0, axis=1)
            x_BD = jnp.take_along_axis(hidden.x_BTD, last_B[:, None, None], axis=1)[:, 0]
            return _sample(model, variables, x_BD, sampling, with_details=with_details)

        # Both branches of `lax.cond` must return arrays of the same shapes and dtypes.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sample_next))
        # The head is a product with the whole vocabulary: skip it for all but the last chunk of a prompt.
        return cache, *lax.cond(chunk.is_last, sample_next, lambda: zeros)

    return _on_cache_devices(run, cache, variables, chunk, sampling)


def read_hidden(
    model: Zaya, variables: Mapping, cache: Cache, chunk: PromptChunk
) -> tuple[Cache, HiddenStates]:
    """Reads a chunk into its rows; returns the cache and the hidden states of the chunk's tokens."""
    num_rows = len(chunk.tokens_BT)
    rows = rows_at(cache, chunk.row_B)
    is_new_B = jnp.broadcast_to(chunk.length == 0, (num_rows,))
    # The previous owner of a row left its state. Its keys and values need no reset: they are at or after the
    # new length, where attention does not look.
    state = jax.tree.map(
        lambda x: jnp.where(is_new_B.reshape(1, num_rows, *[1] * (x.ndim - 2)), 0, x), rows.state
    )
    rows = dataclasses.replace(rows, state=state, length=chunk.length)
    hidden = _forward(model, variables, chunk.tokens_BT, chunk.segments_BT, rows)
    return with_rows_at(cache, chunk.row_B, _cache(hidden)), hidden


@functools.partial(
    jax.jit,
    static_argnames=("model", "max_steps", "with_details"),
    donate_argnames="cache",
    compiler_options=WIDE_VECTORS,
)
def decode_steps(
    model: Zaya,
    variables: Mapping,
    cache: Cache,
    rows: DecodeRows,
    sampling: RowSampling,
    num_steps: Int[Array, ""] | int,
    *,
    max_steps: int,
    with_details: bool = False,
) -> tuple[Cache, DecodedSteps, Float[Array, "B V"]]:
    """Generates tokens in all active rows, until `num_steps` steps are done or no row is active.

    `rows` are the first rows of the cache. The cost of a step depends on their number, not on the size of
    the cache.

    Args:
      model: the model.
      variables: its weights, on every device that shares the cache.
      cache: from `prefill_chunk`; it is donated, and its memory is updated in place.
      rows: decode state.
      sampling: sampling parameters of these rows.
      num_steps: maximum number of steps, from 0 to `max_steps`.
      max_steps: M, the number of steps that the results have room for.
      with_details: whether to return routing and top log-probabilities.

    Returns:
      The cache, the results of each step, and the logits of the last step, from which `sample_masked` samples
      again where a grammar constrains a row.
    """

    def run(cache: Cache, variables: Mapping, rows: DecodeRows, sampling: RowSampling, num_steps: jax.Array):
        step = functools.partial(_decode_step, model, variables, with_details=with_details)
        start = rows_of(cache, 0, len(rows.newest_B)), rows, sampling
        _, shapes, logits_BV = jax.eval_shape(step, *start)
        # A while loop cannot append: allocate the results of all steps, and write each step at its index.
        results = jax.tree.map(lambda x: jnp.zeros((max_steps, *x.shape), x.dtype), shapes)
        # Only the last logits are kept: those of all steps would be gigabytes with a large vocabulary.
        last_BV = jnp.zeros(logits_BV.shape, logits_BV.dtype)

        def has_work(carry: tuple[Any, DecodedSteps, jax.Array, jax.Array]) -> jax.Array:
            (_, rows, _), _, _, num_done = carry
            # The number of steps is data and not a shape, so that streams of any chunk size share one
            # program.
            return (num_done < num_steps) & jnp.any(rows.num_left_B > 0)

        def advance(
            carry: tuple[Any, DecodedSteps, jax.Array, jax.Array],
        ) -> tuple[Any, DecodedSteps, jax.Array, jax.Array]:
            before, results, _, num_done = carry
            after, result, logits_BV = step(*before)
            results = jax.tree.map(lambda x, y: x.at[num_done].set(y), results, result)
            return after, results, logits_BV, num_done + 1

        carry = start, results, last_BV, jnp.zeros((), jnp.int32)
        (after, *_), results, last_BV, _ = lax.while_loop(has_work, advance, carry)
        return with_rows(cache, 0, after), results, last_BV

    return _on_cache_devices(run, cache, variables, rows, sampling, jnp.asarray(num_steps, jnp.int32))


def _decode_step(
    model: Zaya,
    variables: Mapping,
    cache: Cache,
    rows: DecodeRows,
    sampling: RowSampling,
    *,
    with_details: bool,
) -> tuple[tuple[Cache, DecodeRows, RowSampling], DecodedSteps, jax.Array]:
    """Reads the newest token of each row and samples the next one; returns also the logits."""
    is_active_B = rows.num_left_B > 0
    # With padding on the right an inactive row reads padding and stays as it is. Rows that are padded on the
    # left have one length: a row that has ended reads on with the others, and nobody looks at it.
    segments_B1 = is_active_B[:, None].astype(jnp.int32) if cache.padding == "right" else None
    hidden = _forward(model, variables, rows.newest_B[:, None], segments_B1, cache)
    sampled, logits_BV = _sample(model, variables, hidden.x_BTD[:, 0], sampling, with_details=with_details)
    router = hidden.router
    assert router.probabilities_LBT is not None, "the model returns router probabilities if it has a cache"
    routing = (
        (router.experts_LBT[:, :, 0], router.probabilities_LBT[:, :, 0]) if with_details else (None,) * 2
    )
    is_end_B = jnp.any(sampled.token_B[:, None] == rows.end_tokens_BJ, axis=-1)
    rows = DecodeRows(
        # A sampled token is read by the next step: keys and values of the newest token are never in the
        # cache yet.
        newest_B=sampled.token_B,
        num_left_B=jnp.where(is_end_B, 0, jnp.maximum(rows.num_left_B - 1, 0)),
        end_tokens_BJ=rows.end_tokens_BJ,
    )
    # Inactive rows keep their number, which selects the random key: a row that waits must not skip draws.
    num_generated_B = sampling.num_generated_B + is_active_B
    sampling = dataclasses.replace(sampling, num_generated_B=num_generated_B)
    return (_cache(hidden), rows, sampling), DecodedSteps(is_active_B, sampled, *routing), logits_BV


def _on_cache_devices(run: Callable[..., tuple[Cache, Any, Any]], cache: Cache, *arguments: Any) -> Any:
    """Calls `run(cache, *arguments)` on each device that shares the cache, with its part of the slots.

    All other values are whole and equal on all devices, and so are the results.
    """
    if cache.ranks == 1:
        return run(cache, *arguments)
    # Only the slots of keys and values are divided among the devices. State and lengths are small and
    # replicated, and every device samples the same tokens.
    specs = dataclasses.replace(jax.tree.map(lambda _: REPLICATED, cache), pool=(SLOTS, SLOTS))
    # The returned cache differs from the given one in this static field.
    out_specs = dataclasses.replace(specs, empty=False)
    in_specs = specs, *(REPLICATED for _ in arguments)
    mesh = context_mesh(cache.ranks)
    return on_each_device(run, mesh, in_specs=in_specs, out_specs=(out_specs, REPLICATED, REPLICATED))(
        cache, *arguments
    )


def _forward(
    model: Zaya, variables: Mapping, tokens_BT: jax.Array, segments_BT: jax.Array | None, cache: Cache
) -> HiddenStates:
    params, bias_LX = variables["params"], variables["router_bias"]["layers"]
    # No positions: they follow from the lengths in the cache.
    return hidden_states(model.config, model.execution, params, bias_LX, tokens_BT, None, segments_BT, cache)


def _cache(hidden: HiddenStates) -> Cache:
    assert hidden.cache is not None, "the model returns a cache if it has one"
    return hidden.cache


def _sample(
    model: Zaya,
    variables: Mapping,
    x_BD: Float[Array, "B D"],
    sampling: RowSampling,
    *,
    with_details: bool,
) -> tuple[SampledTokens, Float[Array, "B V"]]:
    """Samples a token of each row from its final hidden state; returns also the logits."""
    logits_BV = head(model.config, variables["params"], x_BD[:, None])[:, 0]
    token_B = sample(logits_BV, sampling)
    # Always computed: one more pass over the logits is little next to the head's product.
    total_B = jax.nn.logsumexp(logits_BV, axis=-1)
    logprob_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0] - total_B
    # The number is a shape of the program: all rows get the largest, and the host takes what each wants.
    num_top = min(MAX_TOP_LOGPROBS, logits_BV.shape[1]) if with_details else 0

    def find_top() -> tuple[jax.Array, jax.Array]:
        logits_BJ, tokens_BJ = lax.top_k(logits_BV, num_top)
        return tokens_BJ, logits_BJ - total_B[:, None]

    shape = len(logits_BV), num_top
    top = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    # top_k reads all logits: skip it unless some row reports top log-probabilities.
    if with_details:
        top = lax.cond(sampling.wants_top, find_top, lambda: top)
    return SampledTokens(token_B, logprob_B, jnp.isfinite(total_B), *top), logits_BV
