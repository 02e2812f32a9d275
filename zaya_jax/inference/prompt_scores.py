"""How likely a network finds each token of a prompt, with the likeliest ones beside it.

Letters: B batch, T time, P tokens of a prompt, Z tokens of a chunk, D model width, V vocabulary, U likeliest.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from zaya_jax.inference.generate import padded_length
from zaya_jax.inference.scoring import LARGEST_CHUNK
from zaya_jax.model.zaya import Zaya, head, hidden_states

MOST_TOP = 20
_SIZES = (1, 5, MOST_TOP)
"""Numbers of likeliest tokens that are computed: a program for each, and not one for each number."""


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """What a network says of a prompt's tokens, of all but the first, before which nothing stands.

    Attributes:
      logprobs: natural logarithms of their probabilities.
      top: beside each the likeliest tokens at its place with theirs, likeliest first.
    """

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


def score_prompt(model: Zaya, variables: Mapping, tokens: Sequence[int], *, num_top: int) -> PromptScores:
    """Scores the tokens of a prompt.

    The probability of a token and those of the likeliest are of the same softmax: if it is the likeliest,
    they are equal to the last bit, which is how evaluation clients tell a greedy answer.

    Args:
      model: the network.
      variables: its weights.
      tokens: at least one.
      num_top: likeliest tokens beside each, at most `MOST_TOP`.
    """
    assert 0 <= num_top <= MOST_TOP, "who asks has checked it"
    num_scored, time = len(tokens) - 1, padded_length(len(tokens))
    tokens_BT, segments_BT = np.zeros((2, 1, time), np.int32)
    tokens_BT[0, : len(tokens)] = tokens
    segments_BT[0, : len(tokens)] = 1
    size = min(next(size for size in _SIZES if size >= num_top), model.config.vocab_size)
    found = jax.device_get(_scores(model, variables, tokens_BT, segments_BT, num_top=size))
    logprob_P, top_PU, top_logprob_PU = (each[:num_scored].tolist() for each in found)
    pairs = (zip(*each, strict=True) for each in zip(top_PU, top_logprob_PU, strict=True))
    return PromptScores(tuple(logprob_P), tuple(tuple(each)[:num_top] for each in pairs))


@functools.partial(jax.jit, static_argnames=("model", "num_top"))
def _scores(
    model: Zaya,
    variables: Mapping,
    tokens_BT: Int[Array, "1 T"],
    segments_BT: Int[Array, "1 T"],
    *,
    num_top: int,
) -> tuple[Float[Array, " P"], Int[Array, "P U"], Float[Array, "P U"]]:
    """Of what each token is followed by; the last one's, and those of padding, mean nothing."""
    params, bias_LX = variables["params"], variables["router_bias"]["layers"]
    # Padding has segment 0, which no token looks at.
    hidden = hidden_states(model.config, model.execution, params, bias_LX, tokens_BT, None, segments_BT)
    targets_P = jnp.roll(tokens_BT[0], -1)
    # Both are powers of two, so that chunks divide the prompt. All its logits at once may be many gigabytes.
    chunk = min(len(targets_P), LARGEST_CHUNK)

    def visit(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_ZD, targets_Z = rows
        logprob_ZV = jax.nn.log_softmax(head(model.config, params, x_ZD[None])[0], axis=1)
        taken_Z = jnp.take_along_axis(logprob_ZV, targets_Z[:, None], axis=1)[:, 0]
        top_logprob_ZU, top_ZU = lax.top_k(logprob_ZV, num_top)
        return taken_Z, top_ZU, top_logprob_ZU

    x_PD = hidden.x_BTD[0]
    found = lax.map(visit, (x_PD.reshape(-1, chunk, x_PD.shape[1]), targets_P.reshape(-1, chunk)))
    logprob_P, top_PU, top_logprob_PU = (each.reshape(-1, *each.shape[2:]) for each in found)
    return logprob_P, top_PU, top_logprob_PU
