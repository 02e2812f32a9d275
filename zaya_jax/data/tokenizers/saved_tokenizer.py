"""Saves the tokenizer and chat template in a run folder, for generation and export without other files."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from zaya_jax.config import DataConfig
from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.chats.templates.end_tokens import end_ids_of, read_end_ids
from zaya_jax.data.chats.templates.template import ChatTemplate
from zaya_jax.data.tokenizers.tokenizer import BYTE_TOKENIZERS, tokenizer_of
from zaya_jax.data.tokenizers.tokenizer_files import (
    CHAT_TEMPLATE,
    GENERATION,
    TOKENIZER,
    as_json,
    files_of,
    read_files,
)
from zaya_jax.files import durable
from zaya_jax.files.json_files import parse_object
from zaya_jax.run_folder.names import TOKENIZER_FOLDER


def save_tokenizer(
    run_folder: str | os.PathLike[str], data: DataConfig, *, chat_template: str | None
) -> None:
    """Copies the tokenizer into a run folder, and the chat template if the run trains on chats.

    Args:
      run_folder: folder of the run.
      data: data section of the config, which names the tokenizer.
      chat_template: Jinja template of the chats; None for a run on documents only.

    Raises:
      UserError: if the generation config next to the tokenizer is invalid.
    """
    folder = pathlib.Path(run_folder) / TOKENIZER_FOLDER
    held = read_files(folder)
    # Copied only once: the original files may have been replaced before the run is resumed.
    is_missing = data.tokenizer not in BYTE_TOKENIZERS and TOKENIZER not in held
    files = held | (files_of(data.tokenizer) if is_missing else {})
    if chat_template is not None:
        files |= {CHAT_TEMPLATE: chat_template.encode(), GENERATION: _ends_turns(files, data, chat_template)}
    # Unchanged files are not written again, so resuming a run leaves its folder untouched.
    new = {name: content for name, content in files.items() if held.get(name) != content}
    if new:
        durable.make_folder(folder)
    # Write tokenizer.json last: if it exists, all files do.
    for name, content in sorted(new.items(), key=lambda file: file[0] == TOKENIZER):
        durable.write(folder / name, content)


def _ends_turns(files: Mapping[str, bytes], data: DataConfig, chat_template: str) -> bytes:
    """A generation config that ends an answer at the end of its turn, as `zaya generate --chat` does."""
    tokenizer = tokenizer_of(data)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("bos", "eos", "pad")}
    listed = parse_object(files[GENERATION], GENERATION) if GENERATION in files else {}
    turn_ends = ChatFormat(ChatTemplate(CHAT_TEMPLATE, chat_template), tokenizer).turn_ends.ids
    ends = end_ids_of(
        tokenizer, turn_ends=turn_ends, listed=read_end_ids(listed.get("eos_token_id"), GENERATION)
    )
    # Fields of the original file take precedence, except the end tokens.
    known = {name: value for name, value in (ids | listed).items() if value is not None}
    return as_json(known | {"eos_token_id": list(ends) if len(ends) > 1 else tokenizer.eos_id})


def with_saved_tokenizer(run_folder: str | os.PathLike[str], data: DataConfig) -> DataConfig:
    """Returns the data section with the tokenizer that the run folder contains, if it contains one."""
    kept = pathlib.Path(run_folder) / TOKENIZER_FOLDER / TOKENIZER
    if data.tokenizer in BYTE_TOKENIZERS or not kept.is_file():
        return data
    return dataclasses.replace(data, tokenizer=str(kept))


def saved_chat_template(run_folder: str | os.PathLike[str]) -> str | None:
    """Path of the chat template in a run folder; None for a run on documents only."""
    kept = pathlib.Path(run_folder) / TOKENIZER_FOLDER / CHAT_TEMPLATE
    return str(kept) if kept.is_file() else None
