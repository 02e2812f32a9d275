"""The compiled part of generation: prompts are read, and a loop writes token by token.

Devices of a mesh share the cache: each has its part of all keys and values, and does all else as the others
do. They read a prompt in chunks, so that no device ever has the keys of more than one chunk beside its own.

Letters: B batch, T padded prompt length, I chunks of a prompt, M room for new tokens, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from zaya_jax.inference.sampling import Sampling, sample
from zaya_jax.model.cache import Cache, init_cache
from zaya_jax.model.zaya import Output, Zaya
from zaya_jax.parallel.mesh import REPLICATED, SLOTS, on_each_device
from zaya_jax.pytree import pytree

PREFILL_CHUNK = 1024
"""Tokens that devices of a mesh read at once. A longer chunk reads the weights less often, but XLA's form of
attention has the scores of a chunk and all of a device's keys in memory. It was not measured on GPUs."""
NO_EOS = -1
"""Stands for no end token, which no token equals: with and without one is the same program."""
Chunk = tuple[Int[Array, "B T"], Int[Array, "B T"]]
"""Tokens, and their segments: 0 for padding, 1 for tokens."""


@pytree
class Rule:
    """How the next token is chosen, and which one ends a row."""

    key: jax.Array
    """Of all rows, or one for each: [B]."""
    sampling: Sampling
    eos_id: Int[Array, ""]
    """`NO_EOS` for none."""


@pytree
class Decoding:
    """Where a batch of texts is."""

    cache: Cache
    """Of all tokens but the newest."""
    tokens_BM: Int[Array, "B M"]
    """New tokens; only the first `num_new` mean anything."""
    logprobs_BM: Float[Array, "B M"]
    """Natural logarithms of what the network gave each of them, before temperature and filters."""
    num_new: Int[Array, ""]
    finished_B: Bool[Array, " B"]
    """Rows that have given their end token; they go on giving it."""


@functools.partial(jax.jit, static_argnames=("model", "max_length", "mesh"))
def prefill(
    model: Zaya,
    variables: Mapping,
    tokens_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    rule: Rule,
    *,
    max_length: int,
    mesh: Mesh | None = None,
) -> Decoding:
    """Reads the prompts and chooses the first new token of each.

    Args:
      model: the network.
      variables: its weights.
      tokens_BT: prompts, padded on the left.
      segments_BT: 0 for padding, 1 for tokens.
      rule: how tokens are chosen.
      max_length: tokens that must fit, prompt, padding and answer together; above T.
      mesh: of devices that share the cache; T is then a multiple of `PREFILL_CHUNK`, or below it.
    """
    batch, time = tokens_BT.shape
    ranks = 1 if mesh is None else mesh.size
    cache = init_cache(model.config, batch, max_length, model.execution.dtype, ranks=ranks)
    nothing = Decoding(
        # In a loop over chunks the first is as any other: the cache says of itself that nothing is there.
        cache=cache if mesh is None else dataclasses.replace(cache, empty=False),
        tokens_BM=jnp.zeros((batch, max_length - time), jnp.int32),
        logprobs_BM=jnp.zeros((batch, max_length - time), jnp.float32),
        num_new=jnp.zeros((), jnp.int32),
        finished_B=jnp.zeros((batch,), jnp.bool_),
    )

    def start(variables: Mapping, nothing: Decoding, chunks: Chunk, rule: Rule) -> Decoding:
        read = functools.partial(_read if mesh is None else _read_in_chunks, model, variables)
        cache, logits_BV = read(nothing.cache, chunks)
        return _append(nothing, cache, logits_BV, rule)

    return _on_all(start, mesh, variables, nothing, (tokens_BT, segments_BT), rule)


def _read(model: Zaya, variables: Mapping, cache: Cache, chunk: Chunk) -> tuple[Cache, jax.Array]:
    """The cache behind a chunk, and the logits [B, V] of what comes next."""
    tokens_BT, segments_BT = chunk
    output = model.apply(variables, tokens_BT, segments_BT=segments_BT, cache=cache, logits_to_keep=1)
    return _cache_and_logits(cast(Output, output))


def _read_in_chunks(model: Zaya, variables: Mapping, cache: Cache, chunk: Chunk) -> tuple[Cache, jax.Array]:
    """`_read` of one that may be long, a part of its tokens at a time."""
    batch, time = chunk[0].shape

    def step(carry: tuple[Cache, jax.Array], part: Chunk) -> tuple[tuple[Cache, jax.Array], None]:
        return _read(model, variables, carry[0], part), None

    tokens_IBT, segments_IBT = (x.reshape(batch, -1, min(time, PREFILL_CHUNK)).swapaxes(0, 1) for x in chunk)
    no_logits_BV = jnp.zeros((batch, model.config.vocab_size), jnp.float32)
    return lax.scan(step, (cache, no_logits_BV), (tokens_IBT, segments_IBT))[0]


def _on_all(
    function: Callable[..., Decoding], mesh: Mesh | None, variables: Mapping, decoding: Decoding, *rest: Any
) -> Decoding:
    """Runs a function on each device of a mesh, with its slots of the cache and all else whole."""
    if mesh is None:
        return function(variables, decoding, *rest)
    pool = decoding.cache.pool
    specs = jax.tree.map(lambda x: SLOTS if any(x is part for part in pool) else REPLICATED, decoding)
    in_specs = REPLICATED, specs, *(REPLICATED for _ in rest)
    run = on_each_device(function, mesh, in_specs=in_specs, out_specs=specs)
    return run(variables, decoding, *rest)


@functools.partial(jax.jit, static_argnames=("model", "mesh"), donate_argnames="decoding")
def decode(
    model: Zaya,
    variables: Mapping,
    decoding: Decoding,
    rule: Rule,
    num_new: Int[Array, ""] | int,
    *,
    mesh: Mesh | None = None,
) -> Decoding:
    """Goes on until there are `num_new` new tokens, or every row has ended.

    Args:
      model: the network.
      variables: its weights.
      decoding: from `prefill` or an earlier call; it is used up, its memory is written in place.
      rule: how tokens are chosen; the same one as before continues the same text.
      num_new: how many new tokens there shall be, from the first one on; at most M.
      mesh: as it was for `prefill`.
    """

    def go_on(variables: Mapping, decoding: Decoding, rule: Rule, num_new: jax.Array) -> Decoding:
        def goes_on(decoding: Decoding) -> jax.Array:
            return (decoding.num_new < num_new) & ~jnp.all(decoding.finished_B)

        def step(decoding: Decoding) -> Decoding:
            # The newest token is in no cache yet: a step reads it and chooses the one behind it.
            newest_B1 = lax.dynamic_slice_in_dim(decoding.tokens_BM, decoding.num_new - 1, 1, axis=1)
            output = cast(Output, model.apply(variables, newest_B1, cache=decoding.cache))
            return _append(decoding, *_cache_and_logits(output), rule)

        return lax.while_loop(goes_on, step, decoding)

    return _on_all(go_on, mesh, variables, decoding, rule, num_new)


def _append(decoding: Decoding, cache: Cache, logits_BV: Float[Array, "B V"], rule: Rule) -> Decoding:
    """Chooses a token from the last logits. Its randomness is of the seed, its place and its row."""
    sampling = rule.sampling
    # The token's number makes its key, not a key that is split on the way: chunks of any size draw alike.
    fold = jax.random.fold_in if rule.key.ndim == 0 else jax.vmap(jax.random.fold_in, (0, None))
    chosen_B = sample(
        fold(rule.key, decoding.num_new),
        logits_BV,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    # A row that ended goes on with the others; its end tokens behind the first are cut off on the host.
    token_B = jnp.where(decoding.finished_B, rule.eos_id, chosen_B)

    def put(row_BM: jax.Array, new_B: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(row_BM, new_B[:, None], decoding.num_new, axis=1)

    return Decoding(
        cache=cache,
        tokens_BM=put(decoding.tokens_BM, token_B),
        logprobs_BM=put(decoding.logprobs_BM, _logprobs(logits_BV, token_B)),
        num_new=decoding.num_new + 1,
        finished_B=decoding.finished_B | (token_B == rule.eos_id),
    )


def _logprobs(logits_BV: Float[Array, "B V"], token_B: Int[Array, " B"]) -> Float[Array, " B"]:
    """Always computed: one more pass over logits, beside the product with all of the embedding for them."""
    logits_BV = logits_BV.astype(jnp.float32)
    taken_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
    return taken_B - jax.nn.logsumexp(logits_BV, axis=-1)


def _cache_and_logits(output: Output) -> tuple[Cache, jax.Array]:
    assert output.cache is not None, "the network returns a cache where one came in"
    return output.cache, output.logits_BTV[:, -1]
