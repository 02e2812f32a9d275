"""Which tokens of a tokenizer.json begin, end and fill up: by option, by files beside it, by their names."""

import dataclasses
import pathlib
from typing import Any

import tokenizers

from zaya_jax.json_files import read_json

BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer.json that name its special tokens; what both name, the first decides."""
WELL_KNOWN = {
    "bos_token": ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]"),
    "eos_token": ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "[EOS]", "[SEP]"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|endoftext|>"),
}
"""Names that tell a special token's purpose where no file does; of several the first."""
BY_NAME = "a well-known name"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialNames:
    """Special tokens that a user names; None for those that are to be found.

    Attributes:
      bos_token: begins a document.
      eos_token: ends a document.
      pad_token: fills up a block.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None


@dataclasses.dataclass(frozen=True)
class Special:
    """A special token that was found.

    Attributes:
      token: as it is written.
      id: its number.
      rule: what it was found by.
    """

    token: str
    id: int
    rule: str


@dataclasses.dataclass(frozen=True)
class Specials:
    """The special tokens that documents need.

    Attributes:
      bos: begins a document; None where the tokenizer has none.
      eos: ends a document.
      pad: fills up a block; None where the tokenizer has none.
    """

    bos: Special | None
    eos: Special
    pad: Special | None


def find_specials(tokenizer: tokenizers.Tokenizer, path: str, names: SpecialNames) -> Specials:
    """Finds the special tokens of the file at a path.

    Args:
      tokenizer: that the file holds.
      path: of the file, beside which others may name its tokens.
      names: those that a user names; they go before all else.

    Raises:
      ValueError: when a token that a user names is none, when a file beside it names tokens by what is no
        name, or when no token ends a document.
    """
    finder = _Finder(tokenizer, path)
    eos = finder.find("eos_token", names.eos_token) or finder.find_by_name("eos_token")
    if eos is None:
        raise ValueError(
            f"{path} has no special token that is known to end a document, such as "
            f"{', '.join(WELL_KNOWN['eos_token'][:4])}; name the one that does: "
            "--config.data.eos_token=TOKEN, or --eos-token TOKEN for zaya data build"
        )
    return Specials(
        finder.find_or_none("bos_token", names.bos_token),
        eos,
        finder.find_or_none("pad_token", names.pad_token),
    )


class _Finder:
    """Looks for special tokens by one rule after the other."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, path: str):
        self._tokenizer, self._path = tokenizer, path
        folder = pathlib.Path(path).parent
        self._files = {name: read_json(folder / name) for name in BESIDE if (folder / name).is_file()}
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}

    def find(self, field: str, named: str | None) -> Special | None:
        """By option, or by what the files say; None where neither names a token."""
        if named is not None:
            if (found := self._special_of(named, f"data.{field}")) is None:
                raise ValueError(f'data.{field} is "{named}"; it must be a token of {self._path}')
            return found
        for file, values in self._files.items():
            token = self._written(file, field, values.get(field))
            # transformers would add a token that the tokenizer lacks; no network here has a row for it.
            if token is not None and (found := self._special_of(token, file)) is not None:
                return found
        return None

    def find_or_none(self, field: str, named: str | None) -> Special | None:
        """As `find`, and by name unless a file says by null that there is none."""
        found = self.find(field, named)
        if found is not None or any(values.get(field, "") is None for values in self._files.values()):
            return found
        return self.find_by_name(field)

    def find_by_name(self, field: str) -> Special | None:
        """Among the special tokens, since a plain one called so may be any text."""
        token = next((name for name in WELL_KNOWN[field] if name in self._special), None)
        return None if token is None else self._special_of(token, BY_NAME)

    def _special_of(self, token: str, rule: str) -> Special | None:
        number = self._tokenizer.token_to_id(token)
        return None if number is None else Special(token, number, rule)

    def _written(self, file: str, field: str, value: Any) -> str | None:
        token = value.get("content") if isinstance(value, dict) else value
        if token is not None and not isinstance(token, str):
            raise ValueError(
                f"{pathlib.Path(self._path).parent / file}: {field} has {value!r:.80}; it must be text, "
                '{"content": text} or null'
            )
        return token
