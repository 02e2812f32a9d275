"""What a single token is in an answer: its name, and its bytes where it tells them."""

import functools

from zaya_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from zaya_jax.inference.text import UNKNOWN


class TokenTexts:
    """The names and bytes of a tokenizer's tokens, each found once.

    Attributes:
      tokenizer: whose they are.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        if isinstance(tokenizer, HuggingFaceTokenizer):
            names = tokenizer.special_ids
        else:
            assert isinstance(tokenizer, ByteTokenizer), "there are no others"
            names = tokenizer.specials
        self._specials = {number: name for name, number in names.items()}
        self._known: dict[int, tuple[str, bytes]] = {}

    def name(self, token: int) -> str:
        """A token's text, also of a special one. Part of a character is bytes:\\xNN, as at OpenAI."""
        return self._of(token)[0]

    def utf8(self, token: int) -> list[int]:
        """The numbers of a token's bytes."""
        return list(self._of(token)[1])

    def _of(self, token: int) -> tuple[str, bytes]:
        # At most the vocabulary: a token comes from the network, or was held against its size.
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> tuple[str, bytes]:
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
            return bytes([token - 3]) if 3 <= token < 259 else b""
        # Behind another token: many tokenizers drop the space of a text's first one.
        text = tokenizer.decode([*self._anchor, token])
        return text.removeprefix(tokenizer.decode(self._anchor)).replace(UNKNOWN, "").encode()

    @functools.cached_property
    def _anchor(self) -> list[int]:
        return self.tokenizer.encode("a")
