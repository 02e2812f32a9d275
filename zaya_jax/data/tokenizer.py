"""Tokenizers behind one small interface: plain bytes, or a Hugging Face tokenizer.json.

Letters: V vocabulary.
"""

import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back: what corpora, runs and generation ask of a tokenizer."""

    @property
    def name(self) -> str:
        """What `load_tokenizer` was asked for."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same text for tokenizers of the same content, wherever their file lies."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, one more than the highest id."""
        ...

    @property
    def pad_id(self) -> int:
        """The token that fills up a last block."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def bos_id(self) -> int:
        """The token that begins a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text; no specials are added, and no text stands for a special."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; specials are dropped, bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token stands for, int32 [V]; 0 for specials."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """Loads "byte", "byte-chat", or the Hugging Face tokenizer.json at the path `name`.

    Raises:
      ValueError: when there is no such file, or it is not a tokenizer that corpora can use.
    """
    if name in BYTE_TOKENIZERS:
        return BYTE_TOKENIZERS[name]()
    return HuggingFaceTokenizer(name)


class ByteTokenizer:
    """Byte b is token b + 3; below are padding, end and beginning of a document."""

    name = "byte"
    fingerprint = "byte"
    vocab_size = 259
    pad_id = 0
    eos_id = 1
    bos_id = 2
    specials: Mapping[str, int] = {"<pad>": 0, "<eos>": 1, "<bos>": 2}

    def encode(self, text: str) -> list[int]:
        """Ids of the text's UTF-8 bytes; a surrogate-escaped byte is that byte again."""
        try:
            return self.encode_bytes(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:  # a lone surrogate that is no escaped byte: keep its three bytes
            return self.encode_bytes(text.encode("utf-8", "surrogatepass"))

    def encode_bytes(self, raw: bytes) -> list[int]:
        """Ids of any bytes, UTF-8 or not: of each byte its number plus 3."""
        return [byte + 3 for byte in raw]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; specials, and ids that only a padded vocabulary has, are dropped."""
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode("utf-8", "replace")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token stands for, int32 [V]: 1, and 0 for specials."""
        return np.array([0] * 3 + [1] * 256 + [0] * (self.vocab_size - 259), np.int32)


class ByteChatTokenizer(ByteTokenizer):
    """Bytes as "byte" has them, and behind them the four borders of chats.

    A run on "byte" can go on with it, where the embedding has rows left: no token is another.
    """

    name = "byte-chat"
    fingerprint = "byte-chat"
    vocab_size = 263
    specials: Mapping[str, int] = {
        **ByteTokenizer.specials,
        "<|im_start|>": 259,
        "<|im_end|>": 260,
        "<think>": 261,
        "</think>": 262,
    }


BYTE_TOKENIZERS: Mapping[str, type[ByteTokenizer]] = {
    each.name: each for each in (ByteTokenizer, ByteChatTokenizer)
}
"""Those that need no file, by name."""


class HuggingFaceTokenizer:
    """A tokenizer.json: byte-level BPE, or SentencePiece's BPE and Unigram."""

    def __init__(self, path: str):
        """Reads the file.

        Raises:
          ValueError: when it is missing, no tokenizer.json, of another kind of model, or without
            one of the special tokens that mark documents.
        """
        raw = _read_tokenizer_file(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # the package raises bare Exception for a file that it cannot read
            raise ValueError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
        # "<eos>" written in a document is text; taken for the token, it would forge a border.
        self._tokenizer.encode_special_tokens = True
        self.name = path
        self.fingerprint = hashlib.blake2b(raw, digest_size=16).hexdigest()
        self._vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1
        self.bos_id = self._find_special("begins a document", ("<bos>", "<s>"))
        self.eos_id = self._find_special("ends a document", ("<eos>", "</s>"))
        self.pad_id = self._find_special("fills up a block", ("<pad>",))
        self._byte_level = _is_byte_level(path, self._tokenizer.to_str())

    def _find_special(self, purpose: str, names: Sequence[str]) -> int:
        specials = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        for name in names:
            if name in specials:
                return specials[name]
        raise ValueError(
            f"{self.name} has no special token {' or '.join(names)}; the one that {purpose} must be called so"
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a text; no specials are added, and no text stands for a special."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; specials are dropped, bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token stands for, int32 [V]; 0 for specials and unused ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        bytes_V = np.zeros(self.vocab_size, np.int32)
        for token, i in self._vocabulary.items():
            if i not in added:
                bytes_V[i] = len(token) if self._byte_level else _count_piece_bytes(token)
            elif not added[i].special:  # an added token is written as it is, also in byte-level files
                bytes_V[i] = _count_piece_bytes(token)
        return bytes_V


def _read_tokenizer_file(path: str) -> bytes:
    if not pathlib.Path(path).is_file():
        raise ValueError(f'there is no tokenizer "{path}"; it must be "byte" or the path of a tokenizer.json')
    return pathlib.Path(path).read_bytes()


def _is_byte_level(path: str, serialized: str) -> bool:
    """Whether tokens are spelled in the ByteLevel alphabet, one character a byte.

    Raises:
      ValueError: for WordPiece and the like, whose tokens do not tell their bytes.
    """
    fields = json.loads(serialized)
    kind = fields["model"]["type"]
    if kind not in ("BPE", "Unigram"):
        raise ValueError(f"{path} is a {kind} tokenizer; it must be BPE or Unigram")
    return '"ByteLevel"' in json.dumps(fields["decoder"])


def _count_piece_bytes(piece: str) -> int:
    """Bytes of a SentencePiece token: U+2581 is a space, <0xNN> a byte."""
    if _BYTE_TOKEN.fullmatch(piece):
        return 1
    return len(piece.replace("\u2581", " ").encode("utf-8"))
