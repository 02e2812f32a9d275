"""The state of one text in its grammar, and the mask of its next token.

Letters: B rows, V vocabulary, W words of 32 bits of a mask: V / 32, rounded up.
"""

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from zaya_jax.errors import UserError

WORD_BITS = 32
ALL_TOKENS = np.uint32(0xFFFF_FFFF)
"""Word of a mask that allows all of its tokens."""
DEAD_END = "NoExtensionBias"
"""llguidance's error where no token may follow."""
_Phase = Literal["start", "thought", "answer"]


class Constraint:
    """A compiled grammar, which any number of texts may follow at once. `GrammarCompiler` makes them.

    Attributes:
      vocab_size: V, the vocabulary of the model.
      eos_id: end token of the matcher.
      think_ids: tokens that open and close a thought, during which the grammar waits; None without thoughts.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_id: int, think_ids: tuple[int, int] | None = None):
        """Keeps a matcher of llguidance, of which each text gets a copy."""
        self._matcher = matcher
        self.vocab_size, self.eos_id, self.think_ids = vocab_size, eos_id, think_ids

    def with_thoughts(self, think_ids: tuple[int, int] | None) -> "Constraint":
        """Returns the same grammar for texts that may begin with a thought, or may not."""
        return Constraint(self._matcher, self.vocab_size, self.eos_id, think_ids)

    def start(self, prompt: Sequence[int], end_ids: Sequence[int]) -> "ConstraintState":
        """Returns the state of a text before its first token.

        Args:
          prompt: tokens of the prompt, which may end within a thought.
          end_ids: tokens that end the text.
        """
        return ConstraintState(self._matcher.deep_copy(), self.eos_id, self.think_ids, prompt, end_ids)


class ConstraintState:
    """What a text may continue with: anything but its end within a thought, then what the grammar accepts."""

    def __init__(
        self,
        matcher: Any,
        eos_id: int,
        think_ids: tuple[int, int] | None,
        prompt: Sequence[int],
        end_ids: Sequence[int],
    ):
        self.matcher, self._eos_id, self._end_ids = matcher, eos_id, tuple(end_ids)
        self._open_id, self._close_id = think_ids or (None, None)
        self._phase: _Phase = _phase_after(prompt, think_ids)

    @property
    def follows_grammar(self) -> bool:
        """Whether the next token may belong to the grammar."""
        return self._phase != "thought"

    def finish_mask(self, mask_W: np.ndarray) -> None:
        """Turns the mask of the grammar into the mask of the next token.

        Args:
          mask_W: uint32, a bit per token: what `matcher` accepts, or anything in a thought.

        Raises:
          UserError: if the grammar has become too complex, or no token of the vocabulary continues it.
        """
        error = self.matcher.get_error() if self.follows_grammar else ""
        if error and DEAD_END not in error:
            raise UserError(f"the answer's grammar is too complex: {error:.200}")
        can_end = self.follows_grammar and self.matcher.is_accepting()
        # llguidance knows the tokenizer's end token, while a text may end with others, and with several.
        _set_bit(mask_W, self._eos_id, False)
        for token in self._end_ids:
            _set_bit(mask_W, token, can_end)
        if self._phase == "start" and self._open_id is not None:
            _set_bit(mask_W, self._open_id, True)
        if error or not mask_W.any():
            raise UserError("no token of the vocabulary continues the answer as its grammar requires")

    def advance(self, token: int) -> None:
        """Appends a token, which the mask allowed."""
        # The text is complete, and nothing reads this state again.
        if token in self._end_ids:
            return
        if self._phase == "start" and token == self._open_id:
            self._phase = "thought"
        elif self._phase == "thought":
            self._phase = "answer" if token == self._close_id else "thought"
        else:
            self._phase = "answer"
            # An error of the matcher, such as a limit that it exceeds, is reported with the next mask.
            self.matcher.consume_token(token)


def fill_masks(states: Mapping[int, ConstraintState], mask_BW: np.ndarray) -> dict[int, UserError]:
    """Writes the masks of constrained rows, in parallel on the cores of the host.

    Args:
      states: states by row.
      mask_BW: uint32, where all tokens are allowed so far.

    Returns:
      Errors by row; the masks of these rows allow all tokens.
    """
    # A thought has no grammar yet: its mask already allows all tokens.
    matchers = [(each.matcher, row) for row, each in states.items() if each.follows_grammar]
    if matchers:
        num_rows, num_words = mask_BW.shape
        word_bytes = mask_BW.itemsize
        # The pointer stays valid during the call, which writes each row at its place and releases the
        # interpreter lock.
        _executor().unsafe_compute_mask_ptr(matchers, mask_BW.ctypes.data, num_words * word_bytes, num_rows)
    errors = {}
    # An answer that cannot continue must not stop the others of its batch.
    for row, state in states.items():
        try:
            state.finish_mask(mask_BW[row])
        except UserError as error:
            errors[row] = error
            mask_BW[row] = ALL_TOKENS
    return errors


def all_tokens(num_rows: int, vocab_size: int) -> np.ndarray:
    """Returns masks that allow all tokens, uint32 [B, W]."""
    return np.full((num_rows, -(-vocab_size // WORD_BITS)), ALL_TOKENS, np.uint32)


# One pool of threads for all engines of the process.
@functools.cache
def _executor() -> Any:
    return importlib.import_module("llguidance").LLExecutor()


def _phase_after(prompt: Sequence[int], think_ids: tuple[int, int] | None) -> _Phase:
    if think_ids is None:
        return "answer"
    # The last mark decides: a template may open a thought for the model, or close one to disable thinking.
    last = next((token for token in reversed(prompt) if token in think_ids), None)
    return "thought" if last == think_ids[0] else "start"


def _set_bit(mask_W: np.ndarray, token: int, value: bool) -> None:
    bit = np.uint32(1 << token % WORD_BITS)
    if value:
        mask_W[token // WORD_BITS] |= bit
    else:
        mask_W[token // WORD_BITS] &= ~bit
