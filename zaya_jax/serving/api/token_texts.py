"""Names and bytes of single tokens, as the log-probabilities of a response contain them."""

import functools

from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from zaya_jax.inference.engine.text_stream import UNKNOWN


def special_token_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns the names of all special tokens, by token number."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        names = tokenizer.special_ids
    else:
        assert isinstance(tokenizer, ByteTokenizer), "there are no other tokenizers"
        names = tokenizer.specials
    return {number: name for name, number in names.items()}


class TokenTexts:
    """Cache of the names and bytes of a tokenizer's tokens.

    Attributes:
      tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._specials = special_token_names(tokenizer)
        self._cache: dict[int, tuple[str, bytes]] = {}

    def name(self, token: int) -> str:
        """Returns the text of a token; OpenAI's form bytes:\\xNN for a token that is part of a character."""
        return self._lookup(token)[0]

    def utf8(self, token: int) -> list[int]:
        """Returns the bytes of a token as a list of numbers."""
        return list(self._lookup(token)[1])

    def _lookup(self, token: int) -> tuple[str, bytes]:
        # The cache is bounded by the vocabulary: tokens come from the network, or were checked against its
        # size.
        if token not in self._cache:
            self._cache[token] = self._compute(token)
        return self._cache[token]

    def _compute(self, token: int) -> tuple[str, bytes]:
        if token in self._specials:
            return self._specials[token], self._specials[token].encode()
        raw = self._raw(token)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _raw(self, token: int) -> bytes:
        tokenizer = self.tokenizer
        if isinstance(tokenizer, HuggingFaceTokenizer) and (raw := tokenizer.byte_piece(token)) is not None:
            return raw
        if isinstance(tokenizer, ByteTokenizer):
            # The first three tokens and those from 259 on are special tokens without bytes.
            return bytes([token - 3]) if 3 <= token < 259 else b""
        # Many tokenizers drop the space of a text's first token: decode this one as the second.
        text = tokenizer.decode([*self._anchor, token])
        return text.removeprefix(tokenizer.decode(self._anchor)).replace(UNKNOWN, "").encode()

    @functools.cached_property
    def _anchor(self) -> list[int]:
        return self.tokenizer.encode("a")
