"""How a prompt is continued: `SamplingParams`, the only place where these values are checked."""

import dataclasses
import math
from collections.abc import Sequence

from zaya_jax.config import ModelConfig
from zaya_jax.errors import UserError
from zaya_jax.inference.structured.constraint import Constraint

EndTokens = int | Sequence[int] | None
"""One end token, several, or None."""
MAX_SEED = 2**32 - 1
"""Seeds are stored as uint32 on the device."""
MAX_TOP_LOGPROBS = 20
"""Limit of `num_top_logprobs`, as in OpenAI's API. It is a shape of the compiled programs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    Attributes:
      max_new_tokens: maximum number of new tokens, at least 1.
      temperature: divisor of the logits, finite and at least 0; 0 selects the most likely token (greedy).
      top_k: sample from this many most likely tokens; None or 0 disables the filter.
      top_p: sample from the smallest set of most likely tokens whose probability reaches this value, above 0
        and at most 1; None or 1 disables the filter. It applies to what `top_k` leaves.
      seed: seed of the random draws, from 0 to 2**32 - 1.
      stop_token_ids: tokens each of which ends the text. The end token is part of the generated tokens.
      stop: strings before which `complete` and `stream_text` cut the text, also where one spans tokens; of
        several the one that is complete first counts. The engine only knows tokens, and does not end at them.
      num_top_logprobs: number of most likely tokens to report for each new token, from 0 to 20.
      with_routing: whether to report the expert of every layer for each new token.
      constraint: compiled grammar that the text must match up to its end token; None for any text. A text
        that reaches `max_new_tokens` is the beginning of a match.
    """

    max_new_tokens: int
    temperature: float | int = 0.0
    top_k: int | None = None
    top_p: float | int | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    num_top_logprobs: int = 0
    with_routing: bool = False
    constraint: Constraint | None = None

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        # NaN fails every comparison, so the condition states what is valid.
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or above")
        if self.top_k is not None and self.top_k < 0:
            raise UserError(
                f"top_k is {self.top_k}; it must be a number of tokens, or None or 0 to disable it"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1, or None to disable it")
        check_seed(self.seed)
        if not 0 <= self.num_top_logprobs <= MAX_TOP_LOGPROBS:
            raise UserError(
                f"num_top_logprobs is {self.num_top_logprobs}; it must be from 0 to {MAX_TOP_LOGPROBS}"
            )
        # JSON has lists: parameters that another process sent must be hashable all the same.
        for name in ("stop_token_ids", "stop"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if "" in self.stop:
            raise UserError('a stop string is ""; it must have at least one character')


def check_seed(seed: int, name: str = "seed") -> None:
    """Checks that a seed fits into 32 bits.

    Args:
      seed: the seed.
      name: name of the option or field, for the error message.

    Raises:
      UserError: for a seed outside 0 to 2**32 - 1.
    """
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"{name} is {seed}; it must be from 0 to 2**32 - 1")


def as_token_ids(eos_id: EndTokens) -> tuple[int, ...]:
    """Returns end tokens as a tuple; an empty one for None."""
    if eos_id is None:
        return ()
    # Generation configs of Hugging Face list one end token or several.
    return (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)


def check_prompt(
    prompt: Sequence[int],
    params: SamplingParams,
    config: ModelConfig,
    *,
    max_length: int | None = None,
    name: str = "the prompt",
) -> None:
    """Checks that a model can continue a prompt.

    Args:
      prompt: token ids.
      params: how the prompt is continued.
      config: the model's configuration.
      max_length: maximum number of tokens of prompt and continuation together; None for the model's limit.
      name: how error messages call the prompt.

    Raises:
      UserError: for an empty prompt, a token outside the vocabulary, a text that is too long, or a
        constraint that the model cannot follow.
    """
    if len(prompt) == 0:
        raise UserError(f"{name} is empty; it must have at least one token")
    largest = config.vocab_size - 1
    for position, token in enumerate(prompt):
        if not 0 <= token <= largest:
            raise UserError(
                f"token {token} at position {position} of {name} is outside the vocabulary of "
                f"{config.vocab_size}; it must be from 0 to {largest}"
            )
    for token in params.stop_token_ids:
        if not 0 <= token <= largest:
            raise UserError(f"end token {token} is outside the vocabulary; it must be from 0 to {largest}")
    if params.constraint is not None:
        _check_constraint(params.constraint, params, config)
    # The prompt and the whole continuation must fit, because the cache is allocated for both.
    limit, owner = max_length, "max_length"
    if limit is None:
        limit, owner = config.max_position_embeddings, "model.max_position_embeddings"
    if len(prompt) + params.max_new_tokens > limit:
        raise UserError(
            f"{name} has {len(prompt)} tokens and max_new_tokens is {params.max_new_tokens}; together they "
            f"must not exceed {owner}, {limit}"
        )


def _check_constraint(constraint: Constraint, params: SamplingParams, config: ModelConfig) -> None:
    if not params.stop_token_ids:
        raise UserError("a constrained text needs stop_token_ids: without an end token it could not end")
    # A mask has a bit for each token of the vocabulary.
    if constraint.vocab_size != config.vocab_size:
        raise UserError(
            f"the constraint was compiled for {constraint.vocab_size} tokens, and the model has "
            f"{config.vocab_size}; compile it with the model's vocab_size"
        )
