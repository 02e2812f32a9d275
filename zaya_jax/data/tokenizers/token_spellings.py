"""What single tokens spell: the names of special tokens, and the bytes of all others."""

import functools

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError

_UNKNOWN = "\ufffd"
"""Replacement character, which a tokenizer writes for bytes that are not a character."""


def special_token_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns the names of all special tokens, by token number."""
    return {number: name for name, number in tokenizer.special_ids.items()}


class TokenSpellings:
    """The bytes that the tokens of a tokenizer spell.

    Attributes:
      tokenizer: the tokenizer.
      special_names: names of all special tokens, by token number.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.special_names = special_token_names(tokenizer)

    def raw(self, token: int) -> bytes:
        """Returns the bytes of a token that is not special, as it spells them within a text."""
        tokenizer = self.tokenizer
        if (raw := tokenizer.byte_piece(token)) is not None:
            return raw
        # Many tokenizers drop the space of a text's first token: decode this one as the second.
        text = tokenizer.decode([*self._anchor, token])
        return text.removeprefix(tokenizer.decode(self._anchor)).replace(_UNKNOWN, "").encode()

    def vocabulary(self, vocab_size: int) -> list[bytes]:
        """Returns the bytes of every token; empty for those that spell no text.

        Args:
          vocab_size: V of the model, which may be larger than the tokenizer's.

        Raises:
          UserError: if the bytes of a token depend on the tokens around it.
        """
        if self.tokenizer.token_bytes() is None:
            raise UserError(
                f'the tokenizer "{self.tokenizer.name}" writes a token differently in different places, so '
                "that no grammar can constrain its texts; use a tokenizer of bytes, BPE or Unigram"
            )
        # The unknown token is written as a name or as nothing, and never as the text that it replaced.
        silent = {*self.special_names, self.tokenizer.unknown_id}
        num_tokens = min(vocab_size, self.tokenizer.vocab_size)
        spelled = [b"" if token in silent else self.raw(token) for token in range(num_tokens)]
        return spelled + [b""] * (vocab_size - num_tokens)

    @functools.cached_property
    def _anchor(self) -> list[int]:
        return self.tokenizer.encode("a")
