"""The files of a tokenizer, as transformers reads them."""

import json
import pathlib
from typing import Any

import tokenizers
from tokenizers import processors

from zaya_jax.json_files import read_limited

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
FILES = (
    TOKENIZER, TOKENIZER_CONFIG, GENERATION, CHAT_TEMPLATE, "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json",
)  # fmt: skip
"""What may lie beside a tokenizer.json and belongs to it."""
_ADDED = {"add_bos_token": True, "add_eos_token": False}
"""Switches of a tokenizer_config.json that overrule what the tokenizer.json adds, as they must stand."""


def read_files(folder: pathlib.Path) -> dict[str, bytes]:
    """The files of a tokenizer that lie in a folder, by name.

    Raises:
      ValueError: if one is longer than it could be.
    """
    return {name: read_limited(folder / name) for name in FILES if (folder / name).is_file()}


def files_of(path: str) -> dict[str, bytes]:
    """The tokenizer.json at a path, whatever it is called there, and the files beside it."""
    file = pathlib.Path(path)
    own = {TOKENIZER: file.read_bytes()} if file.is_file() else {}
    return read_files(file.parent) | own


# As transformers reads them


def begin_with(token: str, number: int) -> processors.TemplateProcessing:
    """Has transformers begin a text as `zaya generate` begins a prompt."""
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B:1", special_tokens=[(token, number)]
    )


def transformers_config(**special_tokens: str | None) -> dict[str, Any]:
    """A tokenizer_config.json; only what has a name is in it."""
    named = {field: token for field, token in special_tokens.items() if token is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | named


def begin_as_documents(raw: bytes, config: dict[str, Any], first_id: int) -> tuple[bytes, dict[str, Any]]:
    """A tokenizer.json and its tokenizer_config.json with which transformers begins a text as we do.

    Args:
      raw: the tokenizer.json.
      config: beside it.
      first_id: what a document begins with.

    Returns:
      Both; as they are, where they do so already.
    """
    tokenizer: Any = tokenizers.Tokenizer.from_str(raw.decode())
    plain, added = (tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
    overruled = any(config.get(switch, right) != right for switch, right in _ADDED.items())
    if added == [first_id, *plain] and not overruled:
        return raw, config
    tokenizer.post_processor = begin_with(tokenizer.id_to_token(first_id), first_id)
    kept = {name: value for name, value in config.items() if name not in _ADDED}
    # A model's own class may add what it likes; this one adds what the file says.
    return tokenizer.to_str().encode(), kept | transformers_config()


def as_json(value: Any) -> bytes:
    """JSON as files have it here."""
    return (json.dumps(value, indent=2) + "\n").encode()
