"""Samples the next token of rows that a grammar constrains, among the tokens that it accepts.

The decoder samples all rows without masks, and returns its logits. While the device computes them, the host
computes the masks of the constrained rows; a second, small program then samples these rows again. Rows
without a grammar keep the decoder's tokens, so that they do not depend on the grammars of others.

Letters: B rows, V vocabulary, W words of 32 bits of a mask.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from zaya_jax.errors import UserError
from zaya_jax.inference.engine import sequence as sequences
from zaya_jax.inference.engine.sampling import RowSampling, sample
from zaya_jax.inference.structured.constraint import WORD_BITS, all_tokens, fill_masks


@dataclasses.dataclass(frozen=True)
class MaskedTokens:
    """The next tokens of constrained rows.

    Attributes:
      tokens: token and its log-probability, by row.
      errors: why the grammar of a row cannot be followed, by row.
    """

    tokens: Mapping[int, tuple[int, float]]
    errors: Mapping[int, UserError]

    def replace(self, new: sequences.NewToken, row: int) -> sequences.NewToken:
        """Returns the token of a row: the decoder's, or that of its grammar."""
        if row not in self.tokens:
            return new
        token, logprob = self.tokens[row]
        return dataclasses.replace(new, token=token, logprob=logprob)


def sample_constrained(
    rows: Sequence[sequences.Sequence | None], logits_BV: jax.Array, sampling: RowSampling
) -> MaskedTokens:
    """Samples the next token of every row that a grammar constrains.

    Args:
      rows: sequences by row; None for a row without one.
      logits_BV: logits of the decoder, which the device may still be computing.
      sampling: sampling parameters that the decoder used.
    """
    states = {
        row: each.constraint
        for row, each in enumerate(rows)
        if each is not None and each.constraint is not None and each.has_room
    }
    if not states:
        return MaskedTokens({}, {})
    mask_BW = all_tokens(*logits_BV.shape)
    errors = fill_masks(states, mask_BW)
    # The mask is small: a bit per token, 32 KiB per row for 262,144 tokens.
    # Only now the host waits for the device.
    token_B, logprob_B = jax.device_get(sample_masked(logits_BV, jnp.asarray(mask_BW), sampling))
    tokens = {row: (int(token_B[row]), float(logprob_B[row])) for row in states if row not in errors}
    return MaskedTokens(tokens, errors)


@jax.jit
def sample_masked(
    logits_BV: Float[Array, "B V"], mask_BW: UInt[Array, "B W"], sampling: RowSampling
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Samples the next token of each row among the tokens of its mask.

    Args:
      logits_BV: logits of the next token.
      mask_BW: masks as words of 32 bits, the first token in the lowest bit.
      sampling: sampling parameters. The filters apply to what the mask leaves.

    Returns:
      Token ids, and the natural logarithms of the probabilities that the model gave them, before the mask,
      temperature and filters, as for rows without a mask.
    """
    allowed_BV = unpack_mask(mask_BW, logits_BV.shape[1])
    # Minus infinity has no probability at any temperature, and ranks last in every filter.
    token_B = sample(jnp.where(allowed_BV, logits_BV, -jnp.inf), sampling)
    total_B = jax.nn.logsumexp(logits_BV, axis=-1)
    return token_B, jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0] - total_B


def unpack_mask(mask_BW: UInt[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """Returns the bits of masks, one per token."""
    shifts = jnp.arange(WORD_BITS, dtype=jnp.uint32)
    bits_BWJ = (mask_BW[:, :, None] >> shifts) & 1
    return bits_BWJ.reshape(len(mask_BW), -1)[:, :vocab_size] != 0


def warm_up(logits_BV: jax.Array, sampling: RowSampling) -> None:
    """Compiles `sample_masked` for the logits of a decoder's program."""
    sample_masked(logits_BV, jnp.asarray(all_tokens(*np.shape(logits_BV))), sampling)
