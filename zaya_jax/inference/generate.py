"""Text from prompts: one prefill, then one compiled loop over the new tokens.

Prompts are padded on the left to a power of two and caches to a multiple of 64, so that repeated
calls find what an earlier one compiled. Padding changes nothing that a row sees.

Letters: B batch, T padded prompt length, M room for new tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zaya_jax.config import ModelConfig
from zaya_jax.inference.decoding import NO_EOS, PREFILL_CHUNK, Decoding, Rule, decode, prefill
from zaya_jax.inference.sampling import Sampling
from zaya_jax.model.weights import declare, map_weights
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import context_mesh, replicated

PAD = 0
SMALLEST_PROMPT = 16
CACHE_MULTIPLE = 64
CHUNK_UNTIL_DONE = 32
"""Tokens between two questions whether texts are done: fewer write less in vain, and wait more often."""


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
    context_devices: int = 1,
    is_done: Callable[[list[int]], bool] | None = None,
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
      context_devices: that share the cache, for texts whose keys and values do not fit one.
      is_done: whether a row's new tokens say all that is wanted; it is asked now and then. When all rows do,
        none goes on, and each may have some tokens more than it needed.

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
    mesh = _mesh(context_devices)
    rule = _rule(model.config, temperature, top_p, top_k, seed, eos_id)
    variables = _placed(cast_matrices(model, variables), mesh)
    decoding = _start(model, variables, prompts, max_new_tokens, rule, mesh)
    # Of rows that nobody asks about the host need not know before all have ended.
    chunk = max_new_tokens if is_done is None else CHUNK_UNTIL_DONE
    for upto in (*range(chunk, max_new_tokens, chunk), max_new_tokens):
        decoding = decode(model, variables, decoding, rule, upto, mesh=mesh)
        num_new, tokens_BM = jax.device_get((decoding.num_new, decoding.tokens_BM))
        texts = [_cut(row_M[:num_new].tolist(), eos_id) for row_M in tokens_BM]
        if num_new < upto or (is_done is not None and all(map(is_done, texts))):
            break
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
    context_devices: int = 1,
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
    mesh = _mesh(context_devices)
    rule = _rule(model.config, temperature, top_p, top_k, seed, eos_id)
    return _stream(model, variables, prompt_tokens, max_new_tokens, rule, mesh, chunk)


def _stream(
    model: Zaya,
    variables: Mapping,
    prompt: Sequence[int],
    max_new_tokens: int,
    rule: Rule,
    mesh: Mesh | None,
    chunk: int,
) -> Iterator[int]:
    variables = _placed(cast_matrices(model, variables), mesh)
    decoding = _start(model, variables, [prompt], max_new_tokens, rule, mesh)
    num_given = 0
    while True:
        num_new, tokens_BM, finished_B = jax.device_get(
            (decoding.num_new, decoding.tokens_BM, decoding.finished_B)
        )
        yield from tokens_BM[0, num_given:num_new].tolist()
        if num_new >= max_new_tokens or finished_B[0]:
            return
        num_given = int(num_new)
        upto = min(num_given + chunk, max_new_tokens)
        decoding = decode(model, variables, decoding, rule, upto, mesh=mesh)


def _mesh(context_devices: int) -> Mesh | None:
    """The devices that share a cache; None where one has all of it."""
    return None if context_devices == 1 else context_mesh(context_devices)


def _placed(variables: Mapping, mesh: Mesh | None) -> Mapping:
    """Weights where they are read: whole, on all devices of a mesh."""
    return variables if mesh is None else jax.device_put(variables, replicated(mesh))


def _start(
    model: Zaya,
    variables: Mapping,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    rule: Rule,
    mesh: Mesh | None,
) -> Decoding:
    """Pads and reads the prompts."""
    tokens_BT, segments_BT = _pad_left(prompts, in_chunks=mesh is not None)
    needed = tokens_BT.shape[1] + max_new_tokens
    max_length = -(-needed // CACHE_MULTIPLE) * CACHE_MULTIPLE
    return prefill(model, variables, tokens_BT, segments_BT, rule, max_length=max_length, mesh=mesh)


def _pad_left(prompts: Sequence[Sequence[int]], *, in_chunks: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments [B, T]; T is a power of two, or where it is read in chunks so many of these."""
    longest = max(len(prompt) for prompt in prompts)
    time = max(SMALLEST_PROMPT, 1 << (longest - 1).bit_length())
    if in_chunks:  # who shares a cache has none to spare: padding may not double it
        time = min(time, -(-longest // PREFILL_CHUNK) * PREFILL_CHUNK)
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
