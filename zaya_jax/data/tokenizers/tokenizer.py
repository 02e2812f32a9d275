"""Tokenizers with one small interface: plain bytes, or any Hugging Face tokenizer.json.

Letters: V vocabulary.
"""

import abc
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from zaya_jax.config import DataConfig
from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.data.tokenizers.added_tokens import add_declared_tokens, make_special
from zaya_jax.data.tokenizers.piece_cache import PieceCache, find_cuts
from zaya_jax.data.tokenizers.plain_text import hide_tokens
from zaya_jax.data.tokenizers.special_tokens import SpecialTokenNames, find_specials
from zaya_jax.errors import UserError

# Pre-tokenizers that drop the spaces between words.
_SPACES_ARE_LOST = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")
TOOL_TAGS = (
    "<zyphra_tool_call>",
    "</zyphra_tool_call>",
    "<zyphra_tool_response>",
    "</zyphra_tool_response>",
)
"""Special tokens around a tool call and around its result, those of ZAYA1's tokenizer ([Weights])."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(abc.ABC):
    """Converts text to token ids and back.

    Attributes:
      name: name or path, as `load_tokenizer` accepts it.
      names: special tokens that the user has named.
      fingerprint: hash of the content, independent of the location of the files.
      file_fingerprint: the fingerprint without tokens that other files declare, which older corpora contain.
      vocab_size: V, the highest id plus one.
      bos_id: token that starts a document; None if the tokenizer has none.
      eos_id: token that ends a document.
      pad_id: token that pads the last block; EOS if the tokenizer has none for that.
      special_ids: ids of all special tokens, by the text that spells them where they are allowed.
    """

    name: str
    names: SpecialTokenNames
    fingerprint: str
    file_fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    special_ids: Mapping[str, int]

    @property
    def delimiters(self) -> DocumentDelimiters:
        """The tokens between documents in a stream."""
        return DocumentDelimiters(bos_id=self.bos_id, eos_id=self.eos_id, pad_id=self.pad_id)

    @property
    def unknown_id(self) -> int | None:
        """The token that represents whatever the tokenizer lacks; None if it has no such token."""
        return None

    @functools.cached_property
    def special_names(self) -> Mapping[int, str]:
        """Names of all special tokens, by id."""
        return {number: name for name, number in self.special_ids.items()}

    @abc.abstractmethod
    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Returns the ids of a text, without adding any.

        With `specials`, text that spells a special token becomes that token. Prompts may allow this, but
        documents must not: the text "<eos>" in a document would forge a delimiter.
        """

    @abc.abstractmethod
    def encode_with_places(self, text: str) -> list[tuple[int, int, int]]:
        """Returns (id, first character, character after the last) for each token of template text.

        Text that spells a special token becomes that token.
        """

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields the ids of each text, uint32. Equal to `encode`, but may be faster for many texts."""
        return (np.array(self.encode(text), np.uint32) for text in texts)

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; special tokens are removed, and invalid UTF-8 becomes U+FFFD."""

    @abc.abstractmethod
    def byte_piece(self, token: int) -> bytes | None:
        """Returns the bytes of a token that spells bytes; None for one that spells characters."""

    def spelling(self, token: int) -> bytes:
        """Returns the bytes of a token that is not special, as it spells them within a text."""
        if (raw := self.byte_piece(token)) is not None:
            return raw
        # Many tokenizers drop the space of a text's first token: decode this one as the second. The
        # replacement character stands for bytes that are not a character.
        text = self.decode([*self._anchor, token])
        return text.removeprefix(self.decode(self._anchor)).replace("\ufffd", "").encode()

    @functools.cached_property
    def _anchor(self) -> list[int]:
        return self.encode("a")

    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes of each token, int32 [V], 0 for special tokens; None if they depend on the context."""
        return self.spelled_bytes

    @property
    @abc.abstractmethod
    def spelled_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token spells, int32 [V], 0 for special tokens; an estimate if unknown."""


def load_tokenizer(name: str, names: SpecialTokenNames | None = None) -> Tokenizer:
    """Loads "byte", "byte-chat", "byte-tools", or a Hugging Face tokenizer.json.

    Args:
      name: name of a byte tokenizer, or path of a tokenizer.json.
      names: special tokens of a tokenizer.json, if they should not be detected.

    Raises:
      UserError: if the file is missing or invalid, or no token that ends documents is found.
    """
    if name in BYTE_TOKENIZERS:
        return BYTE_TOKENIZERS[name]()
    return HuggingFaceTokenizer(name, names or SpecialTokenNames())


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """Loads the tokenizer of a run.

    Raises:
      UserError: as `load_tokenizer`.
    """
    return load_tokenizer(data.tokenizer, special_names(data))


def special_names(data: DataConfig) -> SpecialTokenNames:
    """The special tokens that the config of a run names."""
    return SpecialTokenNames(bos_token=data.bos_token, eos_token=data.eos_token, pad_token=data.pad_token)


class ByteTokenizer(Tokenizer):
    """Byte b is token b + 3; tokens 0 to 2 are padding, end and start of a document."""

    name = "byte"
    names = SpecialTokenNames()
    fingerprint = file_fingerprint = "byte"
    vocab_size = 259
    pad_id = 0
    eos_id = 1
    bos_id = 2
    special_ids: Mapping[str, int] = {"<pad>": 0, "<eos>": 1, "<bos>": 2}

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Returns the ids of the text's UTF-8 bytes; surrogate-escaped bytes become those bytes again."""
        if specials:
            return [token for token, *_ in self.encode_with_places(text)]
        try:
            return self.encode_bytes(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            # A lone surrogate that is not an escaped byte, as JSON may contain: encode its three bytes.
            return self.encode_bytes(text.encode("utf-8", "surrogatepass"))

    def encode_with_places(self, text: str) -> list[tuple[int, int, int]]:
        """Returns (id, first character, character after the last) for each byte and special token."""
        tokens: list[tuple[int, int, int]] = []
        position = 0
        # The group in the pattern keeps the names of special tokens in the result.
        for piece in re.split(f"({'|'.join(map(re.escape, self.special_ids))})", text):
            if piece in self.special_ids:
                tokens.append((self.special_ids[piece], position, position + len(piece)))
            # In ASCII, characters and bytes are the same, which avoids a loop over characters.
            elif piece.isascii():
                tokens += ((token, i, i + 1) for i, token in enumerate(self.encode(piece), position))
            else:
                for i, character in enumerate(piece, position):
                    tokens += ((token, i, i + 1) for token in self.encode(character))
            position += len(piece)
        return tokens

    def encode_bytes(self, raw: bytes) -> list[int]:
        """Returns the ids of any bytes, UTF-8 or not."""
        return [byte + 3 for byte in raw]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, without special tokens and ids that only a padded vocabulary has."""
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode("utf-8", "replace")

    def byte_piece(self, token: int) -> bytes:
        """Returns the byte of a token; nothing for a special token."""
        return bytes([token - 3]) if 3 <= token < 259 else b""

    @functools.cached_property
    def spelled_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token spells, int32 [V]."""
        return np.array([0] * 3 + [1] * 256 + [0] * (self.vocab_size - 259), np.int32)


class ByteChatTokenizer(ByteTokenizer):
    """The tokens of "byte", followed by four special tokens of chats.

    A run that started with "byte" can continue with it if the embedding has unused rows, because no token
    changes.
    """

    name = "byte-chat"
    fingerprint = file_fingerprint = "byte-chat"
    vocab_size = 263
    special_ids: Mapping[str, int] = {
        **ByteTokenizer.special_ids,
        "<|im_start|>": 259,
        "<|im_end|>": 260,
        "<think>": 261,
        "</think>": 262,
    }


class ByteToolsTokenizer(ByteChatTokenizer):
    """The tokens of "byte-chat", followed by four special tokens of tool calls."""

    name = "byte-tools"
    fingerprint = file_fingerprint = "byte-tools"
    vocab_size = 267
    special_ids: Mapping[str, int] = {
        **ByteChatTokenizer.special_ids,
        **{tag: 263 + i for i, tag in enumerate(TOOL_TAGS)},
    }


BYTE_TOKENIZERS: Mapping[str, type[ByteTokenizer]] = {
    each.name: each for each in (ByteTokenizer, ByteChatTokenizer, ByteToolsTokenizer)
}
"""Tokenizers that need no file, by name."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, read with the files next to it as transformers' `AutoTokenizer` does.

    There are two ways to encode. Document text and user input never become a special token (`encode`).
    Template text and prompts may spell special tokens (`encode(specials=True)`, `encode_with_places`).
    """

    def __init__(self, path: str, names: SpecialTokenNames | None = None):
        """Reads the file, and the tokens that the files next to it declare.

        Args:
          path: path of the tokenizer.json.
          names: special tokens that the user has named; others are detected.

        Raises:
          UserError: if the file is missing or invalid, or no token that ends documents is found.
        """
        raw = _read_tokenizer_file(path)
        self._tokenizer = _parse_tokenizer(raw, path)
        # Recorded before the declared tokens are added, to see whether these change the tokenizer.
        own = self._added_tokens()
        add_declared_tokens(self._tokenizer, pathlib.Path(path).parent)
        self.name, self.names = path, names or SpecialTokenNames()
        self.file_fingerprint = hashlib.blake2b(raw, digest_size=16).hexdigest()
        self.fingerprint = _fingerprint(self.file_fingerprint, own, self._added_tokens())
        self.specials = find_specials(self._tokenizer, path, self.names)
        bos, eos, pad = self.specials.bos, self.specials.eos, self.specials.pad
        self.bos_id, self.eos_id = bos and bos.id, eos.id
        self.pad_id = eos.id if pad is None else pad.id
        _encode_whole_texts(self._tokenizer)
        # A token that only an option or a well-known name makes special must not be spelled by text.
        make_special(self._tokenizer, frozenset(each.token for each in (bos, eos, pad) if each is not None))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {each.content: i for i, each in added.items() if each.special}
        self._vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1

    def to_file(self) -> bytes:
        """A tokenizer.json that contains all tokens itself, including those that other files declared."""
        return self._tokenizer.to_str(pretty=True).encode()

    def _added_tokens(self) -> dict[int, str]:
        return {i: repr(token) for i, token in self._tokenizer.get_added_tokens_decoder().items()}

    @functools.cached_property
    def _fields(self) -> dict[str, Any]:
        return json.loads(self._tokenizer.to_str())

    @property
    def kind(self) -> str:
        """Type of its model: "BPE", "Unigram", "WordPiece" or "WordLevel"."""
        return self._fields["model"]["type"]

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Returns the ids of a text, without adding any.

        Args:
          text: text of a document, template or prompt.
          specials: whether text that spells a special token becomes that token, as in `AutoTokenizer`.
            Otherwise no text does, whatever the normalizer and the model make of it.
        """
        tokenizer = self._tokenizer if specials else self._document_tokenizer
        return _encoding(tokenizer, text).ids

    def encode_with_places(self, text: str) -> list[tuple[int, int, int]]:
        """Returns (id, first character, character after the last) for each token of template text."""
        encoding = _encoding(self._tokenizer, text)
        return [(i, *span) for i, span in zip(encoding.ids, encoding.offsets, strict=True)]

    @functools.cached_property
    def _document_tokenizer(self) -> tokenizers.Tokenizer:
        return hide_tokens(self._fields, self.special_ids.keys())

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields the ids of each text, uint32. Equal to `encode`, but faster for many texts."""
        # Without known cuts, texts are tokenized as a whole.
        return super().encode_documents(texts) if self._memory is None else map(self._memory.encode, texts)

    @functools.cached_property
    def _memory(self) -> PieceCache | None:
        cuts = find_cuts(self._fields)
        return None if cuts is None else PieceCache(cuts, self._encode_pieces)

    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        encoded = self._document_tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [each.ids for each in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; special tokens are removed, and invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def byte_piece(self, token: int) -> bytes | None:
        """The bytes of a token that spells bytes instead of characters, as in byte-level BPE; else None."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""  # an id of a vocabulary that was padded to a round size
        # Added tokens are whole characters in any tokenizer.
        if token in self._tokenizer.get_added_tokens_decoder():
            return None
        if _has(self._fields["decoder"], "ByteLevel"):
            return bytes(byte_letters()[letter] for letter in piece)
        # Other decoders write the name of a byte token as text.
        is_byte = _BYTE_TOKEN.fullmatch(piece) and _has(self._fields["decoder"], "ByteFallback")
        return bytes([int(piece[3:5], 16)]) if is_byte else None

    @property
    def unknown_id(self) -> int | None:
        """The token that represents whatever the tokenizer lacks; None if it has no such token."""
        model = self._fields["model"]
        return model.get("unk_id", self._vocabulary.get(model.get("unk_token")))

    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes of each token, int32 [V], 0 for special tokens; None if they depend on the context."""
        return self.spelled_bytes if _tells_bytes(self._fields) else None

    @functools.cached_property
    def spelled_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token spells, int32 [V]: 0 for special tokens, 1 for the unknown token."""
        byte_level = _has(self._fields["decoder"], "ByteLevel")
        added = self._tokenizer.get_added_tokens_decoder()
        bytes_V = np.zeros(self.vocab_size, np.int32)
        for token, i in self._vocabulary.items():
            if i not in added:
                bytes_V[i] = len(token) if byte_level else _count_piece_bytes(token)
            # An added token is spelled as it is, even in a byte-level file.
            elif not added[i].special:
                bytes_V[i] = _count_piece_bytes(token)
        unknown = self.unknown_id
        # In GPT-2 the unknown token is also EOS, which spells nothing.
        if unknown is not None and unknown not in (self.bos_id, self.eos_id, self.pad_id):
            bytes_V[unknown] = max(1, bytes_V[unknown])
        return bytes_V


@functools.cache
def byte_letters() -> Mapping[str, int]:
    """Maps each letter of byte-level BPE to its byte.

    GPT-2's mapping: printable bytes are themselves; the others are, in order, the characters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(moved)}


def _read_tokenizer_file(path: str) -> bytes:
    if not pathlib.Path(path).is_file():
        raise UserError(
            f'the tokenizer "{path}" does not exist; it must be "byte" or the path of a tokenizer.json, '
            "which zaya tokenizer train writes"
        )
    return pathlib.Path(path).read_bytes()


def _parse_tokenizer(raw: bytes, path: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
    # The package raises bare Exception for a file that it cannot read.
    except Exception as error:
        raise UserError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error


def _encode_whole_texts(tokenizer: Any) -> None:
    """Disables the settings of a tokenizer.json for batches and for data augmentation.

    transformers disables truncation and padding at every call. Dropout would make the tokens random.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model.dropout = None


def _fingerprint(of_file: str, own: Mapping[int, str], added: Mapping[int, str]) -> str:
    """The fingerprint of the file, unless the files next to it change its tokens."""
    if added == own:
        return of_file
    content = json.dumps([of_file, sorted(added.items())])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _tells_bytes(fields: dict[str, Any]) -> bool:
    """Whether each token spells all characters of its text, including spaces."""
    model, splitting = fields["model"], fields["pre_tokenizer"]
    # WordPiece and WordLevel replace unknown words, and drop spaces.
    if model["type"] not in ("BPE", "Unigram"):
        return False
    # As in CLIP's "cat</w>": the end-of-word mark stands for a space or for nothing.
    if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        return False
    # If the mark of a space is not in the vocabulary, its three UTF-8 bytes become tokens instead.
    pieces = model["vocab"] if model["type"] == "BPE" else dict(model["vocab"])
    marks_spaces = "\\u2581" in json.dumps([fields["normalizer"], splitting])
    if marks_spaces and "\u2581" not in pieces:
        return False
    return _has(splitting, "Metaspace") or not _has(splitting, *_SPACES_ARE_LOST)


def _has(part: Any, *types: str) -> bool:
    """Whether a component of a tokenizer, or one in its sequence, has one of the types."""
    # A text search covers nested sequences of components without walking them.
    text = json.dumps(part)
    return any(f'"type": "{each}"' in text for each in types)


def _count_piece_bytes(piece: str) -> int:
    """Bytes of a SentencePiece token, in which U+2581 is a space and <0xNN> a byte."""
    if _BYTE_TOKEN.fullmatch(piece):
        return 1
    return len(piece.replace("\u2581", " ").encode("utf-8"))


LONG_TEXT = 4096
"""Number of characters from which a text is encoded without holding the global interpreter lock."""


def _encoding(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """Encodes a text without adding tokens. Other threads can run while a long text is encoded.

    `encode` holds the global interpreter lock, for a megabyte of text for seconds, in which a server would
    not respond; `encode_batch` releases it.
    """

    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=False)
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding
