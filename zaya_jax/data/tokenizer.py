"""Tokenizers behind one small interface: plain bytes, or any Hugging Face tokenizer.json.

Letters: V vocabulary.
"""

import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tokenizers

from zaya_jax.config import DataConfig
from zaya_jax.data.borders import Borders
from zaya_jax.data.specials import SpecialNames, find_specials
from zaya_jax.data.words import WordMemory, find_cuts

_SPACES_ARE_LOST = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")
"""Ways to split a text into words that give no token the spaces between them."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back: what corpora, runs and generation ask of a tokenizer."""

    @property
    def name(self) -> str:
        """What `load_tokenizer` was asked for."""
        ...

    @property
    def names(self) -> SpecialNames:
        """The special tokens that it was told of."""
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
        """The token that fills up a last block: EOS in a tokenizer without one for that."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token that begins a document; None in a tokenizer without one."""
        ...

    @property
    def borders(self) -> Borders:
        """How documents stand in a stream of its tokens."""
        ...

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Ids of a text, none added; only with `specials` does text that spells a special stand for it.

        A document must never have it: "<eos>" written in one would forge a border. A prompt may.
        """
        ...

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Ids of each text, uint32: those of `encode`, and quicker when there are many."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; specials are dropped, bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes of each token, int32 [V], 0 for specials; None where tokens do not tell theirs."""
        ...


def load_tokenizer(name: str, names: SpecialNames | None = None) -> Tokenizer:
    """Loads "byte", "byte-chat", or the Hugging Face tokenizer.json at the path `name`.

    Args:
      name: of the tokenizer.
      names: special tokens of a tokenizer.json that are not to be looked for.

    Raises:
      ValueError: when there is no such file, it is no tokenizer.json, or has no token that ends documents.
    """
    if name in BYTE_TOKENIZERS:
        return BYTE_TOKENIZERS[name]()
    return HuggingFaceTokenizer(name, names or SpecialNames())


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer of a run.

    Raises:
      ValueError: as `load_tokenizer`.
    """
    return load_tokenizer(data.tokenizer, special_names(data))


def special_names(data: DataConfig) -> SpecialNames:
    """The special tokens that a run's config names."""
    return SpecialNames(bos_token=data.bos_token, eos_token=data.eos_token, pad_token=data.pad_token)


class ByteTokenizer:
    """Byte b is token b + 3; below are padding, end and beginning of a document."""

    name = "byte"
    names = SpecialNames()
    fingerprint = "byte"
    vocab_size = 259
    pad_id = 0
    eos_id = 1
    bos_id = 2
    specials: Mapping[str, int] = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    """As they are written where a special may be."""

    @property
    def borders(self) -> Borders:
        """How documents stand in a stream of its tokens."""
        return Borders(bos_id=self.bos_id, eos_id=self.eos_id, pad_id=self.pad_id)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Ids of the text's UTF-8 bytes; a surrogate-escaped byte is that byte again."""
        if specials:
            parts = re.split(f"({'|'.join(map(re.escape, self.specials))})", text)
            ids = ([self.specials[part]] if part in self.specials else self.encode(part) for part in parts)
            return list(itertools.chain.from_iterable(ids))
        try:
            return self.encode_bytes(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:  # a lone surrogate that is no escaped byte: keep its three bytes
            return self.encode_bytes(text.encode("utf-8", "surrogatepass"))

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Ids of each text, uint32."""
        return (np.array(self.encode(text), np.uint32) for text in texts)

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
    """A tokenizer.json: byte-level BPE, SentencePiece's BPE and Unigram, WordPiece or WordLevel."""

    def __init__(self, path: str, names: SpecialNames | None = None):
        """Reads the file, and what the files beside it say of its special tokens.

        Raises:
          ValueError: when it is missing, no tokenizer.json, or has no token that ends documents.
        """
        raw = _read_tokenizer_file(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # the package raises bare Exception for a file that it cannot read
            raise ValueError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
        self.name, self.names = path, names or SpecialNames()
        self.fingerprint = hashlib.blake2b(raw, digest_size=16).hexdigest()
        self.specials = find_specials(self._tokenizer, path, self.names)
        # One that only a name makes special is dropped when decoded too. It keeps its number.
        self._tokenizer.add_special_tokens(self._not_yet_special())
        # "<eos>" written in a document is text; taken for the token, it would forge a border.
        self._tokenizer.encode_special_tokens = True
        self._fields: dict[str, Any] = json.loads(self._tokenizer.to_str())
        self._vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1
        self._reserved = self._find_reserved()

    def _not_yet_special(self) -> list[str]:
        added = self._tokenizer.get_added_tokens_decoder()
        found = filter(None, (self.specials.bos, self.specials.eos, self.specials.pad))
        return [each.token for each in found if each.id not in added or not added[each.id].special]

    @property
    def kind(self) -> str:
        """Of its model: "BPE", "Unigram", "WordPiece" or "WordLevel"."""
        return self._fields["model"]["type"]

    @property
    def bos_id(self) -> int | None:
        """The token that begins a document; None in a tokenizer without one."""
        return None if self.specials.bos is None else self.specials.bos.id

    @property
    def eos_id(self) -> int:
        """The token that ends a document."""
        return self.specials.eos.id

    @property
    def pad_id(self) -> int:
        """The token that fills up a last block: EOS in a tokenizer without one for that."""
        return self.eos_id if self.specials.pad is None else self.specials.pad.id

    @property
    def borders(self) -> Borders:
        """How documents stand in a stream of its tokens."""
        return Borders(bos_id=self.bos_id, eos_id=self.eos_id, pad_id=self.pad_id)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Ids of a text, none added; only with `specials` does text that spells a special stand for it."""
        if specials:
            return self._with_specials.encode(text, add_special_tokens=False).ids
        return self._encode_letters(text)

    def encode_with_places(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Each token with its first character and the one behind its last; a special's name stands for it."""
        encoding = self._with_specials.encode(text, add_special_tokens=False)
        return ((i, *span) for i, span in zip(encoding.ids, encoding.offsets, strict=True))

    @property
    def special_ids(self) -> Mapping[str, int]:
        """All special tokens by name, those with it that only a user's names make special."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {each.content: i for i, each in added.items() if each.special}

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        """Apart, because the switch is the whole tokenizer's: two threads would turn it for each other."""
        return tokenizers.Tokenizer.from_str(self._tokenizer.to_str())

    def _encode_letters(self, text: str) -> list[int]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        if self._reserved.isdisjoint(encoded.ids):
            return encoded.ids
        # A model may have a special among its own pieces: to Unigram "</s>", HTML's strikethrough, is one.
        # No piece spans a cut, so that each half is letters.
        spans = [span for i, span in zip(encoded.ids, encoded.offsets, strict=True) if i in self._reserved]
        cuts = [first + 1 for first, last in spans if last - first > 1]
        if not cuts:
            return [i for i in encoded.ids if i not in self._reserved]
        parts = itertools.pairwise([0, *cuts, len(text)])
        return [i for first, last in parts for i in self._encode_letters(text[first:last])]

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Ids of each text, uint32: those of `encode`, and quicker when there are many."""
        if self._memory is None:
            return (np.array(self._encode_letters(text), np.uint32) for text in texts)
        return map(self._memory.encode, texts)

    @functools.cached_property
    def _memory(self) -> WordMemory | None:
        cuts = find_cuts(self._fields)
        return None if cuts is None else WordMemory(cuts, self._encode_pieces)

    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        found = [each.ids for each in encoded]
        return [
            ids if self._reserved.isdisjoint(ids) else self._encode_letters(piece)
            for piece, ids in zip(pieces, found, strict=True)
        ]

    def _find_reserved(self) -> frozenset[int]:
        """Specials that no text may stand for: all but the one for what has no token."""
        model = self._fields["model"]
        added = self._tokenizer.get_added_tokens_decoder()
        unknown = model.get("unk_id", self._vocabulary.get(model.get("unk_token")))
        return frozenset(i for i, token in added.items() if token.special and i != unknown)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; specials are dropped, bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def byte_piece(self, token: int) -> bytes | None:
        """The bytes of a token that spells bytes and not letters, as byte-level BPE's do; None of others."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""  # of a vocabulary that was padded to a round size
        if token in self._tokenizer.get_added_tokens_decoder():
            return None
        if _has(self._fields["decoder"], "ByteLevel"):
            return bytes(_byte_letters()[letter] for letter in piece)
        return bytes([int(piece[3:5], 16)]) if _BYTE_TOKEN.fullmatch(piece) else None

    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes of each token, int32 [V], 0 for specials; None where tokens do not tell theirs."""
        if not _tells_bytes(self._fields):
            return None
        byte_level = _has(self._fields["decoder"], "ByteLevel")
        added = self._tokenizer.get_added_tokens_decoder()
        bytes_V = np.zeros(self.vocab_size, np.int32)
        for token, i in self._vocabulary.items():
            if i not in added:
                bytes_V[i] = len(token) if byte_level else _count_piece_bytes(token)
            elif not added[i].special:  # an added token is written as it is, also in byte-level files
                bytes_V[i] = _count_piece_bytes(token)
        return bytes_V


@functools.cache
def _byte_letters() -> Mapping[str, int]:
    """The byte that each letter of byte-level BPE stands for: itself, or one moved up beyond Latin-1.

    GPT-2's mapping: bytes that print are their own letters, the others in their order those from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(moved)}


def _read_tokenizer_file(path: str) -> bytes:
    if not pathlib.Path(path).is_file():
        raise ValueError(
            f'there is no tokenizer "{path}"; it must be "byte" or the path of a tokenizer.json, as zaya '
            "tokenizer train writes one"
        )
    return pathlib.Path(path).read_bytes()


def _tells_bytes(fields: dict[str, Any]) -> bool:
    """Whether a token is spelled with all the letters, spaces included, that it stands for."""
    model, splitting = fields["model"], fields["pre_tokenizer"]
    if model["type"] not in ("BPE", "Unigram"):
        return False
    # As in CLIP's "cat</w>": the mark of a word's end stands for a space, or for nothing.
    if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        return False
    return _has(splitting, "Metaspace") or not _has(splitting, *_SPACES_ARE_LOST)


def _has(part: Any, *types: str) -> bool:
    """Whether a part of a tokenizer, or one in its sequence, is of one of the types."""
    text = json.dumps(part)
    return any(f'"type": "{each}"' in text for each in types)


def _count_piece_bytes(piece: str) -> int:
    """Bytes of a SentencePiece token: U+2581 is a space, <0xNN> a byte."""
    if _BYTE_TOKEN.fullmatch(piece):
        return 1
    return len(piece.replace("\u2581", " ").encode("utf-8"))
