"""Names and bytes of single tokens, as the log-probabilities of a response contain them."""

import functools

from zaya_jax.data.tokenizers.tokenizer import Tokenizer


class TokenTexts:
    """Cache of the names and bytes of a tokenizer's tokens.

    Attributes:
      tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        # The cache is bounded by the vocabulary: tokens come from the network, or were checked against its
        # size.
        self._lookup = functools.cache(self._compute)

    def name(self, token: int) -> str:
        """Returns the text of a token; OpenAI's form bytes:\\xNN for a token that is part of a character."""
        return self._lookup(token)[0]

    def utf8(self, token: int) -> list[int]:
        """Returns the bytes of a token as a list of numbers."""
        return list(self._lookup(token)[1])

    def _compute(self, token: int) -> tuple[str, bytes]:
        name = self.tokenizer.special_names.get(token)
        if name is not None:
            return name, name.encode()
        raw = self.tokenizer.spelling(token)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw
