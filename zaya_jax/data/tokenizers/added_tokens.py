"""Adds the tokens that the files next to a tokenizer.json declare, as transformers' `AutoTokenizer` does.

A folder may declare tokens in four places: in tokenizer.json itself, in tokenizer_config.json
(`added_tokens_decoder`, named tokens such as `eos_token`, `extra_special_tokens` and its older name
`additional_special_tokens`), in special_tokens_map.json and in added_tokens.json. The order in which
transformers adds them determines their ids, so this module follows it step by step ([HF],
`TokenizersBackend.__init__` and `PreTrainedTokenizerBase._from_pretrained`). In particular, the ids in
`added_tokens_decoder` only order the tokens: a new token receives the next free id.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from zaya_jax.errors import UserError
from zaya_jax.files.json_files import read_json

TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Fields that name one special token each, in transformers' order."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclasses.dataclass(frozen=True)
class Declared:
    """The tokens that the files next to a tokenizer.json declare.

    Attributes:
      tokens: tokens by id, as `added_tokens_decoder` or added_tokens.json lists them.
      named: special tokens by the field that names them, those of `NAMED` first and in its order.
      extra: further special tokens.
    """

    tokens: Mapping[int, tokenizers.AddedToken]
    named: Mapping[str, tokenizers.AddedToken | str]
    extra: tuple[tokenizers.AddedToken | str, ...]

    @property
    def special(self) -> frozenset[str]:
        """Contents of the tokens that the files declare special, whatever tokenizer.json says about them."""
        return frozenset(map(_content, (*self.named.values(), *self.extra)))


def add_declared_tokens(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path) -> None:
    """Adds the tokens that a folder declares, with the ids that transformers assigns.

    Args:
      tokenizer: tokenizer from the folder's tokenizer.json; modified in place.
      folder: folder with tokenizer_config.json and the other files, if they exist.

    Raises:
      UserError: if a file declares a token by an invalid value.
    """
    declared = read_declared(tokenizer, folder)
    # One call for all tokens, because the order within the call determines their ids.
    if new := _new_tokens(tokenizer, declared):
        tokenizer.add_tokens(new)
    make_special(tokenizer, declared.special)


def make_special(tokenizer: tokenizers.Tokenizer, names: frozenset[str]) -> None:
    """Marks tokens as special, keeping their ids and matching flags.

    transformers does not mark a token that only a name makes special. User text could then spell it, and
    decoding would not remove it.
    """
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    marked = [
        _with_flags(added[name], special=True) if name in added else _special(name)
        for name in sorted(names)
        if name and tokenizer.token_to_id(name) is not None and not (name in added and added[name].special)
    ]
    tokenizer.add_tokens(marked)


def padding_token(tokenizer: tokenizers.Tokenizer) -> str | None:
    """The pad token of a tokenizer.json; transformers uses it as `pad_token` if no file names one."""
    return None if tokenizer.padding is None else tokenizer.padding["pad_token"]


def read_declared(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path) -> Declared:
    """Reads the declarations of the files in a folder.

    Args:
      tokenizer: tokenizer from tokenizer.json; its own tokens define the flags of named tokens.
      folder: folder with the files.

    Raises:
      UserError: if a file declares a token by an invalid value.
    """
    config = _read(folder, TOKENIZER_CONFIG)
    # The newer name wins if both are present, as in transformers 5.
    if "additional_special_tokens" in config and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens")
    if "added_tokens_decoder" in config:
        tokens = _decoder_tokens(config["added_tokens_decoder"], folder / TOKENIZER_CONFIG)
        named, extra = _named_and_extra(config, folder / TOKENIZER_CONFIG)
    else:
        # Files of older versions, which transformers ignores if tokenizer_config.json lists the tokens.
        of_map = _special_tokens_map(config, folder)
        config |= of_map
        named, extra = _named_and_extra(config, folder / (SPECIAL_TOKENS_MAP if of_map else TOKENIZER_CONFIG))
        standard = {_content(token) for field, token in named.items() if field in NAMED}
        older = _older_added_tokens(folder / ADDED_TOKENS, special=standard | set(map(_content, extra)))
        tokens = older | tokenizer.get_added_tokens_decoder()
    if (padding := padding_token(tokenizer)) is not None and "pad_token" not in config:
        named = {"pad_token": padding} | named
    # Dictionaries keep their order, which determines the ids of new tokens.
    in_order = {field: named[field] for field in NAMED if field in named} | named
    with_flags = {token.content: token for token in tokens.values()}
    return Declared(
        tokens=tokens,
        named={
            field: with_flags.get(_content(token), token) if field in NAMED else token
            for field, token in in_order.items()
        },
        extra=extra,
    )


def _new_tokens(tokenizer: tokenizers.Tokenizer, declared: Declared) -> list[tokenizers.AddedToken]:
    """Tokens that the tokenizer lacks, or has with other flags, in the order of their future ids."""
    # repr includes the flags: transformers adds a token again if only its flags differ.
    present = tokenizer.get_added_tokens_decoder()
    known = {repr(token) for token in present.values()}
    new: list[tokenizers.AddedToken | str] = [
        token for _, token in sorted(declared.tokens.items()) if repr(token) not in known
    ]
    # A named token that is already present is not added again.
    contents = {token.content for token in present.values()} | set(map(_content, new))
    for token in (*declared.named.values(), *declared.extra):
        if _content(token) not in contents and token not in new:
            new.append(token)
    named = set(map(_content, declared.named.values()))
    return [_as_added(token, special=_content(token) in named) for token in new if _content(token)]


def _as_added(token: tokenizers.AddedToken | str, *, special: bool) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return _special(token)
    # transformers marks named tokens as special, even if a file says otherwise.
    return _with_flags(token, special=True) if special and not token.special else token


def _special(content: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(content, special=True)


def _with_flags(token: tokenizers.AddedToken, **changed: bool) -> tokenizers.AddedToken:
    flags = {flag: getattr(token, flag) for flag in _FLAGS} | changed
    return tokenizers.AddedToken(token.content, **flags)


def _content(token: tokenizers.AddedToken | str) -> str:
    return token if isinstance(token, str) else token.content


# Reading the files


def _read(folder: pathlib.Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _decoder_tokens(values: Any, file: pathlib.Path) -> dict[int, tokenizers.AddedToken]:
    if not isinstance(values, dict) or not all(id.isdecimal() for id in values):
        raise UserError(
            f"{file}: added_tokens_decoder is {values!r:.80}; it must be an object of tokens by their ids"
        )
    return {int(id): _added_token(value, file, f"added_tokens_decoder.{id}") for id, value in values.items()}


def _special_tokens_map(config: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """The fields of special_tokens_map.json, which override those of tokenizer_config.json."""
    # transformers treats every token in this file as special, whatever its own flag says.
    values = {field: _marked_special(value) for field, value in _read(folder, SPECIAL_TOKENS_MAP).items()}
    extra, of_config = values.get("extra_special_tokens"), config.get("extra_special_tokens")
    if isinstance(extra, list) and isinstance(of_config, list):
        values["extra_special_tokens"] = [*of_config, *extra]
    if "additional_special_tokens" in values and not {"extra_special_tokens"} & {*values, *config}:
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
    return values


def _marked_special(value: Any) -> Any:
    if isinstance(value, list):
        return [_marked_special(each) for each in value]
    return value | {"special": True} if isinstance(value, dict) and "content" in value else value


def _older_added_tokens(file: pathlib.Path, *, special: set[str]) -> dict[int, tokenizers.AddedToken]:
    values = _read(file.parent, file.name)
    if not all(type(id) is int for id in values.values()):
        raise UserError(f"{file} contains {values!r:.80}; it must be an object that maps tokens to ids")
    # transformers normalizes added tokens before matching them, except special ones.
    return {
        id: tokenizers.AddedToken(text, normalized=text not in special, special=text in special)
        for text, id in values.items()
    }


def _named_and_extra(
    config: Mapping[str, Any], file: pathlib.Path
) -> tuple[dict[str, tokenizers.AddedToken | str], tuple[tokenizers.AddedToken | str, ...]]:
    """Special tokens by field, and those without a field. Any field that ends in `_token` may name one."""
    named = {field: _token(config[field], file, field) for field in NAMED if config.get(field) is not None}
    others = {
        field: _token(value, file, field)
        for field, value in config.items()
        if field.endswith("_token") and field not in NAMED and _is_token(value)
    }
    extra = config.get("extra_special_tokens") or ()
    # Newer versions name the extra tokens, as for the image token of multimodal models.
    if isinstance(extra, dict):
        by_name = {name: _token(value, file, f"extra_special_tokens.{name}") for name, value in extra.items()}
        return named | others | by_name, ()
    if not isinstance(extra, list | tuple):
        raise UserError(
            f"{file}: extra_special_tokens is {extra!r:.80}; it must be a list or an object of tokens"
        )
    return named | others, tuple(_token(value, file, "extra_special_tokens") for value in extra)


def _is_token(value: Any) -> bool:
    # Other fields that end in `_token`, such as switches, are not tokens.
    return isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _token(value: Any, file: pathlib.Path, field: str) -> tokenizers.AddedToken | str:
    if isinstance(value, str):
        return value
    return _added_token(value, file, field)


def _added_token(value: Any, file: pathlib.Path, field: str) -> tokenizers.AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise UserError(f'{file}: {field} has {value!r:.80}; it must be text, {{"content": text}} or null')
    flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    # The tokenizers package would fail on other values with an internal error.
    if wrong := [flag for flag, switch in flags.items() if not isinstance(switch, bool)]:
        raise UserError(f"{file}: {field} has {wrong[0]} {flags[wrong[0]]!r:.80}; it must be true or false")
    return tokenizers.AddedToken(value["content"], **flags)
