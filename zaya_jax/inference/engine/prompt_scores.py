"""Log-probabilities of the tokens of a prompt, with the most likely tokens at each position.

Letters: T tokens of a chunk, Z tokens whose logits exist at a time, D model width, V vocabulary, U top
  tokens.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from zaya_jax.inference.engine.cache_rows import make_cache
from zaya_jax.inference.engine.decoder import PromptChunk, read_hidden
from zaya_jax.inference.engine.sampling_params import MAX_TOP_LOGPROBS
from zaya_jax.inference.engine.sequence import prompt_chunk
from zaya_jax.inference.evaluation.scoring import MAX_LOGIT_CHUNK
from zaya_jax.model.cache import Cache
from zaya_jax.model.zaya import Zaya, head
from zaya_jax.platform.compiler import WIDE_VECTORS

SCORE_CHUNK = 256
"""Tokens that the model reads at once. A prompt of any length is read in chunks by one compiled program."""


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """Scores of all tokens of a prompt but the first, which nothing precedes.

    Attributes:
      logprobs: natural logarithm of each token's probability.
      top: most likely tokens at each position with their log-probabilities, most likely first.
    """

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


class PromptScorer:
    """Scores prompts, one at a time. It belongs to one thread.

    One program serves prompts of all lengths and all numbers of top tokens, so that no client waits for a
    compilation.
    """

    def __init__(self, model: Zaya, variables: Mapping, *, max_length: int):
        """Allocates the cache of one prompt.

        Args:
          model: the model.
          variables: its weights, matrices in the compute dtype.
          max_length: maximum number of tokens of a prompt.
        """
        self._model, self._variables = model, variables
        self._num_top = min(MAX_TOP_LOGPROBS, model.config.vocab_size)
        self._cache = make_cache(model, variables, 1, max_length, padding="right")

    def warm_up(self) -> None:
        """Compiles the program, so that the first request does not wait for it."""
        self.score([0], num_top=0)

    def score(self, tokens: Sequence[int], num_top: int) -> PromptScores:
        """Scores the tokens of a prompt.

        The probability of a token and those of the top tokens come from the same softmax: if the token is the
        most likely one, they are bitwise equal, which is how evaluation clients recognize a greedy answer.

        Args:
          tokens: token ids, at least one and at most `max_length`.
          num_top: number of top tokens per position, at most `MAX_TOP_LOGPROBS`.
        """
        assert 0 <= num_top <= MAX_TOP_LOGPROBS, "the caller has checked the number"
        chunks = [self._score_chunk(tokens, first) for first in range(0, len(tokens), SCORE_CHUNK)]
        # The last token has no target: its scores, and those of padding, are cut off.
        logprobs, top, top_logprobs = (
            np.concatenate(parts)[: len(tokens) - 1] for parts in zip(*chunks, strict=True)
        )
        pairs = (zip(*each, strict=True) for each in zip(top.tolist(), top_logprobs.tolist(), strict=True))
        # The program computes the largest number of top tokens for every client.
        return PromptScores(tuple(logprobs.tolist()), tuple(tuple(each)[:num_top] for each in pairs))

    def _score_chunk(self, tokens: Sequence[int], first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores the targets of a chunk, which are the tokens shifted by one."""
        inputs = tokens[first : first + SCORE_CHUNK]
        targets = tokens[first + 1 : first + 1 + SCORE_CHUNK]
        targets_T = np.zeros(SCORE_CHUNK, np.int32)
        targets_T[: len(targets)] = targets
        chunk = prompt_chunk([inputs], SCORE_CHUNK, [0], [first], is_last=False)
        self._cache, scores = _score(
            self._model, self._variables, self._cache, chunk, jnp.asarray(targets_T), num_top=self._num_top
        )
        return jax.device_get(scores)


@functools.partial(
    jax.jit,
    static_argnames=("model", "num_top"),
    donate_argnames="cache",
    compiler_options=WIDE_VECTORS,
)
def _score(
    model: Zaya,
    variables: Mapping,
    cache: Cache,
    chunk: PromptChunk,
    targets_T: Int[Array, " T"],
    *,
    num_top: int,
) -> tuple[Cache, tuple[Float[Array, " T"], Int[Array, "T U"], Float[Array, "T U"]]]:
    """Scores each target; the last target of the prompt, and those of padding, are meaningless."""
    cache, hidden = read_hidden(model, variables, cache, chunk)
    # All logits at once could take many gigabytes.
    size = min(len(targets_T), MAX_LOGIT_CHUNK)

    def visit(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_ZD, targets_Z = rows
        logprob_ZV = jax.nn.log_softmax(head(model.config, variables["params"], x_ZD[None])[0], axis=1)
        logprob_Z = jnp.take_along_axis(logprob_ZV, targets_Z[:, None], axis=1)[:, 0]
        # From the same softmax as the score of the target, so that both numbers are bitwise equal.
        top_logprob_ZU, top_ZU = lax.top_k(logprob_ZV, num_top)
        return logprob_Z, top_ZU, top_logprob_ZU

    x_TD = hidden.x_BTD[0]
    scores = lax.map(visit, (x_TD.reshape(-1, size, x_TD.shape[1]), targets_T.reshape(-1, size)))
    logprob_T, top_TU, top_logprob_TU = (each.reshape(-1, *each.shape[2:]) for each in scores)
    return cache, (logprob_T, top_TU, top_logprob_TU)
