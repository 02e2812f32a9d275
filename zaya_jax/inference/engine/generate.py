"""Generation for a static batch of prompts: one prefill, then decode steps until every row has ended.

Prompts are padded on the left to a power of two and caches to a multiple of 32, so that repeated calls reuse
compiled programs. Padding changes nothing that a row sees.

Reproducibility: a text depends on its prompt and its sampling parameters. The draws of a row that has its own
parameters are the same in every batch. Its logits are bitwise equal where the compiled program and all rows
are the same: the same prompts in batches of the same size, padded length and cache length, on the same kind
of device with the same versions. In a batch of another size they differ by rounding: XLA and the vendors'
libraries choose the order of sums by the shape of a product, and products of few rows have other loops on
CPUs. A text differs from the first token at which that rounding decides. Measured on three networks with
random weights, 32 greedy and 32 sampled texts of 60 tokens on a CPU, batches of 8 against one prompt at a
time: log-probabilities of the first token differ by at most 2e-6 in float32 and 3e-4 in bfloat16; no text
differs in float32, and at most 1 of 32 in bfloat16.

Letters: B batch, T padded prompt length.
"""

import collections.abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.errors import UserError
from zaya_jax.inference.engine.cache_rows import make_cache
from zaya_jax.inference.engine.decoder import PromptChunk, cast_matrices, decode_steps, prefill_chunk
from zaya_jax.inference.engine.masked_sampling import MaskedTokens, sample_constrained
from zaya_jax.inference.engine.sampling_params import EndTokens, SamplingParams, as_token_ids, check_prompt
from zaya_jax.inference.engine.sequence import (
    NewToken,
    Sequence,
    decode_rows,
    sampling_of,
    token_at,
    tokens_of_row,
)
from zaya_jax.model.cache import Cache
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import context_mesh, replicated

PAD = 0
MIN_PROMPT_LENGTH = 16
MIN_CACHE_LENGTH = 64
CACHE_MULTIPLE = 32
SHARED_PREFILL_CHUNK = 1024
"""Tokens that devices sharing a cache read at once. A longer chunk reads the weights less often, but XLA's
attention keeps the scores of a chunk and all of a device's keys in memory. Not measured on GPUs."""

Prompts = collections.abc.Sequence[collections.abc.Sequence[int]]
Params = SamplingParams | collections.abc.Sequence[SamplingParams]
"""Parameters of all prompts, whose rows then draw from numbered streams of one seed; or of each prompt, which
then draws as it does alone."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """The continuation of a prompt so far.

    Attributes:
      tokens: generated tokens, the end token included.
      logprobs: natural logarithm of the probability that the model gave each token, before temperature and
        filters.
      is_finished: whether the continuation is complete.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_finished: bool


def generate(
    model: Zaya,
    variables: Mapping,
    prompt_tokens: collections.abc.Sequence[int] | Prompts,
    *,
    max_new_tokens: int,
    temperature: float | int = 0.0,
    top_p: float | int | None = None,
    top_k: int | None = None,
    seed: int = 0,
    eos_id: EndTokens = None,
    context_devices: int = 1,
) -> list:
    """Continues prompts.

    The other prompts of a batch change a text by rounding only; see the module's documentation.

    Args:
      model: the model.
      variables: its weights.
      prompt_tokens: token ids of a prompt, or a list of prompts of any lengths.
      max_new_tokens: maximum number of new tokens per prompt.
      temperature: divisor of the logits; 0 selects the most likely token.
      top_p: sample from the smallest set of most likely tokens whose probability reaches this value.
      top_k: sample from this many most likely tokens.
      seed: seed of the draws, from 0 to 2**32 - 1; the same seed gives the same texts.
      eos_id: token that ends a text, several of them, or None.
      context_devices: number of devices that share the cache, for texts whose keys and values do not fit one.

    Returns:
      The new tokens of a prompt, or a list of them for a list of prompts, end tokens included.

    Raises:
      UserError: for an invalid prompt or parameter, before anything is compiled.
    """
    # An empty list is one empty prompt, for which there is an error, rather than a list of no prompts.
    is_single = len(prompt_tokens) == 0 or np.ndim(prompt_tokens[0]) == 0
    prompts = cast(Prompts, [prompt_tokens] if is_single else prompt_tokens)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop_token_ids=as_token_ids(eos_id),
    )
    (rows,) = generate_in_chunks(model, variables, prompts, params, context_devices=context_devices)
    texts = [list(row.tokens) for row in rows]
    return texts[0] if is_single else texts


def stream(
    model: Zaya,
    variables: Mapping,
    prompt: collections.abc.Sequence[int],
    params: SamplingParams,
    *,
    chunk: int = 16,
    context_devices: int = 1,
) -> Iterator[int]:
    """Continues one prompt and yields its tokens as they are generated; they equal those of `generate`.

    Args:
      model: the model.
      variables: its weights.
      prompt: token ids.
      params: how the prompt is continued.
      chunk: tokens between two returns to Python, after the first token, which is yielded alone.
      context_devices: number of devices that share the cache.

    Raises:
      UserError: as `generate`, at the call and not at the first token.
    """
    chunks = generate_in_chunks(
        model, variables, [prompt], params, chunk=chunk, context_devices=context_devices
    )
    # A separate generator: with a `yield` in this function, errors would come only with the first token.
    return _new_tokens(chunks)


def _new_tokens(chunks: Iterator[list[Generation]]) -> Iterator[int]:
    num_yielded = 0
    for (generation,) in chunks:
        yield from generation.tokens[num_yielded:]
        num_yielded = len(generation.tokens)


def generate_in_chunks(
    model: Zaya,
    variables: Mapping,
    prompts: Prompts,
    params: Params,
    *,
    chunk: int | None = None,
    context_devices: int = 1,
) -> Iterator[list[Generation]]:
    """Continues prompts and yields all continuations after each chunk of tokens.

    Args:
      model: the model.
      variables: its weights.
      prompts: token ids of each prompt.
      params: how all prompts, or each of them, are continued.
      chunk: tokens between two yields, after the first token; None to yield once, when all rows are complete.
      context_devices: number of devices that share the cache.

    Raises:
      UserError: for an invalid prompt or parameter; at the call, before anything is compiled.
    """
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk is {chunk}; it must be at least 1 token")
    is_one = isinstance(params, SamplingParams)
    rows = [
        Sequence(prompt, each, row)
        for row, (prompt, each) in enumerate(
            zip(prompts, [params] * len(prompts) if is_one else params, strict=True)
        )
    ]
    for row in rows:
        check_prompt(row.tokens, row.params, model.config, name=f"prompt {row.row}")
    # Place the weights before the generator starts, so that an invalid number of devices fails at the call.
    if context_devices != 1:
        variables = jax.device_put(variables, replicated(context_mesh(context_devices)))
    streams = range(len(rows)) if is_one else None
    # A separate generator, so that the checks above run at the call.
    return _generate(model, variables, rows, streams, chunk, context_devices)


def _generate(
    model: Zaya,
    variables: Mapping,
    rows: list[Sequence],
    streams: range | None,
    chunk: int | None,
    context_devices: int,
) -> Iterator[list[Generation]]:
    # Idempotent: a caller that cast the weights before pays nothing here.
    variables = cast_matrices(model, variables)
    logprobs: list[list[float]] = [[] for _ in rows]
    cache, max_steps = _prefill(model, variables, rows, logprobs, streams, context_devices)
    if chunk is not None:
        yield _generations(rows, logprobs)
    while any(row.num_left for row in rows):
        # `max_steps` is a shape and stays the same for all chunk sizes; the number of steps is data.
        num_steps = min(chunk or max_steps, max(row.num_left for row in rows))
        # The mask of a token depends on the token before it.
        if any(row.constraint is not None and row.num_left for row in rows):
            num_steps = 1
        sampling = sampling_of(rows, model.config.vocab_size, streams=streams)
        cache, steps, logits_BV = decode_steps(
            model, variables, cache, decode_rows(rows), sampling, num_steps, max_steps=max_steps
        )
        masked = sample_constrained(rows, logits_BV, sampling)
        steps = jax.device_get(steps)
        for row in rows:
            for new in tokens_of_row(steps, row.row):
                _append(row, new, masked, logprobs)
        if chunk is not None:
            yield _generations(rows, logprobs)
    if chunk is None:
        yield _generations(rows, logprobs)


def _prefill(
    model: Zaya,
    variables: Mapping,
    rows: list[Sequence],
    logprobs: list[list[float]],
    streams: range | None,
    context_devices: int,
) -> tuple[Cache, int]:
    """Reads the prompts and appends the first token of each row.

    Returns:
      The cache, and the number of new tokens that it has room for.
    """
    is_shared = context_devices > 1
    tokens_BT, segments_BT = _pad_left([row.tokens for row in rows], in_chunks=is_shared)
    time = tokens_BT.shape[1]
    # The longest continuation decides: all rows of a batch share the length of the cache.
    max_length = cache_length(time, max(row.params.max_new_tokens for row in rows))
    cache = make_cache(
        model, variables, len(rows), max_length, padding="left", context_devices=context_devices
    )
    sampling = sampling_of(rows, model.config.vocab_size, streams=streams)
    # One device reads whole prompts at once, as in training: attention within the prompt needs no cache.
    size = min(time, SHARED_PREFILL_CHUNK) if is_shared else time
    for first in range(0, time, size):
        part = slice(first, first + size)
        prompt_chunk = PromptChunk(
            tokens_BT=jnp.asarray(tokens_BT[:, part]),
            segments_BT=jnp.asarray(segments_BT[:, part]),
            row_B=jnp.arange(len(rows)),
            length=jnp.asarray(first, jnp.int32),
            is_last=jnp.asarray(first + size == time),
        )
        cache, sampled, logits_BV = prefill_chunk(model, variables, cache, prompt_chunk, sampling)
    masked = sample_constrained(rows, logits_BV, sampling)
    sampled = jax.device_get(sampled)
    for row in rows:
        _append(row, token_at(sampled, (row.row,), 0), masked, logprobs)
    return cache, max_length - time


def _append(row: Sequence, new: NewToken, masked: MaskedTokens, logprobs: list[list[float]]) -> None:
    """Appends the next token of a row, or that of its grammar."""
    if (error := masked.errors.get(row.row)) is not None:
        raise error
    new = masked.replace(new, row.row)
    row.append(new)
    logprobs[row.row].append(new.logprob)


def _generations(rows: list[Sequence], logprobs: list[list[float]]) -> list[Generation]:
    return [
        Generation(tuple(row.tokens[row.num_prompt :]), tuple(each), row.reason is not None)
        for row, each in zip(rows, logprobs, strict=True)
    ]


def padded_length(num_tokens: int, *, in_chunks: bool = False) -> int:
    """Returns the padded length of a prompt: a power of two, or a multiple of the chunk that it is read in.

    Args:
      num_tokens: number of tokens of the prompt.
      in_chunks: whether devices share the cache.
    """
    # Powers of two bound the number of programs by the logarithm of the context.
    time = max(MIN_PROMPT_LENGTH, 1 << (num_tokens - 1).bit_length())
    if in_chunks:  # memory is scarce where devices share a cache: padding must not double it
        time = min(time, -(-num_tokens // SHARED_PREFILL_CHUNK) * SHARED_PREFILL_CHUNK)
    return time


def cache_length(time: int, max_new_tokens: int) -> int:
    """Returns the number of tokens that the cache of a padded prompt and its continuation has room for."""
    # A step reads all slots: a larger multiple would need fewer programs, and more time for each token.
    return max(MIN_CACHE_LENGTH, -(-(time + max_new_tokens) // CACHE_MULTIPLE) * CACHE_MULTIPLE)


def _pad_left(prompts: Prompts, *, in_chunks: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and segments, [B, T]."""
    time = max(padded_length(len(prompt), in_chunks=in_chunks) for prompt in prompts)
    # Padding is on the left, so that all rows write their next token into the same slot of the cache.
    tokens_BT = np.full((len(prompts), time), PAD, np.int32)
    segments_BT = np.zeros((len(prompts), time), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, time - len(prompt) :] = prompt
        segments_BT[row, time - len(prompt) :] = 1
    return tokens_BT, segments_BT
