"""The compiled part of the engine: rows of one cache that come and go, each at its own length.

Three programs serve all requests, whatever their lengths and settings: one reads a chunk of a prompt into a
row, one writes token by token in all rows that ask for it, and a third moves blocks of tokens that rows have
in common. Which row is whose, and how far it is, the host knows and says each time.

Letters: B rows, T tokens of a chunk, V vocabulary, L layers, J likeliest tokens, M steps, K key and value
heads, H head width.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from zaya_jax.config import ModelConfig
from zaya_jax.inference.sampling import sample_rows
from zaya_jax.model.cache import Cache, init_cache, kept_slots, layer_slots
from zaya_jax.model.zaya import HiddenStates, Zaya, head, hidden_states
from zaya_jax.pytree import pytree

MOST_TOP_LOGPROBS = 20
"""Likeliest tokens that a request may ask for beside each of its own, as in OpenAI's interface."""


@pytree
class Choosing:
    """How each row's next token is chosen; all of it is data, so that one program serves all."""

    seed_B: UInt[Array, " B"]
    number_B: Int[Array, " B"]
    """Tokens that the row's request has already: it makes the key of the next one."""
    temperature_B: Float[Array, " B"]
    top_k_B: Int[Array, " B"]
    top_p_B: Float[Array, " B"]
    wants_top: Bool[Array, ""]
    """Whether any row asks for the likeliest tokens."""


@pytree
class Chosen:
    """A token of each row."""

    token_B: Int[Array, "*M B"]
    logprob_B: Float[Array, "*M B"]
    """Of the network's own distribution."""
    top_tokens_BJ: Int[Array, "*M B J"]
    """Likeliest first; zeros unless asked for."""
    top_logprobs_BJ: Float[Array, "*M B J"]
    is_finite_B: Bool[Array, "*M B"]
    """Whether the logits are numbers, and the token thus means something."""


@pytree
class Chunk:
    """A part of a prompt, and where it goes."""

    tokens_1T: Int[Array, "1 T"]
    row: Int[Array, ""]
    length: Int[Array, ""]
    """Tokens of the row before it; 0 makes the row anew."""
    num_new: Int[Array, ""]
    """Its tokens, behind which it is padding."""
    is_last: Bool[Array, ""]
    """Whether a token is chosen behind it."""


@pytree
class RowStates:
    """Where each row is before it writes."""

    newest_B: Int[Array, " B"]
    """Its last token, which it has not read."""
    length_B: Int[Array, " B"]
    """Tokens that it has read."""
    left_B: Int[Array, " B"]
    """Steps that it goes on; 0 for a row that waits, which nothing touches."""
    eos_B: Int[Array, " B"]
    """The token that ends it; negative for none."""


@pytree
class WrittenSteps:
    """What rows wrote in some steps; of a row that was not active a step says nothing."""

    was_active_MB: Bool[Array, "*M B"]
    chosen: Chosen
    experts_LB: Int[Array, "*M L B"]
    """Classes that the routers gave the token that was read: the one before that which was chosen."""
    probabilities_LB: Float[Array, "*M L B"]


@pytree
class KeptBlock:
    """A chunk's worth of tokens as a row has read them."""

    keys_LTKH: Float[Array, "L T K H"]
    values_LTKH: Float[Array, "L T K H"]
    state: Any
    """Of the attention variant behind them: of every layer, without the axis of rows."""


def init_slots(config: ModelConfig, num_slots: int, max_length: int, dtype: DTypeLike) -> Cache:
    """A cache of empty rows, each of which has a length of its own."""
    cache = init_cache(config, num_slots, max_length, dtype)
    length_B = jnp.zeros((num_slots,), jnp.int32)
    return dataclasses.replace(cache, length=length_B, empty=False, padding="right")


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def read_chunk(
    model: Zaya, variables: Mapping, cache: Cache, chunk: Chunk, choosing: Choosing
) -> tuple[Cache, Chosen]:
    """Reads a part of a prompt into a row, and chooses what comes behind it if it is the last.

    Args:
      model: the network.
      variables: its weights.
      cache: from `init_slots`; it is used up, its memory is written in place.
      chunk: what is read, and where it goes.
      choosing: of this one row.
    """
    row = _rows_of(cache, chunk.row, 1)
    is_new = chunk.length == 0
    # Who was in the row before left a state; its keys and values lie behind the length, and are not seen.
    state = jax.tree.map(lambda x: jnp.where(is_new, 0, x), row.state)
    row = dataclasses.replace(row, state=state, length=chunk.length[None])
    segments_1T = (jnp.arange(chunk.tokens_1T.shape[1]) < chunk.num_new)[None].astype(jnp.int32)
    hidden = _read(model, variables, chunk.tokens_1T, segments_1T, row)

    def choose_behind() -> Chosen:
        x_1D = hidden.x_BTD[:, chunk.num_new - 1]
        return _choose(_logits(model, variables, x_1D), choosing)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(choose_behind))
    # The head is a product with the whole vocabulary, which most chunks of a long prompt need not pay.
    chosen = lax.cond(chunk.is_last, choose_behind, lambda: nothing)
    return _with_rows(cache, chunk.row, hidden.cache), chosen


@functools.partial(jax.jit, static_argnames=("model", "most_steps"), donate_argnames="cache")
def write_tokens(
    model: Zaya,
    variables: Mapping,
    cache: Cache,
    rows: RowStates,
    choosing: Choosing,
    num_steps: Int[Array, ""],
    *,
    most_steps: int,
) -> tuple[Cache, WrittenSteps]:
    """Goes on writing in all rows that have steps left, up to `num_steps`.

    The rows told of are the first ones of the cache: with few texts in many slots, others cost nothing.

    Args:
      model: the network.
      variables: its weights.
      cache: from `init_slots`; it is used up, its memory is written in place.
      rows: where each is.
      choosing: of each row.
      num_steps: from 1 to `most_steps`.
      most_steps: M, for which there is room in the result.
    """

    def goes_on(carry: tuple[Any, Any, jax.Array]) -> jax.Array:
        (_, rows, _), _, done = carry
        return (done < num_steps) & jnp.any(rows.left_B > 0)

    def go_on(carry: tuple[Any, Any, jax.Array]) -> tuple[Any, Any, jax.Array]:
        before, all_did, done = carry
        after, did = _write_one(model, variables, *before)
        return after, jax.tree.map(lambda x, y: x.at[done].set(y), all_did, did), done + 1

    num_rows = len(rows.length_B)
    all_rows, cache = cache, _rows_of(cache, 0, num_rows)
    start = dataclasses.replace(cache, length=rows.length_B), rows, choosing
    shapes = jax.eval_shape(functools.partial(_write_one, model), variables, *start)[1]
    nothing = jax.tree.map(lambda x: jnp.zeros((most_steps, *x.shape), x.dtype), shapes)
    (cache, _, _), did, _ = lax.while_loop(goes_on, go_on, (start, nothing, jnp.zeros((), jnp.int32)))
    return _with_rows(all_rows, 0, cache), did


def _write_one(
    model: Zaya, variables: Mapping, cache: Cache, rows: RowStates, choosing: Choosing
) -> tuple[tuple[Cache, RowStates, Choosing], WrittenSteps]:
    """A token more in each row that has steps left; the others wait."""
    is_active_B = rows.left_B > 0
    segments_B1 = is_active_B[:, None].astype(jnp.int32)
    cache = dataclasses.replace(cache, length=rows.length_B)
    hidden = _read(model, variables, rows.newest_B[:, None], segments_B1, cache)
    chosen = _choose(_logits(model, variables, hidden.x_BTD[:, 0]), choosing)
    router = hidden.router
    assert router.probabilities_LBT is not None, "the network keeps them where it has a cache"
    did = WrittenSteps(is_active_B, chosen, router.experts_LBT[:, :, 0], router.probabilities_LBT[:, :, 0])
    goes_on_B = (chosen.token_B != rows.eos_B) & chosen.is_finite_B
    rows = RowStates(
        newest_B=chosen.token_B,
        length_B=rows.length_B + is_active_B,
        left_B=jnp.where(goes_on_B, jnp.maximum(rows.left_B - 1, 0), 0),
        eos_B=rows.eos_B,
    )
    choosing = dataclasses.replace(choosing, number_B=choosing.number_B + is_active_B)
    return (_as_it_was(cache, hidden.cache), rows, choosing), did


@functools.partial(jax.jit, static_argnames=("config", "time"))
def take_block(
    config: ModelConfig, cache: Cache, row: Int[Array, ""], length: Int[Array, ""], *, time: int
) -> KeptBlock:
    """A copy of the `time` tokens before `length`, which is how many the row has read."""
    slot_LT = _slots_of_block(config, cache, length - time, time)
    # Of a ring shorter than the block the oldest tokens are gone, and nobody will see what stands there.
    keys, values = (part.at[row, slot_LT].get(mode="clip") for part in cache.pool)
    return KeptBlock(keys, values, jax.tree.map(lambda x: x[:, row], cache.state))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def put_block(
    config: ModelConfig, cache: Cache, row: Int[Array, ""], length: Int[Array, ""], block: KeptBlock
) -> Cache:
    """Has a row of `length` tokens read a block by copying it."""
    slot_LT = _slots_of_block(config, cache, length, block.keys_LTKH.shape[1])
    keys, values = (
        part.at[row, slot_LT].set(new, mode="drop")
        for part, new in zip(cache.pool, (block.keys_LTKH, block.values_LTKH), strict=True)
    )
    state = jax.tree.map(lambda x, new: x.at[:, row].set(new), cache.state, block.state)
    return dataclasses.replace(cache, pool=(keys, values), state=state)


@functools.partial(jax.jit, donate_argnames="cache")
def clear_row(cache: Cache, row: Int[Array, ""]) -> Cache:
    """Makes a row zeros, whose values are no numbers: weighted with 0 they would be none to the next one."""
    pool = tuple(part.at[row].set(0) for part in cache.pool)
    state = jax.tree.map(lambda x: x.at[:, row].set(0), cache.state)
    return dataclasses.replace(cache, pool=pool, state=state)


def _slots_of_block(config: ModelConfig, cache: Cache, length: jax.Array, time: int) -> jax.Array:
    """Where each layer keeps the tokens behind `length`, [L, T]; beyond the pool if a ring overtakes them."""
    one = jax.tree.map(lambda x: x[:, None], layer_slots(config, cache.max_length))
    return kept_slots(length, jnp.asarray(time), one, time, beyond=cache.pool[0].shape[1])


def _rows_of(cache: Cache, first: jax.Array | int, number: int) -> Cache:
    """A cache of some of the rows."""
    if number == len(cache.first_B):
        return cache
    pool = tuple(lax.dynamic_slice_in_dim(part, first, number, axis=0) for part in cache.pool)
    state = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, number, axis=1), cache.state)
    return dataclasses.replace(cache, pool=pool, state=state, first_B=jnp.zeros((number,), jnp.int32))


def _with_rows(cache: Cache, first: jax.Array | int, new: Cache | None) -> Cache:
    """All rows again, some of which have gone on."""
    assert new is not None, "the network returns a cache where one came in"

    def put(all_rows: jax.Array, some: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(all_rows, some, first, axis)

    pool = tuple(put(old, some, 0) for old, some in zip(cache.pool, new.pool, strict=True))
    state = jax.tree.map(functools.partial(put, axis=1), cache.state, new.state)
    return dataclasses.replace(cache, pool=pool, state=state)


def _as_it_was(cache: Cache, new: Cache | None) -> Cache:
    """The cache behind a step, as a loop carries it."""
    assert new is not None, "the network returns a cache where one came in"
    return dataclasses.replace(cache, pool=new.pool, state=new.state)


def _read(
    model: Zaya, variables: Mapping, tokens_BT: jax.Array, segments_BT: jax.Array, cache: Cache
) -> HiddenStates:
    params, bias_LX = variables["params"], variables["router_bias"]["layers"]
    inputs = tokens_BT, None, segments_BT, cache
    return hidden_states(model.config, model.execution, params, bias_LX, *inputs)


def _logits(model: Zaya, variables: Mapping, x_BD: jax.Array) -> Float[Array, "B V"]:
    return head(model.config, variables["params"], x_BD[:, None])[:, 0]


def _choose(logits_BV: Float[Array, "B V"], choosing: Choosing) -> Chosen:
    """Chooses a token of each row, as `generate` does for its prompt alone with its seed."""
    key_B = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(choosing.seed_B), choosing.number_B)
    token_B = sample_rows(
        key_B,
        logits_BV,
        temperature_B=choosing.temperature_B,
        top_k_B=choosing.top_k_B,
        top_p_B=choosing.top_p_B,
    )
    total_B = jax.nn.logsumexp(logits_BV.astype(jnp.float32), axis=-1)
    logprob_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0] - total_B
    num_top = min(MOST_TOP_LOGPROBS, logits_BV.shape[1])

    def find_top() -> tuple[jax.Array, jax.Array]:
        logits_BJ, tokens_BJ = lax.top_k(logits_BV, num_top)
        return tokens_BJ, logits_BJ - total_B[:, None]

    shape = len(logits_BV), num_top
    nothing = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    top_tokens_BJ, top_logprobs_BJ = lax.cond(choosing.wants_top, find_top, lambda: nothing)
    return Chosen(token_B, logprob_B, top_tokens_BJ, top_logprobs_BJ, jnp.isfinite(total_B))
