"""Finds the BOS, EOS and padding tokens of a tokenizer.json: by option, neighboring file, or name."""

import dataclasses
import pathlib
from typing import Any

import tokenizers

from zaya_jax.data.tokenizers.added_tokens import padding_token
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import read_json

TOKEN_NAME_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files next to a tokenizer.json that name its special tokens.

If both name a token, the second one decides, unless the first one lists `added_tokens_decoder`: newer
versions of transformers write everything into the first.
"""
WELL_KNOWN = {
    "bos_token": ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]"),
    "eos_token": ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "[EOS]", "[SEP]"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|endoftext|>"),
}
"""Token names whose purpose is known without a file; of several, the first one is used."""
BY_NAME, TOKENIZER = "a well-known name", "tokenizer.json"
"""Other ways in which a token is detected; the second is the padding section of that file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialTokenNames:
    """Special tokens that the user has named; None means that a token is detected.

    Attributes:
      bos_token: token that starts a document.
      eos_token: token that ends a document.
      pad_token: token that pads a block.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None


@dataclasses.dataclass(frozen=True)
class SpecialToken:
    """A special token that was detected.

    Attributes:
      token: content of the token.
      id: token id.
      rule: where the token was found: an option, a file, or `BY_NAME`.
    """

    token: str
    id: int
    rule: str


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that documents need.

    Attributes:
      bos: token that starts a document; None if the tokenizer has none.
      eos: token that ends a document.
      pad: token that pads a block; None if the tokenizer has none.
    """

    bos: SpecialToken | None
    eos: SpecialToken
    pad: SpecialToken | None


def find_specials(tokenizer: tokenizers.Tokenizer, path: str, names: SpecialTokenNames) -> SpecialTokens:
    """Detects the special tokens of a tokenizer.json.

    Args:
      tokenizer: tokenizer from the file.
      path: path of the file; files next to it may name its tokens.
      names: tokens that the user has named; these take precedence.

    Raises:
      UserError: if a token named by the user does not exist, a file names a token by an invalid value, or
        no token that ends documents is found.
    """
    finder = _Finder(tokenizer, path)
    # Documents cannot be separated without EOS, while BOS and padding are optional.
    eos = finder.find("eos_token", names.eos_token) or finder.find_by_name("eos_token")
    if eos is None:
        raise UserError(
            f"{path} has no special token that is known to end a document, such as "
            f"{', '.join(WELL_KNOWN['eos_token'][:4])}; name the token that does: "
            "--config.data.eos_token=TOKEN, or --eos-token TOKEN for zaya data build"
        )
    return SpecialTokens(
        finder.find_or_none("bos_token", names.bos_token),
        eos,
        finder.find_or_none("pad_token", names.pad_token),
    )


class _Finder:
    """Detects special tokens by one rule after the other."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, path: str):
        self._tokenizer, self._path = tokenizer, path
        folder = pathlib.Path(path).parent
        files = {name: read_json(folder / name) for name in TOKEN_NAME_FILES if (folder / name).is_file()}
        if "added_tokens_decoder" not in files.get(TOKEN_NAME_FILES[0], {}):
            # transformers reads files of older versions in this order.
            files = dict(reversed(files.items()))
        self._files = files
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}

    def find(self, field: str, named: str | None) -> SpecialToken | None:
        """Finds a token by option, or by the files; None if neither names one."""
        if named is not None:
            if (special := self._special_of(named, f"data.{field}")) is None:
                raise UserError(f'data.{field} is "{named}", which is not a token of {self._path}')
            return special
        for file, values in self._files.items():
            token = self._written(file, field, values.get(field))
            if token is not None and (special := self._special_of(token, file)) is not None:
                return special
        padding = padding_token(self._tokenizer) if field == "pad_token" else None
        # A file that names the pad token overrides the padding in tokenizer.json.
        is_named = any(field in values for values in self._files.values())
        return None if padding is None or is_named else self._special_of(padding, TOKENIZER)

    def find_or_none(self, field: str, named: str | None) -> SpecialToken | None:
        """As `find`, then by name. A null in a file means that there is no such token."""
        special = self.find(field, named)
        if special is not None or any(values.get(field, "") is None for values in self._files.values()):
            return special
        return self.find_by_name(field)

    def find_by_name(self, field: str) -> SpecialToken | None:
        """Searches only special tokens by name, because a plain token with such a name may be normal text."""
        token = next((name for name in WELL_KNOWN[field] if name in self._special), None)
        return None if token is None else self._special_of(token, BY_NAME)

    def _special_of(self, token: str, rule: str) -> SpecialToken | None:
        number = self._tokenizer.token_to_id(token)
        # A file may name a token that the vocabulary lacks; transformers ignores it as well.
        return None if number is None else SpecialToken(token, number, rule)

    def _written(self, file: str, field: str, value: Any) -> str | None:
        # Both forms occur: the text, and an object with flags.
        token = value.get("content") if isinstance(value, dict) else value
        if token is not None and not isinstance(token, str):
            raise UserError(
                f"{pathlib.Path(self._path).parent / file}: {field} has {value!r:.80}; it must be text, "
                '{"content": text} or null'
            )
        return token
