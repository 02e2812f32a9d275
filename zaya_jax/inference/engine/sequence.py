"""A text while it is generated, on the host: its tokens, its stop conditions, and its row of the decoder.

Letters: B rows, M decode steps, L layers.
"""

import collections.abc
import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

from zaya_jax.inference.engine.decoder import (
    DecodedSteps,
    DecodeRows,
    PromptChunk,
    SampledTokens,
    pad_end_tokens,
)
from zaya_jax.inference.engine.sampling import RowSampling, row_sampling
from zaya_jax.inference.engine.sampling_params import SamplingParams

Reason = Literal["stop", "length", "cancelled"]
"""Why a text ended: at an end token, at its maximum length, or because the client cancelled it."""


@dataclasses.dataclass(frozen=True)
class NewToken:
    """A generated token.

    Attributes:
      token: token id.
      logprob: natural logarithm of the probability that the model gave it, before temperature, `top_k` and
        `top_p`.
      top: most likely tokens at this position with their log-probabilities, most likely first; as many as
        `SamplingParams.num_top_logprobs`.
      experts_L: router class of this token in each layer; None unless requested, and None for an end token,
        which the model never reads.
      probabilities_L: router probability of that class in each layer; None likewise.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    experts_L: tuple[int, ...] | None = None
    probabilities_L: tuple[float, ...] | None = None


class Sequence:
    """Tokens of one prompt and its continuation.

    Attributes:
      params: how the prompt is continued.
      row: row of the cache.
      tokens: prompt and generated tokens.
      num_prompt: number of tokens of the prompt.
      num_computed: number of tokens that are in the cache.
      reason: why the text ended; None while it continues.
      constraint: state of the text in its grammar; None for any text.
    """

    def __init__(self, prompt: collections.abc.Sequence[int], params: SamplingParams, row: int):
        self.params, self.row = params, row
        self.tokens, self.num_prompt = list(prompt), len(prompt)
        self.num_computed = 0
        self.reason: Reason | None = None
        ends = params.stop_token_ids
        self.constraint = None if params.constraint is None else params.constraint.start(self.tokens, ends)
        self._ready: list[NewToken] = []
        self._without_routing: NewToken | None = None

    @property
    def num_new(self) -> int:
        """Number of tokens after the prompt, those not yet sent included."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_prefilling(self) -> bool:
        """Whether some tokens of the prompt are not in the cache yet."""
        return self.num_computed < self.num_prompt

    @property
    def has_room(self) -> bool:
        """Whether the next token will be part of the text."""
        return self.reason is None and self.num_new < self.params.max_new_tokens

    @property
    def num_left(self) -> int:
        """Maximum number of decode steps left."""
        if self.reason is not None:
            return 0
        # The routing of a token is known when the model reads it: with routing the last token is read too.
        return self.params.max_new_tokens - self.num_new + self.params.with_routing

    def set_routing(self, experts_L: list[int], probabilities_L: list[float]) -> None:
        """Adds the routing of the newest token, which a decode step has just read."""
        # The first decode step reads the token of the prefill, and so on: routing always arrives one step
        # late.
        if self._without_routing is not None:
            token = dataclasses.replace(
                self._without_routing, experts_L=tuple(experts_L), probabilities_L=tuple(probabilities_L)
            )
            self._ready.append(token)
            self._without_routing = None

    def append(self, new: NewToken) -> None:
        """Appends a sampled token, and applies the stop conditions."""
        if self.num_new == self.params.max_new_tokens:  # this step was for the routing of the last token
            self.reason = "length"
            return
        self.tokens.append(new.token)
        if self.constraint is not None:
            self.constraint.advance(new.token)
        # The device applies the same conditions to its rows; the host repeats them because it owns the
        # result.
        is_end = new.token in self.params.stop_token_ids
        if self.params.with_routing and not is_end:
            self._without_routing = new
        else:
            self._ready.append(new)
        if is_end:
            self.reason = "stop"
        elif self.num_left == 0:
            self.reason = "length"

    def pop_ready(self) -> tuple[NewToken, ...]:
        """Returns the tokens that are complete, each once."""
        ready, self._ready = tuple(self._ready), []
        return ready


_IDLE = SamplingParams(max_new_tokens=1)
"""Parameters of a row without a sequence: those that cost least."""


def sampling_of(
    rows: collections.abc.Sequence[Sequence | None],
    vocab_size: int,
    *,
    streams: collections.abc.Sequence[int] | None = None,
) -> RowSampling:
    """Returns the sampling parameters of rows as arrays; see `row_sampling`."""
    params = [_IDLE if each is None else each.params for each in rows]
    num_generated = [0 if each is None else each.num_new for each in rows]
    return row_sampling(params, vocab_size, num_generated=num_generated, streams=streams)


def decode_rows(rows: collections.abc.Sequence[Sequence | None]) -> DecodeRows:
    """Returns the decode state of rows; those without a sequence are inactive."""
    # Build the arrays in NumPy: one transfer each, instead of one small device operation per row.
    newest_B, num_left_B = np.zeros((2, len(rows)), np.int32)
    for row, each in enumerate(rows):
        if each is not None:
            newest_B[row], num_left_B[row] = each.tokens[-1], each.num_left
    ends_BJ = pad_end_tokens([() if each is None else each.params.stop_token_ids for each in rows])
    return DecodeRows(jnp.asarray(newest_B), jnp.asarray(num_left_B), jnp.asarray(ends_BJ))


def prompt_chunk(
    pieces: collections.abc.Sequence[collections.abc.Sequence[int]],
    time: int,
    rows: collections.abc.Sequence[int],
    lengths: collections.abc.Sequence[int],
    *,
    is_last: bool,
) -> PromptChunk:
    """Returns a chunk of one or several prompts, padded on the right.

    Args:
      pieces: token ids of each row, at most `time`.
      time: T.
      rows: row of the cache of each piece; one out of range for a piece without a prompt.
      lengths: tokens of each row before the chunk.
      is_last: whether the prompts end with the chunk.
    """
    tokens_BT, segments_BT = np.zeros((2, len(pieces), time), np.int32)
    for row, piece in enumerate(pieces):
        tokens_BT[row, : len(piece)], segments_BT[row, : len(piece)] = piece, 1
    return PromptChunk(
        tokens_BT=jnp.asarray(tokens_BT),
        segments_BT=jnp.asarray(segments_BT),
        row_B=jnp.asarray(rows, jnp.int32),
        length=jnp.asarray(lengths, jnp.int32),
        is_last=jnp.asarray(is_last),
    )


def token_at(sampled: SampledTokens, index: tuple[int, ...], num_top: int) -> NewToken:
    """Returns one of the sampled tokens.

    Args:
      sampled: results of the decoder, on the host.
      index: row, or step and row.
      num_top: number of top log-probabilities.
    """
    top = ()
    if num_top:  # most often 0, and then reading the arrays takes longer than everything else
        fields = sampled.top_tokens_BJ, sampled.top_logprobs_BJ
        top = tuple(zip(*(x[index][:num_top].tolist() for x in fields), strict=True))
    return NewToken(int(sampled.token_B[index]), float(sampled.logprob_B[index]), top)


def active_steps(steps: DecodedSteps, row: int) -> list[int]:
    """Returns the steps in which a row was active."""
    # A row is active in a prefix of the steps: up to its end token, its limit, or the end of the call.
    return np.flatnonzero(np.asarray(steps.is_active_MB)[:, row]).tolist()


def tokens_of_row(steps: DecodedSteps, row: int) -> list[NewToken]:
    """Returns the tokens of the steps in which a row was active, without most likely ones, on the host."""
    active = active_steps(steps, row)
    # Whole columns at once: indexing the arrays for each token takes several times as long.
    fields = (np.asarray(x)[active, row].tolist() for x in (steps.sampled.token_B, steps.sampled.logprob_B))
    return [NewToken(token, logprob, ()) for token, logprob in zip(*fields, strict=True)]
