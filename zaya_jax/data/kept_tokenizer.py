"""What a run folder keeps so that whoever has it can generate and export: tokenizer and chat template."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from zaya_jax import durable
from zaya_jax.config import DataConfig
from zaya_jax.data.chat_format import ChatFormat
from zaya_jax.data.chat_template import ChatTemplate
from zaya_jax.data.tokenizer import BYTE_TOKENIZERS, tokenizer_of
from zaya_jax.data.tokenizer_files import CHAT_TEMPLATE, GENERATION, TOKENIZER, as_json, files_of, read_files
from zaya_jax.json_files import parse_object

FOLDER = "tokenizer"
"""Of a run folder: where all of it lies, under transformers' names."""


def keep_files(run_folder: str | os.PathLike[str], data: DataConfig, *, chat_template: str | None) -> None:
    """Has a run folder hold its tokenizer, and the template of the chats that the run reads, if it does.

    Args:
      run_folder: of the run.
      data: which names the tokenizer.
      chat_template: Jinja; None for a run on documents alone.

    Raises:
      ValueError: for a generation config beside the tokenizer that cannot be read.
    """
    folder = pathlib.Path(run_folder) / FOLDER
    held = read_files(folder)
    # Kept once: what lies beside the tokenizer's own file may be another's by the time the run goes on.
    is_missing = data.tokenizer not in BYTE_TOKENIZERS and TOKENIZER not in held
    files = held | (files_of(data.tokenizer) if is_missing else {})
    if chat_template is not None:
        files |= {CHAT_TEMPLATE: chat_template.encode(), GENERATION: _ends_turns(files, data, chat_template)}
    new = {name: content for name, content in files.items() if held.get(name) != content}
    if new:
        durable.make_folder(folder)
    # The tokenizer.json last: where it lies, all of them do.
    for name, content in sorted(new.items(), key=lambda file: file[0] == TOKENIZER):
        durable.write(folder / name, content)


def _ends_turns(files: Mapping[str, bytes], data: DataConfig, chat_template: str) -> bytes:
    """A generation config by which an answer ends with its turn, as `zaya generate --chat` has it."""
    tokenizer = tokenizer_of(data)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("bos", "eos", "pad")}
    if GENERATION in files:
        ids |= parse_object(files[GENERATION], GENERATION)
    end_id = ChatFormat(ChatTemplate(CHAT_TEMPLATE, chat_template), tokenizer).end_id
    others = ids["eos_token_id"] if isinstance(ids["eos_token_id"], list) else [ids["eos_token_id"]]
    # A document's end still ends a text.
    ends = [end_id, *(each for each in others if each not in (end_id, None))]
    known = {name: value for name, value in ids.items() if value is not None}
    return as_json(known | {"eos_token_id": ends if len(ends) > 1 else end_id})


def as_kept(run_folder: str | os.PathLike[str], data: DataConfig) -> DataConfig:
    """The section of a run's config with the tokenizer that its folder holds, if it holds one."""
    kept = pathlib.Path(run_folder) / FOLDER / TOKENIZER
    if data.tokenizer in BYTE_TOKENIZERS or not kept.is_file():
        return data
    return dataclasses.replace(data, tokenizer=str(kept))


def kept_template(run_folder: str | os.PathLike[str]) -> str | None:
    """Where the template lies that the chats of a run were written with; None for a run without one."""
    kept = pathlib.Path(run_folder) / FOLDER / CHAT_TEMPLATE
    return str(kept) if kept.is_file() else None
