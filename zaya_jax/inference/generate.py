"""Text from prompts: one prefill, then one compiled loop over the new tokens.

Prompts are padded on the left to a power of two and caches to a multiple of 64, so that repeated
calls find what an earlier one compiled. Padding changes nothing that a row sees.

Letters: B batch, T padded prompt length, M room for new tokens, V vocabulary.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from zaya_jax.config import ModelConfig
from zaya_jax.inference.sampling import Sampling, sample
from zaya_jax.model.cache import Cache, init_cache
from zaya_jax.model.weights import declare, map_weights
from zaya_jax.model.zaya import Output, Zaya
from zaya_jax.pytree import pytree

PAD = 0
SMALLEST_PROMPT = 16
CACHE_MULTIPLE = 64
NO_EOS = -1
"""Stands for no end token, which no token equals: with and without one is the same program."""


@pytree
class Rule:
    """How the next token is chosen, and which one ends a row."""

    key: jax.Array
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
    num_new: Int[Array, ""]
    finished_B: Bool[Array, " B"]
    """Rows that have given their end token; they go on giving it."""


@functools.partial(jax.jit, static_argnames=("model", "max_length"))
def prefill(
    model: Zaya,
    variables: Mapping,
    tokens_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    rule: Rule,
    *,
    max_length: int,
) -> Decoding:
    """Reads the prompts and chooses the first new token of each.

    Args:
      model: the network.
      variables: its weights.
      tokens_BT: prompts, padded on the left.
      segments_BT: 0 for padding, 1 for tokens.
      rule: how tokens are chosen.
      max_length: tokens that must fit, prompt, padding and answer together; above T.
    """
    batch, time = tokens_BT.shape
    output = cast(
        Output,
        model.apply(
            variables,
            tokens_BT,
            segments_BT=segments_BT,
            cache=init_cache(model.config, batch, max_length, model.execution.dtype),
            logits_to_keep=1,
        ),
    )
    nothing = Decoding(
        cache=_cache_of(output),
        tokens_BM=jnp.zeros((batch, max_length - time), jnp.int32),
        num_new=jnp.zeros((), jnp.int32),
        finished_B=jnp.zeros((batch,), jnp.bool_),
    )
    return _append(nothing, output, rule)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="decoding")
def decode(
    model: Zaya, variables: Mapping, decoding: Decoding, rule: Rule, num_new: Int[Array, ""] | int
) -> Decoding:
    """Goes on until there are `num_new` new tokens, or every row has ended.

    Args:
      model: the network.
      variables: its weights.
      decoding: from `prefill` or an earlier call; it is used up, its memory is written in place.
      rule: how tokens are chosen; the same one as before continues the same text.
      num_new: how many new tokens there shall be, from the first one on; at most M.
    """

    def goes_on(decoding: Decoding) -> jax.Array:
        return (decoding.num_new < num_new) & ~jnp.all(decoding.finished_B)

    def step(decoding: Decoding) -> Decoding:
        # The newest token is in no cache yet: a step reads it and chooses the one behind it.
        newest_B1 = lax.dynamic_slice_in_dim(decoding.tokens_BM, decoding.num_new - 1, 1, axis=1)
        output = cast(Output, model.apply(variables, newest_B1, cache=decoding.cache))
        return _append(decoding, output, rule)

    return lax.while_loop(goes_on, step, decoding)


def _append(decoding: Decoding, output: Output, rule: Rule) -> Decoding:
    """Chooses a token from the last logits. Its randomness is of the seed, its place and its row."""
    logits_BV: Float[Array, "B V"] = output.logits_BTV[:, -1]
    sampling = rule.sampling
    chosen_B = sample(
        # The token's number makes its key, not a key that is split on the way: chunks of any size draw alike.
        jax.random.fold_in(rule.key, decoding.num_new),
        logits_BV,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    # A row that ended goes on with the others; its end tokens behind the first are cut off on the host.
    token_B = jnp.where(decoding.finished_B, rule.eos_id, chosen_B)
    return Decoding(
        cache=_cache_of(output),
        tokens_BM=lax.dynamic_update_slice_in_dim(
            decoding.tokens_BM, token_B[:, None], decoding.num_new, axis=1
        ),
        num_new=decoding.num_new + 1,
        finished_B=decoding.finished_B | (token_B == rule.eos_id),
    )


def _cache_of(output: Output) -> Cache:
    assert output.cache is not None, "the network returns a cache where one came in"
    return output.cache


def cast_matrices(model: Zaya, variables: Mapping) -> dict:
    """Matrices in the type that products are done in, once and not at every token.

    Not compiled: a compiled function would copy what has that type already.
    """
    params = map_weights(
        lambda weight, value: value if weight.std is None else value.astype(model.execution.dtype),
        declare(model.config),
        variables["params"],
    )
    return {**variables, "params": params}


def generate(
    model: Zaya,
    variables: Mapping,
    prompt_tokens: Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float | int = 0.0,
    top_p: float | int | None = None,
    top_k: int | None = None,
    seed: int = 0,
    eos_id: int | None = None,
) -> list:
    """Continues prompts.

    A row's text does not depend on the other rows: neither on their number nor on their lengths.

    Args:
      model: the network.
      variables: its weights.
      prompt_tokens: a prompt, or a list of prompts of any lengths.
      max_new_tokens: the longest continuation.
      temperature: divides the logits; 0 takes the likeliest token.
      top_p: draws from the smallest set of likeliest tokens that reaches this probability.
      top_k: draws from this many likeliest tokens.
      seed: of the draws; the same seed gives the same text.
      eos_id: the token that ends a text; None for none.

    Returns:
      The new tokens of a prompt, or a list of them for a list of prompts. A text that ended has its
      end token as the last one.

    Raises:
      ValueError: for a prompt or a setting that cannot be; before anything is compiled.
    """
    # An empty list is one empty prompt, which is refused by name, and not a list of no prompts.
    is_single = len(prompt_tokens) == 0 or np.ndim(prompt_tokens[0]) == 0
    prompts = cast(Sequence[Sequence[int]], [prompt_tokens] if is_single else prompt_tokens)
    _check_prompts(model.config, prompts, max_new_tokens)
    rule = _rule(model.config, temperature, top_p, top_k, seed, eos_id)
    variables = cast_matrices(model, variables)
    decoding = _start(model, variables, prompts, max_new_tokens, rule)
    decoding = decode(model, variables, decoding, rule, max_new_tokens)
    num_new, tokens_BM = jax.device_get((decoding.num_new, decoding.tokens_BM))
    texts = [_cut(row_M[:num_new].tolist(), eos_id) for row_M in tokens_BM]
    return texts[0] if is_single else texts


def stream(
    model: Zaya,
    variables: Mapping,
    prompt_tokens: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float | int = 0.0,
    top_p: float | int | None = None,
    top_k: int | None = None,
    seed: int = 0,
    eos_id: int | None = None,
    chunk: int = 16,
) -> Iterator[int]:
    """Continues one prompt and hands its tokens out as they come: the same ones as `generate`'s.

    The first token comes alone, right after the prompt was read; then `chunk` at a time, so that a
    terminal moves and Python still runs only once a chunk. All other arguments are `generate`'s.

    Raises:
      ValueError: as `generate` does, at the call and not at the first token.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 token")
    _check_prompts(model.config, [prompt_tokens], max_new_tokens)
    rule = _rule(model.config, temperature, top_p, top_k, seed, eos_id)
    return _stream(model, variables, prompt_tokens, max_new_tokens, rule, chunk)


def _stream(
    model: Zaya, variables: Mapping, prompt: Sequence[int], max_new_tokens: int, rule: Rule, chunk: int
) -> Iterator[int]:
    variables = cast_matrices(model, variables)
    decoding = _start(model, variables, [prompt], max_new_tokens, rule)
    num_given = 0
    while True:
        num_new, tokens_BM, finished_B = jax.device_get(
            (decoding.num_new, decoding.tokens_BM, decoding.finished_B)
        )
        yield from tokens_BM[0, num_given:num_new].tolist()
        if num_new >= max_new_tokens or finished_B[0]:
            return
        num_given = int(num_new)
        decoding = decode(model, variables, decoding, rule, min(num_given + chunk, max_new_tokens))


def _start(
    model: Zaya, variables: Mapping, prompts: Sequence[Sequence[int]], max_new_tokens: int, rule: Rule
) -> Decoding:
    """Pads and reads the prompts."""
    tokens_BT, segments_BT = _pad_left(prompts)
    needed = tokens_BT.shape[1] + max_new_tokens
    max_length = -(-needed // CACHE_MULTIPLE) * CACHE_MULTIPLE
    return prefill(model, variables, tokens_BT, segments_BT, rule, max_length=max_length)


def _pad_left(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments [B, T]; T is a power of two."""
    longest = max(len(prompt) for prompt in prompts)
    time = max(SMALLEST_PROMPT, 1 << (longest - 1).bit_length())
    tokens_BT = np.full((len(prompts), time), PAD, np.int32)
    segments_BT = np.zeros((len(prompts), time), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, time - len(prompt) :] = prompt
        segments_BT[row, time - len(prompt) :] = 1
    return tokens_BT, segments_BT


def _cut(tokens: list[int], eos_id: int | None) -> list[int]:
    """Up to the first end token, itself included."""
    return tokens[: tokens.index(eos_id) + 1] if eos_id in tokens else tokens


def _rule(
    config: ModelConfig, temperature: Any, top_p: Any, top_k: int | None, seed: int, eos_id: int | None
) -> Rule:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if eos_id is not None and not 0 <= eos_id < config.vocab_size:
        raise ValueError(
            f"eos_id is {eos_id}; it must be a token of the vocabulary, from 0 to {config.vocab_size - 1}, "
            "or None"
        )
    eos = jnp.asarray(NO_EOS if eos_id is None else eos_id, jnp.int32)
    return Rule(key=jax.random.key(seed), sampling=sampling, eos_id=eos)


def _check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty; it must have at least one token")
        for position, token in enumerate(prompt):
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"token {token} at position {position} of prompt {row} is outside the vocabulary of "
                    f"{config.vocab_size}; it must be from 0 to {config.vocab_size - 1}"
                )
        if len(prompt) + max_new_tokens > config.max_position_embeddings:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}; together "
                f"they must not exceed model.max_position_embeddings, {config.max_position_embeddings}"
            )
