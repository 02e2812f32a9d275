"""Text from prompts: one prefill, then one compiled loop over the new tokens.

Prompts are padded on the left to a power of two and caches to a multiple of 64, so that repeated
calls find what an earlier one compiled. Padding changes nothing that a row sees.

Letters: B batch, T padded prompt length, M room for new tokens.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How prompts are continued: what `generate` takes one by one.

    Attributes:
      max_new_tokens: the longest continuation, of all prompts or of each.
      temperature: divides the logits; 0 takes the likeliest token.
      top_p: draws from the smallest set of likeliest tokens that reaches this probability.
      top_k: draws from this many likeliest tokens.
      seed: of the draws of a batch; or one for each prompt, which then gives the text that it gives alone.
      eos_id: the token that ends a text; None for none.
      context_devices: that share the cache.
    """

    max_new_tokens: int | tuple[int, ...]
    temperature: float | int = 0.0
    top_p: float | int | None = None
    top_k: int | None = None
    seed: int | tuple[int, ...] = 0
    eos_id: int | None = None
    context_devices: int = 1

    def __post_init__(self):
        _ = self.sampling  # which refuses what cannot be

    @property
    def sampling(self) -> Sampling:
        """How a token is drawn."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def limits(self, num_prompts: int) -> tuple[int, ...]:
        """The longest continuation of each prompt."""
        limits = self.max_new_tokens
        return limits if isinstance(limits, tuple) else (limits,) * num_prompts


@dataclasses.dataclass(frozen=True)
class Written:
    """What a batch of prompts has been continued with so far; M is the number of new tokens.

    Attributes:
      tokens_BM: a row that ended goes on with end tokens.
      logprobs_BM: natural logarithms of the probabilities that the network gave these tokens: of its own
        distribution, whatever temperature and filters made of it.
      finished_B: rows that have given their end token.
    """

    tokens_BM: np.ndarray
    logprobs_BM: np.ndarray
    finished_B: np.ndarray


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

    Returns:
      The new tokens of a prompt, or a list of them for a list of prompts. A text that ended has its
      end token as the last one.

    Raises:
      ValueError: for a prompt or a setting that cannot be; before anything is compiled.
    """
    # An empty list is one empty prompt, which is refused by name, and not a list of no prompts.
    is_single = len(prompt_tokens) == 0 or np.ndim(prompt_tokens[0]) == 0
    prompts = cast(Sequence[Sequence[int]], [prompt_tokens] if is_single else prompt_tokens)
    settings = Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        eos_id=eos_id,
        context_devices=context_devices,
    )
    (written,) = follow(model, variables, prompts, settings)
    texts = [_cut(row_M.tolist(), eos_id) for row_M in written.tokens_BM]
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
    settings = Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        eos_id=eos_id,
        context_devices=context_devices,
    )
    return tokens_of_one(follow(model, variables, [prompt_tokens], settings, chunk=chunk))


def tokens_of_one(progress: Iterator[Written]) -> Iterator[int]:
    """The tokens of the only prompt of `follow`, each once."""
    num_given = 0
    for written in progress:
        tokens = written.tokens_BM[0, num_given:].tolist()
        num_given += len(tokens)
        yield from tokens


def follow(
    model: Zaya,
    variables: Mapping,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    chunk: int | None = None,
) -> Iterator[Written]:
    """Continues prompts and says now and then how far it is; whoever has enough stops asking.

    Args:
      model: the network.
      variables: its weights.
      prompts: of any lengths.
      settings: how they are continued.
      chunk: tokens between two words, behind a first one; None for one word, when all rows are done.

    Raises:
      ValueError: for a prompt or a setting that cannot be; at the call, before anything is compiled.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 token")
    _check_prompts(model.config, prompts, settings)
    mesh = _mesh(settings.context_devices)
    rule = _rule(model.config, settings)
    return _follow(model, variables, prompts, max(settings.limits(len(prompts))), rule, mesh, chunk)


def _follow(
    model: Zaya,
    variables: Mapping,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    rule: Rule,
    mesh: Mesh | None,
    chunk: int | None,
) -> Iterator[Written]:
    variables = _placed(cast_matrices(model, variables), mesh)
    decoding = _start(model, variables, prompts, max_new_tokens, rule, mesh)
    upto = max_new_tokens if chunk is None else 1
    while True:
        if upto > 1:  # the first token came with the prompts
            decoding = decode(model, variables, decoding, rule, upto, mesh=mesh)
        num_new, *found = jax.device_get(
            (decoding.num_new, decoding.tokens_BM, decoding.logprobs_BM, decoding.finished_B)
        )
        yield Written(found[0][:, :num_new], found[1][:, :num_new], found[2])
        if chunk is None or num_new >= max_new_tokens or found[2].all():
            return
        upto = min(int(num_new) + chunk, max_new_tokens)


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
    max_length = cache_length(tokens_BT.shape[1], max_new_tokens)
    return prefill(model, variables, tokens_BT, segments_BT, rule, max_length=max_length, mesh=mesh)


def padded_length(num_tokens: int, *, in_chunks: bool = False) -> int:
    """How long a prompt is with its padding: a power of two, or as many chunks as it is read in."""
    time = max(SMALLEST_PROMPT, 1 << (num_tokens - 1).bit_length())
    if in_chunks:  # who shares a cache has none to spare: padding may not double it
        time = min(time, -(-num_tokens // PREFILL_CHUNK) * PREFILL_CHUNK)
    return time


def cache_length(time: int, num_new: int) -> int:
    """Tokens that a cache has room for, of a padded prompt and what it is continued with."""
    return -(-(time + num_new) // CACHE_MULTIPLE) * CACHE_MULTIPLE


def _pad_left(prompts: Sequence[Sequence[int]], *, in_chunks: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments [B, T]."""
    time = max(padded_length(len(prompt), in_chunks=in_chunks) for prompt in prompts)
    tokens_BT = np.full((len(prompts), time), PAD, np.int32)
    segments_BT = np.zeros((len(prompts), time), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, time - len(prompt) :] = prompt
        segments_BT[row, time - len(prompt) :] = 1
    return tokens_BT, segments_BT


def _cut(tokens: list[int], eos_id: int | None) -> list[int]:
    """Up to the first end token, itself included."""
    return tokens[: tokens.index(eos_id) + 1] if eos_id in tokens else tokens


def _rule(config: ModelConfig, settings: Settings) -> Rule:
    eos_id = settings.eos_id
    if eos_id is not None and not 0 <= eos_id < config.vocab_size:
        raise ValueError(
            f"eos_id is {eos_id}; it must be a token of the vocabulary, from 0 to {config.vocab_size - 1}, "
            "or None"
        )
    seed = settings.seed
    key = jnp.stack([*map(jax.random.key, seed)]) if isinstance(seed, tuple) else jax.random.key(seed)
    eos = jnp.asarray(NO_EOS if eos_id is None else eos_id, jnp.int32)
    return Rule(key=key, sampling=settings.sampling, eos_id=eos)


def _check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], settings: Settings) -> None:
    for row, (prompt, limit) in enumerate(zip(prompts, settings.limits(len(prompts)), strict=True)):
        if limit < 1:
            raise ValueError(f"max_new_tokens is {limit}; it must be at least 1")
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty; it must have at least one token")
        for position, token in enumerate(prompt):
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"token {token} at position {position} of prompt {row} is outside the vocabulary of "
                    f"{config.vocab_size}; it must be from 0 to {config.vocab_size - 1}"
                )
        if len(prompt) + limit > config.max_position_embeddings:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens and max_new_tokens is {limit}; together "
                f"they must not exceed model.max_position_embeddings, {config.max_position_embeddings}"
            )
