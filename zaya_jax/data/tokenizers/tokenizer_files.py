"""The files of a tokenizer, in the format of transformers."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import processors

from zaya_jax.data.tokenizers.added_tokens import ADDED_TOKENS, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from zaya_jax.files.json_files import parse_object, read_limited

TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
FILES = (
    TOKENIZER, TOKENIZER_CONFIG, GENERATION, CHAT_TEMPLATE, "tokenizer.model", SPECIAL_TOKENS_MAP,
    ADDED_TOKENS, "chat_template.json",
)  # fmt: skip
"""Files next to a tokenizer.json that belong to the tokenizer."""
# Switches of tokenizer_config.json that override the tokenizer.json's added tokens, with our values.
_ADDED = {"add_bos_token": True, "add_eos_token": False}


def read_files(folder: pathlib.Path) -> dict[str, bytes]:
    """Reads the files of a tokenizer from a folder, by name.

    Raises:
      UserError: if a file exceeds the size limit.
    """
    return {name: read_limited(folder / name) for name in FILES if (folder / name).is_file()}


def files_of(path: str) -> dict[str, bytes]:
    """Reads the tokenizer.json at a path, whatever its file name, and the files next to it."""
    file = pathlib.Path(path)
    own = {TOKENIZER: file.read_bytes()} if file.is_file() else {}
    return read_files(file.parent) | own


def without_batch_settings(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Removes truncation, padding and dropout, which a tokenizer.json may contain from its training.

    transformers disables the first two at every call, but other readers of the file do not. It applies
    dropout.

    Args:
      files: content of the tokenizer's files, by name.
    """
    if TOKENIZER not in files:
        return dict(files)
    fields = parse_object(files[TOKENIZER], TOKENIZER)
    truncation, padding = fields.get("truncation"), fields.get("padding")
    if truncation is None and padding is None and fields.get("model", {}).get("dropout") is None:
        return dict(files)
    fields |= {"truncation": None, "padding": None}
    if "dropout" in fields.get("model", {}):
        fields["model"]["dropout"] = None
    cleaned = dict(files) | {TOKENIZER: as_json(fields)}
    return cleaned if padding is None else _with_pad_token(cleaned, padding["pad_token"])


def _with_pad_token(files: dict[str, bytes], token: str) -> dict[str, bytes]:
    """Names the pad token explicitly: transformers would have taken it from the padding that was removed."""
    config = parse_object(files[TOKENIZER_CONFIG], TOKENIZER_CONFIG) if TOKENIZER_CONFIG in files else {}
    older = files.get(SPECIAL_TOKENS_MAP)
    if "pad_token" in config or (older and "pad_token" in parse_object(older, SPECIAL_TOKENS_MAP)):
        return files
    return files | {TOKENIZER_CONFIG: as_json(transformers_config() | config | {"pad_token": token})}


# Files for transformers


def begin_with(token: str, number: int) -> processors.TemplateProcessing:
    """A post-processor that makes transformers start a text as `zaya generate` starts a prompt."""
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B:1", special_tokens=[(token, number)]
    )


def transformers_config(**special_tokens: str | None) -> dict[str, Any]:
    """Creates a tokenizer_config.json with those special tokens that are not None."""
    named = {field: token for field, token in special_tokens.items() if token is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | named


def begin_as_documents(raw: bytes, config: dict[str, Any], first_id: int) -> tuple[bytes, dict[str, Any]]:
    """Adapts tokenizer files so that transformers starts a text as `zaya_jax` does.

    Args:
      raw: content of tokenizer.json.
      config: content of tokenizer_config.json.
      first_id: token at the start of a document.

    Returns:
      Both contents; unchanged if transformers already starts texts this way.
    """
    tokenizer: Any = tokenizers.Tokenizer.from_str(raw.decode())
    # Tested by encoding, because post-processors can add tokens in several ways.
    plain, added = (tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
    overruled = any(config.get(switch, right) != right for switch, right in _ADDED.items())
    if added == [first_id, *plain] and not overruled:
        return raw, config
    tokenizer.post_processor = begin_with(tokenizer.id_to_token(first_id), first_id)
    kept = {name: value for name, value in config.items() if name not in _ADDED}
    # A tokenizer class specific to a model may add other tokens; PreTrainedTokenizerFast follows the file.
    return tokenizer.to_str().encode(), kept | transformers_config()


def as_json(value: Any) -> bytes:
    """Serializes JSON as all files written here."""

    return (json.dumps(value, indent=2) + "\n").encode()
